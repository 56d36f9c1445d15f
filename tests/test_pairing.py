"""Which models belong together, on the published sizes."""

from dataclasses import replace

import pytest

from jaxspec.checkpoints.pairing import Decoder, VQFile, check_llamagen, check_tar
from jaxspec.models.qwen2 import Qwen2Config
from jaxspec.models.t5 import T5Config
from jaxspec.models.ta_tok import TaTokConfig, TowerConfig
from jaxspec.models.transformer import TransformerConfig
from jaxspec.models.vq import VQConfig

LP = TransformerConfig(
    vocab_size=16384,
    width=1280,
    depth=30,
    heads=20,
    hidden=3584,
    grid=(16, 16),
    prefix="features",
    prefix_length=729,
    prefix_width=1152,
    positions="learned",
)
XL = replace(
    LP, depth=36, prefix="caption", prefix_length=120, prefix_width=2048
)  # of the first stage, 256 px
B = replace(XL, prefix="class", prefix_length=1, prefix_width=1000, grid=(24, 24))
TOWER = TowerConfig(1152, 26, 16, 4304, 3, 14, 27, False)
TA_TOK = TaTokConfig(
    384, 65536, 1536, True, TOWER, replace(TOWER, channels=1536, patch=1, places=16)
)
QWEN2 = Qwen2Config(218_000, 1536, 28, 12, 2, 128, 8960, True)
FLAN_XL = T5Config(32128, 2048, 24, 32, 64, 5120)
VQ16 = VQFile("vq_ds16_t2i.pt", VQConfig())


def lp(size: int, **changed) -> Decoder:
    config = replace(LP, **{"grid": (size // 16, size // 16)} | changed)
    return Decoder(f"ar_dtok_lp_{size}px.pth", config, size)


def tar(*decoders: Decoder, vq=VQ16, ta_tok=TA_TOK, llm=QWEN2):
    check_tar(decoders, vq, ("ta_tok.pth", ta_tok), ("Tar-1.5B", llm))


def test_published_sizes_belong_together():
    tar(lp(256), lp(512), lp(1024))
    check_llamagen(Decoder("t2i", XL, 256), VQ16, ("flan-t5-xl", FLAN_XL))
    check_llamagen(
        Decoder("c2i_B_384.pt", B, 384), VQFile("vq_ds16_c2i.pt", VQConfig())
    )
    # Names that promise nothing are taken as they are.
    check_llamagen(Decoder("c2i_B_384.pt", B, 384), VQFile("mine.pt", VQConfig()))


def refused(message: str):
    start = "these models do not belong together; nothing was converted:\n.*"
    return pytest.raises(ValueError, match=f"(?s){start}{message}")


def test_pictures_of_another_tokenizer():
    chameleon = VQFile("vq.pt", VQConfig(codebook_size=8192))
    with refused("ar_dtok_lp_256px.pth draws from 16384 codes, and vq.pt has 8192 .*"):
        tar(lp(256), vq=chameleon)
    vq8 = VQFile("vq_ds8_c2i.pt", VQConfig(multipliers=(1, 2, 2, 4)))
    with refused(
        r"draws 24x24 cells for 384 px, and vq_ds8_c2i\.pt makes 8 px .*"
        r"\(published with vq_ds16_c2i\.pt\)"
    ):
        check_llamagen(Decoder("c2i_B_384.pt", B, 384), vq8)
    # The same network with other weights: only the name tells.
    with refused(r"vq_ds16_t2i\.pt is by its name the tokenizer of t2i models"):
        check_llamagen(Decoder("c2i_B_384.pt", B, 384), VQ16)


def test_conditions_of_another_model():
    with refused(r"takes features 1152 wide, and ta_tok\.pth gives 1024"):
        large = replace(TOWER, width=1024)
        tar(
            lp(256),
            ta_tok=replace(
                TA_TOK, encoder=large, decoder=replace(TA_TOK.decoder, width=1024)
            ),
        )
    with refused(r"takes 100 features, and ta_tok\.pth gives 729 or 169 or 81"):
        tar(lp(256, prefix_length=100))
    with refused("Tar-1.5B knows 65536 tokens, which do not hold the 65536 of"):
        tar(lp(256), llm=replace(QWEN2, vocab_size=65536))
    with refused("takes captions 2048 wide, and t5 gives 1024"):
        check_llamagen(
            Decoder("t2i", XL, 256), VQ16, ("t5", replace(FLAN_XL, width=1024))
        )
    with refused("c2i takes no captions"):
        check_llamagen(
            Decoder("c2i", B, 384), VQFile("vq.pt", VQConfig()), ("t5", FLAN_XL)
        )
    with refused("t2i takes no features"):
        tar(Decoder("t2i", XL, 256))


def test_sizes_of_one_family():
    with refused(r"ar_dtok_lp_256px\.pth and ar_dtok_lp_256px\.pth both draw 256 px"):
        tar(lp(256), lp(512), lp(256))
    with refused(r"take different conditions: prefix_length is 729 and 169"):
        tar(lp(256), lp(512, prefix_length=169))
    # All that is wrong, at once.
    with pytest.raises(ValueError) as error:
        tar(lp(256, vocab_size=8192, prefix_width=64), lp(512))
    assert len(str(error.value).splitlines()) == 1 + 3
