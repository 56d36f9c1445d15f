"""Published scores, by the libraries that made them: FID, CLIP score and HPSv2.

Numbers are comparable with those of one protocol only; each names its own. Networks
come from local files, and nothing is downloaded. Needs `jaxspec[scores]`.

    FID   lantern  clean-fid: centre-cropped, Lanczos to 256, bicubic to 299
          sjd      pytorch-fid: not cropped, resized bilinearly inside the network
    CLIP  lantern  ViT-B/32, Lanczos to 256, "A photo depicts" in front; the cosine
          sjd      ViT-B/16, bilinear to 299; 100 times the cosine, at least 0
    HPSv2          ViT-H/14 with the weights of HPSv2 or 2.1; 100 times the cosine
"""

import importlib
import itertools
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image, ImageOps

from jaxspec.evaluation import measures
from jaxspec.evaluation.intervals import Estimate, normal
from jaxspec.evaluation.records import sha256
from jaxspec.evaluation.results import Place, Results
from jaxspec.evaluation.scores import Score, check_count, not_scored, of_pictures

LEAST_FID = 2048  # pictures: as many as features, or the covariance is singular
LEAST_PAIRS = 30  # for a mean over pictures
RESAMPLES = 20  # of FID; each takes the roots of 2048 x 2048 matrices
BATCH = 32
PROTOCOLS = ("lantern", "sjd")


@dataclass(frozen=True)
class Network:
    """What looks at pictures.

    Attributes:
      name: of it.
      weights: the hash of its file.
      resize: how pictures come to its size.
      images: features [n, F] of pictures.
      texts: features [n, F] of texts; None if it reads none.
    """

    name: str
    weights: str
    resize: str
    images: Callable[[Sequence[Image.Image]], np.ndarray]
    texts: Callable[[Sequence[str]], np.ndarray] | None = None

    def about(self) -> dict[str, Any]:
        return {"network": self.name, "weights": self.weights, "resize": self.resize}


def fid(
    results: Results,
    reference: str | Path,
    network: Network,
    *,
    protocol: str,
    force: bool = False,
) -> Score:
    """FID to a folder of pictures, or to `mu` and `sigma` of an .npz.

    Raises:
      ValueError: too few pictures, or no usable reference.
    """
    places = list(results.drawn)
    check_count("FID", results, len(places), LEAST_FID, force, forced=2)
    kind = f"{Path(reference).name}, {{}}"
    mean, cov, kind = _moments(Path(reference), network, kind, force)
    x = _features(network, (_picture(results, place) for place in places))
    estimate = _distance(x.astype(np.float64), mean, cov)
    return Score(
        "FID",
        *estimate,
        better="lower",
        count=len(places),
        reference=kind,
        protocol=protocol,
        missing=not_scored(results, places),
        **network.about(),
    )


def text_score(
    results: Results,
    network: Network,
    *,
    name: str,
    protocol: str,
    prefix: str = "",
    scale: float = 1,
    least: float | None = None,
    force: bool = False,
) -> Score:
    """The mean cosine of each picture with its own prompt, times `scale`.

    Args:
      results: the run.
      network: that reads texts, too.
      name: of the score.
      protocol: whose numbers it is comparable with.
      prefix: stands before every prompt.
      scale: of the cosine.
      least: what lower cosines count as.
      force: scores too few pictures, too.

    Raises:
      ValueError: too few pictures, or the network reads no texts.
    """
    if network.texts is None:
        raise ValueError(f"{network.name} reads no texts")
    places = list(results.drawn)
    check_count(name, results, len(places), LEAST_PAIRS, force)
    texts = {prompt.id: prefix + prompt.text for prompt in results.prompts}
    pictures = _features(network, (_picture(results, place) for place in places))
    words = [texts[prompt] for prompt, _ in places]
    parts = [words[i : i + BATCH] for i in range(0, len(words), BATCH)]
    read = np.concatenate([network.texts(part) for part in parts])
    cosine = np.sum(_unit(pictures) * _unit(read), axis=1)
    values = scale * (cosine if least is None else np.maximum(cosine, least))
    return of_pictures(
        results,
        name,
        dict(zip(places, map(float, values), strict=True)),
        better="higher",
        reference="the prompts",
        protocol=protocol,
        **network.about(),
    )


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _picture(results: Results, place: Place) -> Image.Image:
    return Image.fromarray(results.image(place))


def _features(network: Network, pictures: Iterator[Image.Image]) -> np.ndarray:
    parts = []
    while part := list(itertools.islice(pictures, BATCH)):
        parts.append(network.images(part))
    return np.concatenate(parts)


def _moments(
    reference: Path, network: Network, kind: str, force: bool
) -> tuple[np.ndarray, np.ndarray, str]:
    """Mean and covariance of the reference's features, and what it is."""
    if reference.suffix == ".npz" and reference.is_file():
        with np.load(reference) as arrays:
            if not {"mu", "sigma"} <= set(arrays):
                raise ValueError(f"{reference} must have mu and sigma")
            digest = sha256(reference)[:12]
            return arrays["mu"], arrays["sigma"], kind.format(f"moments {digest}")
    endings = {".png", ".jpg", ".jpeg", ".webp"}
    found = sorted(reference.iterdir()) if reference.is_dir() else []
    files = [path for path in found if path.suffix.lower() in endings]
    if len(files) < (2 if force else LEAST_FID):
        raise ValueError(
            "the reference must be an .npz of mu and sigma, or a folder of "
            f"{LEAST_FID:,} pictures or more, and {reference} has {len(files):,}"
        )

    def opened() -> Iterator[Image.Image]:
        for path in files:
            with Image.open(path) as image:
                yield image.convert("RGB")

    x = _features(network, opened()).astype(np.float64)
    return x.mean(0), np.cov(x.T), kind.format(f"{len(files):,} pictures")


