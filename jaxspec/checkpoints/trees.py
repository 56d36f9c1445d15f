"""Parameters as nested dictionaries, and as flat ones with paths for names.

A flat one names a parameter of all layers once, as files do: where layers are apart
(see `jaxspec.models.stacks`), it has a tuple of them under the name of their stack.
"""

from typing import Any

import jax

from jaxspec.models.stacks import LAYERS


def flatten(params: Any) -> dict[str, Any]:
    """Nested dictionaries to one, keys joined by slashes, in the tree's own order."""
    leaves = jax.tree.leaves_with_path(
        _by_name(params), is_leaf=lambda x: isinstance(x, tuple)
    )
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
    return _by_layer(out)


def _by_name(tree: Any) -> Any:
    """With layers that are apart as tuples under the names of their stacks."""
    if not isinstance(tree, dict):
        return tree
    out = {k: _by_name(x) for k, x in tree.items() if k != LAYERS}
    if LAYERS in tree:
        out |= jax.tree.map(lambda *layers: layers, *tree[LAYERS])
    return out


def _by_layer(tree: Any) -> Any:
    """The inverse of `_by_name`."""
    if not isinstance(tree, dict):
        return tree
    stacks = {k: x for k, x in tree.items() if isinstance(x, tuple)}
    out = {k: _by_layer(x) for k, x in tree.items() if k not in stacks}
    if stacks:
        layers = zip(*stacks.values(), strict=True)
        out[LAYERS] = tuple(dict(zip(stacks, x, strict=True)) for x in layers)
    return out
