"""Large runs: prompts drawn into a folder that survives, and what is made of it."""

from jaxspec.evaluation.records import (
    Prompt,
    Run,
    Sample,
    Source,
    intact,
    read_prompts,
    read_run,
    read_samples,
)

__all__ = [
    "Prompt",
    "Run",
    "Sample",
    "Source",
    "intact",
    "read_prompts",
    "read_run",
    "read_samples",
]
