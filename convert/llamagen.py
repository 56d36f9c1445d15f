"""Puts the models of LlamaGen together; what `jaxspec convert llamagen` does."""

import typer

from jaxspec.commands_checkpoints import llamagen

if __name__ == "__main__":
    typer.run(llamagen)
