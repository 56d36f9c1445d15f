"""The script of docs/converting.md that records references, on transformers' models."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from tests.converting import run
from tests.torch.record import QWEN2, T5

PAGE = Path(__file__).parents[2] / "docs" / "converting.md"
SCRIPT = re.compile(r"^cat > record\.py <<'END'\n(.*?)^END$", re.DOTALL | re.MULTILINE)


def record(folder: Path, monkeypatch, call: str, **given) -> Path:
    """Runs the page's script as somebody would who fills in one call."""
    monkeypatch.chdir(folder)
    script = SCRIPT.search(PAGE.read_text())[1]
    before, save = script.split("# Such as, ")
    last = save.splitlines()[-1]
    exec(f"{before}\n{call}\n{last}", {"__name__": "record", **given})
    return folder / "reference.npz"


@pytest.mark.parametrize("kind", ["qwen2", "t5"])
def test_folders_of_transformers(tmp_path, monkeypatch, kind):
    """Saved as transformers saves them, converted, recorded and compared."""
    torch.manual_seed(0)
    tokens = torch.randint(64, (2, 12))
    if kind == "qwen2":
        config = transformers.Qwen2Config(**QWEN2)
        model = transformers.Qwen2ForCausalLM(config).eval()
        call = "language_model(model, tokens)"
    else:
        model = transformers.T5EncoderModel(transformers.T5Config(**T5)).eval()
        call = "text_encoder(model, tokens, seen)"
    for x in model.parameters():  # wide enough for the differences to show
        if x.ndim > 1:
            torch.nn.init.normal_(x, std=x.shape[1] ** -0.5)
    seen = torch.ones_like(tokens)
    seen[1, 7:] = 0
    model.save_pretrained(tmp_path / "source")
    given = {"model": model, "tokens": tokens, "seen": seen}
    reference = record(tmp_path, monkeypatch, call, **given)
    out = tmp_path / "out"
    converted = run("convert", "model", tmp_path / "source", "--out", out)
    assert converted.exit_code == 0, converted.output
    proof = run("parity", out, "--reference", reference)
    assert proof.exit_code == 0 and "ok" in proof.output, proof.output