def _distance(x: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> Estimate:
    """With an interval of the bootstrap's standard error, as `frechet_estimate`."""
    to = lambda y: measures.frechet_of_moments(y.mean(0), np.cov(y.T), mean, cov)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(x), (RESAMPLES, len(x)))
    return normal(to(x), float(np.std([to(x[i]) for i in rows], ddof=1)))


# The networks, each as its library has it.


def inception(weights: str | os.PathLike, protocol: str) -> Network:
    """FID's network.

    Args:
      weights: for lantern, `inception-2015-12-05.pt` of clean-fid; for sjd,
        `pt_inception-2015-12-05-6726825d.pth` of pytorch-fid.
      protocol: "lantern" or "sjd".

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds other weights, or none.
      ModuleNotFoundError: a library is not installed.
    """
    path, torch = _file(weights, "*inception-2015*"), _library("torch")
    if protocol == "lantern":
        resizer = _library("cleanfid.resize").build_resizer("clean")
        wrapper = _library("cleanfid.inception_torchscript").InceptionV3W
        named = _named(path, "inception-2015-12-05.pt")
        with _reading(path, "clean-fid"), named as folder:
            model = wrapper(str(folder), download=False)

        def prepared(image: Image.Image) -> np.ndarray:
            return resizer(np.asarray(_square(image, 256))).transpose(2, 0, 1)

        name, resize = (
            "Inception-v3 (clean-fid)",
            "centre crop, Lanczos 256, bicubic 299",
        )
        read = model
    else:
        module = _library("pytorch_fid.inception")
        with _reading(path, "pytorch-fid"):
            state = torch.load(path, map_location="cpu", weights_only=True)
            # Its constructor would download them.
            with mock.patch.object(
                module, "load_state_dict_from_url", lambda *a, **k: state
            ):
                model = module.InceptionV3()
        prepared = lambda image: np.asarray(image).transpose(2, 0, 1) / np.float32(255)
        name, resize = "Inception-v3 (pytorch-fid)", "bilinear 299 in the network"
        read = lambda x: model(x)[0].flatten(1)
    model.eval()

    def images(pictures: Sequence[Image.Image]) -> np.ndarray:
        batch = np.stack([prepared(image) for image in pictures]).astype(np.float32)
        with torch.no_grad():
            return read(torch.from_numpy(batch)).numpy()

    return Network(name, sha256(path), resize, images)


def clip(weights: str | os.PathLike, kind: str, resize: str) -> Network:
    """A CLIP network of open_clip.

    Args:
      weights: its file, of OpenAI's (ViT-B-32, ViT-B-16) or HPSv2's weights (ViT-H-14).
      kind: as open_clip calls it.
      resize: what is done before open_clip's own preparation: "lanczos 256", "bilinear
        299" or "" for nothing.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds other weights, or none.
      ModuleNotFoundError: a library is not installed.
    """
    path, torch, library = _file(weights, "*"), _library("torch"), _library("open_clip")
    # OpenAI's were trained with another activation than open_clip's default.
    with _reading(path, f"open_clip's {kind}"):
        model, _, prepare = library.create_model_and_transforms(
            kind, pretrained=str(path), force_quick_gelu=kind.startswith("ViT-B")
        )
    model.eval()
    tokenizer = library.get_tokenizer(kind)
    before: dict[str, Callable[[Image.Image], Image.Image]] = {
        "": lambda image: image,
        "lanczos 256": lambda image: ImageOps.contain(
            image, (256, 256), Image.Resampling.LANCZOS
        ),
        "bilinear 299": lambda image: image.resize(
            (299, 299), Image.Resampling.BILINEAR
        ),
    }

    def images(pictures: Sequence[Image.Image]) -> np.ndarray:
        batch = torch.stack([prepare(before[resize](image)) for image in pictures])
        with torch.no_grad():
            return model.encode_image(batch).float().numpy()

    def texts(words: Sequence[str]) -> np.ndarray:
        with torch.no_grad():
            return model.encode_text(tokenizer(list(words))).float().numpy()

    told = f"{resize}, then " * bool(resize) + "open_clip's bicubic 224"
    return Network(f"CLIP {kind} (open_clip)", sha256(path), told, images, texts)


@contextmanager
def _reading(path: Path, library: str) -> Generator[None]:
    """Libraries fail in ways of their own on a file that is not theirs."""
    try:
        yield
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} cannot be read as {library} weights: {said[:200]}"
        ) from error


@contextmanager
def _named(path: Path, name: str) -> Generator[Path]:
    """A folder in which the file has the name that a library asks for."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).symlink_to(path.resolve())
        yield Path(folder)


def _square(image: Image.Image, side: int) -> Image.Image:
    least = min(image.size)
    return ImageOps.fit(image, (least, least)).resize(
        (side, side), Image.Resampling.LANCZOS
    )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{name} cannot be imported ({error}): pip install 'jaxspec[scores]'"
        ) from None


def _file(weights: str | os.PathLike, pattern: str) -> Path:
    """The file itself, or the one in the folder."""
    path = Path(weights)
    found = sorted(path.glob(pattern)) if path.is_dir() else [path]
    if len(found) != 1 or not found[0].is_file():
        raise FileNotFoundError(f"no file of weights at {weights}, or more than one")
    return found[0]
