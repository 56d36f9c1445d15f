"""The wheel: what is in it, and that it draws from a venv of its own."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.package

DRAW = """
import json, jaxspec
out = jaxspec.generate(jaxspec.load("emoji"), "red heart", size=32)
image = out.images[0]
print(json.dumps([jaxspec.__file__, image.shape, str(image.dtype), int(image.std())]))
"""


def run(*command, **options):
    """What a command prints; the test fails with all it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel; without isolation, so that nothing is fetched."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    run(*build, "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A venv with the wheel in it, and behind it what this Python has installed."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet",
        "--no-deps", "--no-index", str(wheel))  # fmt: skip
    # A plain path line: the .pth files of that folder, and so this checkout if it was
    # installed as editable, are not followed from there.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "behind.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """How to run a command where the checkout cannot be imported from."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return {"cwd": tmp_path_factory.mktemp("elsewhere"), "env": environment}


def test_wheel_carries_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("dist-info/METADATA"))
        facts = archive.read(metadata).decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"jaxspec", metadata.split("/")[0]}
    files = [path for path in ROOT.glob("jaxspec/**/*") if path.is_file()]
    there = {str(f.relative_to(ROOT)) for f in files if "__pycache__" not in f.parts}
    assert there == {name for name in names if name.startswith("jaxspec/")}
    assert "jaxspec/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in facts
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra)", facts, re.MULTILINE)
    assert "jax" in required and "torch" not in required


def test_command_runs_from_the_wheel(installed, outside):
    said = run(installed / "bin" / "jaxspec", "--version", **outside)
    assert re.fullmatch(r"jaxspec \d+\.\d+\.\d+\n", said)


def test_wheel_draws_from_outside_the_repository(installed, outside):
    said = run(installed / "bin" / "python", "-c", DRAW, **outside)
    file, shape, dtype, spread = json.loads(said.splitlines()[-1])
    assert Path(file).is_relative_to(installed)
    assert shape == [32, 32, 3] and dtype == "uint8" and spread > 0
