"""Programs in bytes: another process, weights and prompts, the same tokens."""

import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.sampling import Sampling
from tests import toy

GRID, CODES, BATCH = (3, 3), 8, 2
METHODS = {"AR": jaxspec.AR(), "SCD": jaxspec.SCD(3)}


def keys(seed: int) -> jax.Array:
    return jaxspec.image_keys(seed, np.arange(BATCH), np.zeros(BATCH))


def target(seed: int) -> jaxspec.Target:
    """Weights and conditions by seed."""
    return toy.toy_target(GRID, CODES, BATCH, seed=seed, guidance=2.0, top_k=6)


@pytest.fixture(scope="module")
def programs():
    return {k: jaxspec.export_decode(x, target(0)) for k, x in METHODS.items()}


# What a fresh process draws: it must not trace a method.
FRESH = """
import sys
from pathlib import Path
import numpy as np
import jaxspec
from tests.test_exporting import METHODS, keys, target

for name, method in METHODS.items():
    decode = jaxspec.load_decode(Path(sys.argv[1], name).read_bytes())
    type(method).step = None
    decoded = decode(method, target(5), keys(7))
    np.savez(Path(sys.argv[1], name + ".npz"), **vars(decoded))
"""


def test_a_fresh_process_draws_the_same_of_other_weights(programs, tmp_path):
    for name, program in programs.items():
        (tmp_path / name).write_bytes(program)
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path)], check=True)
    for name, method in METHODS.items():
        want = vars(toy.decode_jitted(method, target(5), keys(7)))
        with np.load(tmp_path / f"{name}.npz", allow_pickle=True) as found:
            for field in want.keys() - {"newline"}:
                np.testing.assert_array_equal(found[field], want[field])
        other = jaxspec.load_decode(programs[name])(method, target(0), keys(7))
        assert (np.asarray(other.tokens) != np.asarray(want["tokens"])).any()


def test_what_it_was_not_made_of_is_refused_in_a_line(programs):
    decode, own = jaxspec.load_decode(programs["AR"]), target(0)
    warm = replace(own, sampling=Sampling.create(CODES, guidance=2.0, top_p=0.5))
    for method, given, with_keys, said in (
        (jaxspec.ZipAR(2), own, keys(0), "the method {'name': 'AR'}, and was called w"),
        (jaxspec.AR(), toy.toy_target((2, 3), CODES, 2), keys(0), "the network Trans"),
        (jaxspec.AR(), warm, keys(0), r"missing \['target/sampling/top_k'\], unexpec"),
        (jaxspec.AR(), own.of_images(lambda x: x[:1]), keys(0), r"not float32\[2, 4, "),
        (jaxspec.AR(), own, keys(0)[:1], r"keys must be \[2\] as .* not key<fry> \[1"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            decode(method, given, with_keys)
        assert "\n" not in str(error.value)
    for data in (b"", b"no program", programs["AR"][:-1000], programs["AR"][500:]):
        with pytest.raises(ValueError, match="are no exported program") as error:
            jaxspec.load_decode(data)
        assert "\n" not in str(error.value)
