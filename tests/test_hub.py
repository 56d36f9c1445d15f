"""Names on the hub, through a stand-in for its library: nothing here is fetched."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoints import hub as hub_module
from jaxspec.checkpoints import read
from jaxspec.checkpoints.hub import local


class Hub:
    """A hub of some repositories, whose files lie in a folder; notes what is asked."""

    def __init__(self, folder: Path):
        self.folder, self.asked = folder, []

    def put(self, repository: str, *names: str) -> None:
        for name in names:
            path = self.folder / repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                save_file({"w": np.ones(2, np.float32)}, path)
            else:
                path.write_text("{}")

    def HfApi(self):
        return self

    def list_repo_files(self, repository):
        root = self.folder / repository
        if not root.is_dir():
            raise LookupError(f"404 Client Error.\n\nNo repository {repository}")
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())

    def hf_hub_download(self, repository, file):
        self.asked.append((repository, file))
        if file not in self.list_repo_files(repository):
            raise LookupError("404 Client Error.\n\nEntry Not Found")
        return str(self.folder / repository / file)

    def snapshot_download(self, repository, allow_patterns):
        self.asked.append((repository, allow_patterns))
        return str(self.folder / repository)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(hub_module, "_hub", lambda: hub)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return hub


def test_a_file_of_a_repository(hub):
    hub.put("csuhan/TA-Tok", "ta_tok.safetensors", "more/x.safetensors")
    for file in ("ta_tok.safetensors", "more/x.safetensors"):
        found = read(f"csuhan/TA-Tok/{file}")
        assert np.array_equal(found.tensors["w"], [1, 1])
        assert found.path.name == Path(file).name
        assert hub.asked[-1] == ("csuhan/TA-Tok", file)


def test_a_repository_is_a_folder(hub):
    texts = ["config.json", "merges.txt", "tokenizer.json"]
    others = ["README.md", "flax_model.msgpack", "onnx/model.safetensors"]
    bins = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
    hub.put("csuhan/Tar-1.5B", "model.safetensors", *texts, *others, bins[0])
    assert read("csuhan/Tar-1.5B").tensors.keys() == {"w"}
    assert hub.asked == [("csuhan/Tar-1.5B", [*texts, "model.safetensors"])]
    hub.put("google/old", *texts, *bins)
    local("google/old")
    assert sorted(hub.asked[-1][1]) == sorted(texts + bins)


def test_what_is_here_comes_first(hub):
    hub.put("csuhan/TA-Tok", "ta_tok.safetensors")
    here = Path("csuhan/TA-Tok/ta_tok.safetensors")
    here.parent.mkdir(parents=True)
    save_file({"mine": np.ones(1, np.float32)}, here)
    assert read(here).tensors.keys() == {"mine"}
    # A folder of that name is here, so that a slip of the pen stays one.
    with pytest.raises(FileNotFoundError, match="no file or folder csuhan/TA-Tok/x.pt"):
        read("csuhan/TA-Tok/x.pt")
    assert not hub.asked


@pytest.mark.parametrize(
    "name", ["x.pt", "runs/x.pt", "/a/b/c.pt", "../b/c.pt", "a/../c.pt", "a//c.pt",
             "~/b/c.pt", "a/b/c", "c", ".a/b", "a/b/"]
)  # fmt: skip
def test_what_is_no_name(hub, name):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        read(name)
    assert not hub.asked


def test_a_repository_of_several_models(hub):
    hub.put("csuhan/TA-Tok", "README.md", "ar_dtok_lp_256px.pth", "ta_tok.pth")
    with pytest.raises(
        ValueError, match=r"name a file, such as csuhan/TA-Tok/ar_dtok_lp_256px\.pth"
    ):
        read("csuhan/TA-Tok")


def test_what_cannot_be_fetched(hub, monkeypatch):
    message = r"a/b here, and it could not .*LookupError: 404 Client Error\. No repos"
    with pytest.raises(OSError, match=message):
        read("a/b")
    hub.put("a/b", "x.pt")
    with pytest.raises(
        OSError, match=r"a/b/y\.pt here.*Entry Not Found\); download it"
    ):
        read("a/b/y.pt")

    def absent():
        raise ModuleNotFoundError("huggingface_hub")

    monkeypatch.setattr(hub_module, "_hub", absent)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxspec\[hub\]"'):
        read("a/b/x.pt")
