"""Converts one published model; what `jaxspec convert model` does."""

import typer

from jaxspec.commands_checkpoints import model

if __name__ == "__main__":
    typer.run(model)
