"""The command that all tables share."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import jaxspec
from experiments.tables.layout import (
    SMOKE,
    Column,
    Group,
    Row,
    draw_group,
    page,
    score,
    score_group,
    speed,
)
from experiments.tables.layout import passes as count_passes
from jaxspec.evaluation.prompts import load_prompts
from jaxspec.evaluation.scorers import Options

EMOJI_COLUMNS = (
    Column("speed-up", "emoji", speed),
    Column("passes", "emoji", count_passes),
    Column("R@5", "emoji", score("emoji R@5")),
    Column("FD", "emoji", score("emoji FD")),
)


def emoji_group(rows: Sequence[Row]) -> Group:
    """The same methods on the family that the package carries."""
    return Group("emoji, 128 px", 128, rows, EMOJI_COLUMNS)


def prompt_set(group: Group, name: str | None, prompts: str | None) -> tuple[str, str]:
    """A prompt set of a group as its columns call it, and the file of its prompts.

    Raises:
      ValueError: the group has no such set, or it has several and none is named, or
        there is no file.
    """
    known = ", ".join(group.prompts)
    if name is None and len(group.prompts) > 1:
        raise ValueError(f"--name is missing: which prompts these are, one of {known}")
    name = group.prompts[0] if name is None else name
    if name not in group.prompts:
        raise ValueError(
            f"--name is one of {known}, not {name!r}: no column of {group.slug} would "
            "show it"
        )
    if prompts is None and name != "emoji":
        raise ValueError(f"--prompts is missing: the file of {name}'s prompts")
    return name, prompts or "emoji"


def command(title: str, note: str, groups: Sequence[Group], emoji: Group) -> None:
    """Runs the table's command line."""
    known = {group.slug: group for group in (*groups, emoji)}

    def main(
        group: Annotated[
            str | None,
            typer.Option(help=f"Draw one of {', '.join(known)}; else only print."),
        ] = None,
        family: Annotated[
            str, typer.Option(help="The family's name or folder.")
        ] = "emoji",
        prompts: Annotated[
            str | None,
            typer.Option(
                help="A file of prompts, for `jaxspec evaluate run`.  [default: the "
                "emoji captions, for the emoji group]",
                show_default=False,
            ),
        ] = None,
        name: Annotated[
            str | None,
            typer.Option(
                help="Which of the group's prompt sets these are.  [default: the only "
                "one]",
                show_default=False,
            ),
        ] = None,
        size: Annotated[
            int | None,
            typer.Option(help="Pixels a side, to try a group on a small family."),
        ] = None,
        limit: Annotated[int | None, typer.Option(help="Prompts, at most.")] = None,
        num_images: Annotated[int, typer.Option(help="Pictures a prompt.")] = 1,
        batch_size: Annotated[int, typer.Option(help="Pictures at once.")] = 1,
        runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path(
            "runs/tables"
        ),
        out: Annotated[Path | None, typer.Option(help="Write it here, too.")] = None,
        smoke: Annotated[
            bool,
            typer.Option(
                "--smoke",
                help="The whole way on a few emoji captions; numbers mean nothing.",
            ),
        ] = False,
    ) -> None:
        """Prints the table: published numbers beside those that were measured."""
        try:
            if smoke:
                group, limit, batch_size = emoji.slug, SMOKE, 4
                runs = runs / "smoke"
            if group is not None:
                if group not in known:
                    raise ValueError(f"--group is one of {', '.join(known)}")
                asked = known[group]
                name, prompts = prompt_set(asked, name, prompts)
                jaxspec.use_compile_cache()
                chosen = load_prompts(prompts)[:limit]
                how = {"images": num_images, "batch_size": batch_size}
                asked = replace(asked, size=size or asked.size)
                draw_group(asked, runs, family, name, chosen, **how)
                if group == emoji.slug:
                    score_group(emoji, runs, name, ["emoji"], Options(force=smoke))
            text = page(title, note, (*groups, emoji), runs)
        except (ValueError, OSError) as error:
            raise SystemExit(f"error: {error}") from None
        with contextlib.suppress(BrokenPipeError):
            print(text)
        if out is not None:
            out.write_text(text, encoding="utf8")
            print(f"wrote {out}")

    typer.run(main)
