"""The family's text side: word pieces and their vectors, reduced from MiniLM.

    python -m experiments.emoji.text_table OUTDIR

writes `text.safetensors` (`table`, float16 [V, 64]) and `tokenizer.json`. The vector of
a piece is MiniLM's sentence vector of that piece alone (nearer to its meaning than the
input embedding: "lime" stands beside "lemon"), minus the mean, on the 64 principal
components of the pieces that captions use, scaled as one to a root mean square of 1.
Pieces that no text in the Latin script uses are left out; all others split every text
as MiniLM splits it.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from experiments.emoji import data

PAD, UNKNOWN = "[PAD]", "[UNK]"
WIDTH = 64


def is_kept(piece: str) -> bool:
    """Whether a piece is in the Latin script, or a mark or sign used with it.

    A piece can only be a part of words that have all its characters, so a rule by
    character never changes how a word of kept characters is split.
    """
    named = len(piece) > 2 and piece[0] == "[" and piece[-1] == "]"  # [CLS], [unused7]
    return not named and all(ord(c) < 0x250 or 0x2000 <= ord(c) < 0x2300 for c in piece)


def reduce_tokenizer(spec: dict, words: Sequence[str] = ()) -> tuple[dict, np.ndarray]:
    """Leaves out pieces, templates, padding, truncation and special tokens.

    Args:
      spec: a WordPiece `tokenizer.json`.
      words: words that become pieces of their own, after all others.

    Returns:
      The new one, with dense ids, [PAD] 0 and [UNK] 1, both out of reach of any text
      (but for words that cannot be split, which become [UNK]); and the old ids of its
      pieces from 2 on.
    """
    old = spec["model"]["vocab"]
    kept = sorted((p for p in old if is_kept(p)), key=old.__getitem__)
    vocab = {piece: i for i, piece in enumerate([PAD, UNKNOWN, *kept, *words])}
    new = {
        **spec,
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "post_processor": None,
        "model": {**spec["model"], "vocab": vocab},
    }
    return new, np.array([old[p] for p in kept])


def principal_components(x: np.ndarray, width: int, fit: np.ndarray) -> np.ndarray:
    """Projects rows [N, D] on components of the rows `fit`: [N, width], of RMS 1."""
    x = x.astype(np.float64)
    x = x - x[fit].mean(0)
    _, axes = np.linalg.eigh(x[fit].T @ x[fit])
    axes = axes[:, ::-1][:, :width]
    # the sign of an axis is the linear algebra library's whim
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), np.arange(width)])
    x = x @ axes
    return x / np.sqrt(np.square(x).mean())


def build(
    vectors: np.ndarray,
    spec: dict,
    captions: list[str],
    words: dict[str, np.ndarray],
    width: int = WIDTH,
) -> tuple[np.ndarray, dict]:
    """Reduces a WordPiece tokenizer and the vectors of its pieces.

    Args:
      vectors: [old V, D]; rows of pieces that are left out are not read.
      spec: the tokenizer's `tokenizer.json`.
      captions: texts whose pieces the components are fitted to.
      words: words that become pieces, with their vectors [D].
      width: of the new vectors, at most D.

    Returns:
      The table, float16 [V, width], rows [PAD] and [UNK] zero: an unknown word says
      nothing; and the `tokenizer.json` that its rows belong to.
    """
    spec, old_ids = reduce_tokenizer(spec, list(words))
    vectors = np.stack([*vectors[old_ids], *words.values()])
    encoded = Tokenizer.from_str(json.dumps(spec)).encode_batch(captions)
    used = np.unique([i for e in encoded for i in e.ids if i > 1]) - 2
    table = np.zeros((len(vectors) + 2, width), np.float16)
    table[2:] = principal_components(vectors, width, used)
    return table, spec


def piece_vectors(spec: dict) -> np.ndarray:
    """MiniLM's sentence vector of each piece alone, [old V, 384]; zero if left out."""
    from experiments.emoji import minilm  # needs its package, the rest does not

    vocab = spec["model"]["vocab"]
    ids = reduce_tokenizer(spec)[1]
    out = np.zeros((len(vocab), minilm.WIDTH), np.float32)
    texts = [[vocab["[CLS]"], int(i), vocab["[SEP]"]] for i in ids]
    out[ids] = minilm.encode_pieces(texts)[1]
    return out


def build_family() -> tuple[np.ndarray, dict]:
    """The emoji family's table and tokenizer; style words are pieces of their own."""
    from experiments.emoji import minilm

    spec = json.loads((minilm.package_folder() / "tokenizer.json").read_text())
    captions = [text for r in data.metadata() for text in (r["label"], r["tags"])]
    words = [w for w in data.STYLES if w not in spec["model"]["vocab"]]
    vectors = dict(zip(words, minilm.encode(words)[1], strict=True))
    return build(piece_vectors(spec), spec, captions, vectors)


def write(folder: Path, table: np.ndarray, spec: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "text.safetensors.tmp"
    save_file({"table": table}, partial)
    os.replace(partial, folder / "text.safetensors")
    partial = folder / "tokenizer.json.tmp"
    Tokenizer.from_str(json.dumps(spec)).save(str(partial), pretty=False)
    os.replace(partial, folder / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    table, spec = build_family()
    write(folder, table, spec)
    print(f"{len(table)} pieces, {table.nbytes / 1e6:.2f} MB in {folder}")


if __name__ == "__main__":
    main()
