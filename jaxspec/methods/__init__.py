"""Decoding methods, one module a published method."""

from jaxspec.methods.ar import AR
from jaxspec.methods.eagle import EAGLE, EAGLE2
from jaxspec.methods.flashar import FlashAR
from jaxspec.methods.gsd import GSD, Addition, Amplify
from jaxspec.methods.lantern import LANTERN, LANTERNPP
from jaxspec.methods.lpd import LPD
from jaxspec.methods.mulo import MuLo
from jaxspec.methods.pjd import PJD
from jaxspec.methods.scd import SCD
from jaxspec.methods.sjd import SJD
from jaxspec.methods.speculative import Speculative
from jaxspec.methods.ssd import SSD
from jaxspec.methods.zipar import ZipAR

__all__ = [
    "AR",
    "EAGLE",
    "EAGLE2",
    "GSD",
    "LANTERN",
    "LANTERNPP",
    "LPD",
    "PJD",
    "SCD",
    "SJD",
    "SSD",
    "Addition",
    "Amplify",
    "FlashAR",
    "MuLo",
    "Speculative",
    "ZipAR",
]
