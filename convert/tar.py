"""Puts the models of Tar together; what `jaxspec convert tar` does."""

import typer

from jaxspec.commands_checkpoints import tar

if __name__ == "__main__":
    typer.run(tar)
