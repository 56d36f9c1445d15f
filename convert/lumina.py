"""Puts the models of Lumina-mGPT together; what `jaxspec convert lumina` does."""

import typer

from jaxspec.commands_checkpoints import lumina

if __name__ == "__main__":
    typer.run(lumina)
