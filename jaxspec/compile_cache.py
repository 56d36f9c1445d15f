"""Keeping compiled programs between processes, and seeing what compiles."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax


def user_cache() -> Path:
    """`jaxspec` in the user's cache folder: `$XDG_CACHE_HOME`, or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxspec"


def use_compile_cache(folder: str | os.PathLike | None = None) -> Path:
    """Makes JAX keep and reuse compiled programs, small ones too.

    The command line does this. In a program of yours, call it before the first
    computation. Nothing changes if a cache is already configured.

    Args:
      folder: where; by default `user_cache()`.

    Returns:
      The folder in use.
    """
    configured = jax.config.values["jax_compilation_cache_dir"]
    if configured is not None:
        return Path(configured)
    folder = user_cache() if folder is None else folder
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Path(folder)


@contextmanager
def compilations() -> Generator[list[str]]:
    """Names of the programs that compile within, or are read from the cache.

    The list is filled at the end.
    """
    log, names = _log(), []
    before = len(log)
    yield names
    names.extend(log[before:])


@cache
def _log() -> list[str]:
    """Names of all programs since the first call, in order."""
    log: list[str] = []

    def note(event: str, duration_secs: float, **about) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            log.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    return log
