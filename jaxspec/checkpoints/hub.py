"""Names on the Hugging Face hub where a file or a folder is expected.

`org/name/file.pth` is one file of a repository; `org/name` is its folder: the
configuration and the weights, of which `.safetensors` are preferred.
"""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

TORCH = (".pt", ".pth", ".bin", ".ckpt")
WEIGHTS = (".safetensors", *TORCH)  # of which files are read
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def local(path: str | os.PathLike) -> Path:
    """The path itself, or where a name on the hub was downloaded to.

    A name is looked up only where nothing here can be meant: there is no such path, and
    no folder that the name begins with.

    Raises:
      FileNotFoundError: neither a path nor a name.
      ModuleNotFoundError: a name, and huggingface_hub is not installed.
      OSError: it could not be fetched.
      ValueError: a repository of single files, none of which is named.
    """
    found, name = Path(path), str(path)
    if found.exists():
        return found
    repository, file = _split(name)
    if not repository or Path(repository.partition("/")[0]).exists():
        raise FileNotFoundError(f"no file or folder {name}")
    try:
        hub = _hub()
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"no file or folder {name}; to fetch it from Hugging Face: pip install "
            '"jaxspec[hub]"'
        ) from None
    if file:
        with _fetching(name):
            return Path(hub.hf_hub_download(repository, file))
    with _fetching(name):
        names = hub.HfApi().list_repo_files(repository)
    wanted = _folder_files(repository, names)
    with _fetching(name):
        return Path(hub.snapshot_download(repository, allow_patterns=wanted))


def _hub() -> Any:
    return import_module("huggingface_hub")  # an extra, and slow to import


def _split(name: str) -> tuple[str, str]:
    """The repository and the file (if any) of a name; nothing if it is none."""
    parts = name.split("/")
    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    is_file = name.endswith(WEIGHTS)
    plain = all(parts) and ".." not in parts
    if not plain or not _REPOSITORY.fullmatch(repository) or is_file != bool(file):
        return "", ""
    return repository, file


def _folder_files(repository: str, names: list[str]) -> list[str]:
    """Which files make the folder of a model: texts, and weights of one kind."""
    top = [name for name in names if "/" not in name]
    weights = [n for n in top if re.fullmatch(r"model.*\.safetensors", n)]
    weights = weights or [n for n in top if re.fullmatch(r"pytorch_model.*\.bin", n)]
    if not weights:
        single = [name for name in names if name.endswith(WEIGHTS)]
        raise ValueError(
            f"{repository} is not one model; name a file, such as "
            f"{repository}/{(single or ['FILE'])[0]}"
        )
    # Tokenizers and the indexes of shards are among the texts.
    return [n for n in top if n.endswith((".json", ".txt"))] + weights


@contextmanager
def _fetching(name: str) -> Generator[None]:
    """Errors of the network and of the hub, of whatever kind, as one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise OSError(
            f"no file or folder {name} here, and it could not be fetched from Hugging "
            f"Face ({type(error).__name__}: {reason[:200]}); download it where there "
            "is a network, and give its path"
        ) from error
