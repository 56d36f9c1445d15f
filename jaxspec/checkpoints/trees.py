"""Parameters as nested dictionaries, and as flat ones with paths for names."""

from typing import Any

import jax


def flatten(params: Any) -> dict[str, Any]:
    """Nested dictionaries to one, keys joined by slashes, in the tree's own order."""
    leaves = jax.tree.leaves_with_path(params)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): leaf for path, leaf in leaves}


def unflatten(flat: dict[str, Any]) -> Any:
    """The inverse of `flatten`."""
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        *above, name = path.split("/")
        at = out
        for part in above:
            at = at.setdefault(part, {})
        at[name] = leaf
    return out
