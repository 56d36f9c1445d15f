"""Strict JAX for every test, and a compile cache that lives as long as pytest's own."""

import importlib.util
import os

import jax
import pytest

# Comparisons with torch, and what needs a browser: `make test-torch` and
# `make test-browser` install what they need.
NEEDS = {"torch": "torch", "browser": "playwright"}
collect_ignore = [
    folder for folder, name in NEEDS.items() if not importlib.util.find_spec(name)
]


# A compiled program takes 30 memory maps or so, and Linux gives a process 65,530: then
# the compiler crashes. Long before that, programs are forgotten; the cache on disk has
# them.
MOST_MAPS = 25_000


def pytest_configure(config):
    # A folder for each worker: one that read a file while another wrote it would warn,
    # and warnings are errors here.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    cache = str(config.cache.mkdir(f"jax-{worker}"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache  # for what the tests start
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A shape that broadcasts by adding axes is a mistake more often than not.
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly(request):
    """Programs run a few times here: XLA optimises longer than that saves.

    A module marked `optimised` runs them as users do.
    """
    optimised = request.node.get_closest_marker("optimised") is not None
    jax.config.update("jax_disable_most_optimizations", not optimised)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    if memory_maps() > MOST_MAPS:
        jax.clear_caches()


def memory_maps() -> int:
    """How many memory maps this process has; 0 where that is not told."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0
