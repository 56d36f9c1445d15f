"""Whether a picture has the colour that its caption names.

python -m experiments.methods.colours

prints in how many of the real drawings, and of what the tokenizer makes of them, this
finds the colour that is named: what it can tell at all.

A picture's colour is the median of its pixels that are not background, which is white.
Its name is that of the `train` drawing with the nearest colour, of those whose captions
name one. Captions that name white are left out, since a white thing on white is not
told from background, and so are those that name the colour of a part ("red hair").
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NAMES = (
    *("red", "orange", "yellow", "green", "blue", "purple", "pink"),
    *("brown", "black", "grey"),
)
PARTS = ("hair", "mahjong")  # captions in which only a part has the colour
BACKGROUND = 235  # the least channel of a pixel that is nearly white


def named(caption: str) -> str | None:
    """The colour that a caption names; None if it is none, or several."""
    words = {*re.findall("[a-z]+", caption.lower())}
    found = words & {*NAMES}
    return found.pop() if len(found) == 1 and not words & {*PARTS} else None


def main_colours(images: np.ndarray) -> np.ndarray:
    """The colour of each picture uint8 [N, H, W, 3]: [N, 3], white of blank ones."""
    out = np.full((len(images), 3), 255.0)
    for colour, pixels in zip(out, images.reshape(len(images), -1, 3), strict=True):
        drawn = pixels[pixels.min(1) <= BACKGROUND]
        if len(drawn):
            colour[:] = np.median(drawn, axis=0)
    return out


@dataclass(frozen=True)
class Examples:
    """Pictures whose colours have names, M of them.

    Attributes:
      colours: [M, 3] (see `main_colours`).
      names: str [M].
    """

    colours: np.ndarray
    names: np.ndarray

    @staticmethod
    def create(captions: list[str], images: np.ndarray) -> "Examples":
        """Of pictures uint8 [N, H, W, 3]; those whose captions name no colour drop."""
        names = [named(caption) for caption in captions]
        some = [i for i, name in enumerate(names) if name]
        return Examples(main_colours(images[some]), np.array(names)[some].astype(str))

    def names_of(self, images: np.ndarray) -> np.ndarray:
        """The names of pictures' colours, str [N]; "" of blank ones."""
        found = main_colours(images)
        gaps = np.square(found[:, None] - self.colours[None]).sum(-1)
        return np.where((found < 255).any(1), self.names[gaps.argmin(1)], "")

    def right(self, captions: list[str], images: np.ndarray) -> np.ndarray:
        """Whether each picture has the colour that its caption names, bool [N]."""
        wanted = [named(caption) or "" for caption in captions]
        return (self.names_of(images) == wanted) & (np.array(wanted) != "")


def main() -> None:
    """Of the real drawings that were held out, by split."""
    import jaxspec
    from experiments.emoji import data

    drawings, pipeline = data.load(Path("runs/emoji")), jaxspec.load("emoji")
    captions = np.array([drawings.caption(i) for i in range(len(drawings.label))])
    train = drawings.index("train")
    known = Examples.create(captions[train].tolist(), drawings.images[128][train])
    print(f"{len(known.names)} drawings of train")
    colour = np.array([named(caption) is not None for caption in captions])
    for split in ("val_concept", "test_pair", "test_concept"):
        some = np.flatnonzero(colour & (drawings.split == split))
        images, asked = drawings.images[128][some], captions[some].tolist()
        again = pipeline.images(pipeline.encode(images))
        real, tokens = (known.right(asked, x).sum() for x in (images, again))
        print(f"{split}: {real} of {len(some)} right, {tokens} through the tokenizer")


if __name__ == "__main__":
    main()
