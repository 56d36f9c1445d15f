"""The family's text side: word pieces and their vectors, reduced from MiniLM.

    python -m experiments.emoji.text_table OUTDIR

writes `text.safetensors` (`table`, float16 [V, 128]) and `tokenizer.json`. The vectors
are MiniLM's static input embeddings, minus their mean, on their first 128 principal
components, scaled as one to a root mean square of 1. Pieces that no text in the Latin
script uses are left out; all others split every text as MiniLM splits it.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

PAD, UNKNOWN = "[PAD]", "[UNK]"
WIDTH = 128


def is_kept(piece: str) -> bool:
    """Whether a piece is in the Latin script, or a mark or sign used with it.

    A piece can only be a part of words that have all its characters, so a rule by
    character never changes how a word of kept characters is split.
    """
    named = len(piece) > 2 and piece[0] == "[" and piece[-1] == "]"  # [CLS], [unused7]
    return not named and all(ord(c) < 0x250 or 0x2000 <= ord(c) < 0x2300 for c in piece)


def reduce_tokenizer(spec: dict) -> tuple[dict, np.ndarray]:
    """Leaves out pieces, templates, padding, truncation and special tokens.

    Args:
      spec: a WordPiece `tokenizer.json`.

    Returns:
      The new one, with dense ids, [PAD] 0 and [UNK] 1, both out of reach of any text
      (but for words that cannot be split, which become [UNK]); and the old ids of its
      pieces from 2 on.
    """
    old = spec["model"]["vocab"]
    kept = sorted((p for p in old if is_kept(p)), key=old.__getitem__)
    vocab = {piece: i for i, piece in enumerate([PAD, UNKNOWN, *kept])}
    new = {
        **spec,
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "post_processor": None,
        "model": {**spec["model"], "vocab": vocab},
    }
    return new, np.array([old[p] for p in kept])


def principal_components(x: np.ndarray, width: int) -> np.ndarray:
    """Projects rows [N, D] on their first components: [N, width], of RMS 1 in all."""
    x = x.astype(np.float64) - x.mean(0, dtype=np.float64)
    _, axes = np.linalg.eigh(x.T @ x)
    axes = axes[:, ::-1][:, :width]
    # the sign of an axis is the linear algebra library's whim
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), np.arange(width)])
    x = x @ axes
    return x / np.sqrt(np.square(x).mean())


def build(
    embeddings: np.ndarray, spec: dict, width: int = WIDTH
) -> tuple[np.ndarray, dict]:
    """Reduces a WordPiece tokenizer and the input embeddings of its pieces.

    Args:
      embeddings: [old V, D].
      spec: the tokenizer's `tokenizer.json`.
      width: of the new vectors, at most D.

    Returns:
      The table, float16 [V, width], rows [PAD] and [UNK] zero: an unknown word says
      nothing; and the `tokenizer.json` that its rows belong to.
    """
    spec, old_ids = reduce_tokenizer(spec)
    table = np.zeros((len(old_ids) + 2, width), np.float16)
    table[2:] = principal_components(embeddings[old_ids], width)
    return table, spec


def write(folder: Path, table: np.ndarray, spec: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "text.safetensors.tmp"
    save_file({"table": table}, partial)
    os.replace(partial, folder / "text.safetensors")
    partial = folder / "tokenizer.json.tmp"
    Tokenizer.from_str(json.dumps(spec)).save(str(partial), pretty=False)
    os.replace(partial, folder / "tokenizer.json")


def main() -> None:
    from experiments.emoji import minilm  # needs its package, the rest does not

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    spec = json.loads((minilm.package_folder() / "tokenizer.json").read_text())
    embeddings = minilm.weights()["embeddings.word_embeddings.weight"]
    table, new = build(embeddings, spec)
    write(folder, table, new)
    print(
        f"{len(table)} of {len(embeddings)} pieces, {table.nbytes / 1e6:.2f} MB "
        f"in {folder}"
    )


if __name__ == "__main__":
    main()
