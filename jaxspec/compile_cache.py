"""Keeping compiled programs between processes."""

import os
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
