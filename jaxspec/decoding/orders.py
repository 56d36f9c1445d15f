"""LPD's order schedule: which cells are drawn together, and in what order.

Locality-aware parallel decoding (LPD, arXiv 2507.01957, section 3.2): cells of a group
are drawn at once, each on its own, so they should be near what is drawn already and far
from one another. Groups grow as the picture does.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Cells with so much of their surroundings drawn come first. 1 is one direct neighbour.
NEAR = 1.0


def group_sizes(cells: int, steps: int) -> tuple[int, ...]:
    """How many cells each of `steps` groups has: 1, then more and more, by a cosine.

    Differences of n (1 - cos(pi k / 2 K)), rounded, at least 1; what that is too much
    or too little is taken from, or given to, the largest, from the end. These are the
    published schedules: 256 cells in 20 or 32 steps, 1,024 in 48.

    Raises:
      ValueError: there are fewer cells than steps, or no step.
    """
    if not 1 <= steps <= cells:
        raise ValueError(f"steps must be from 1 to the {cells} cells, not {steps}")
    done = cells * (1 - np.cos(np.pi / 2 * np.arange(steps + 1) / steps))
    sizes = np.maximum(1, np.round(np.diff(done)).astype(int))
    while (extra := int(sizes.sum()) - cells) != 0:
        last = len(sizes) - 1 - int(np.argmax(sizes[::-1]))
        sizes[last] -= np.sign(extra)
    if steps > 1 and sizes[0] != 1:
        sizes[-1] += sizes[0] - 1  # the first cell stands alone
        sizes[0] = 1
    return tuple(map(int, sizes))


def lpd_order(
    key: jax.Array, grid: tuple[int, int], sizes: tuple[int, ...], repulsion: int
) -> jax.Array:
    """An order of all cells, int32 [N] in raster numbers, group after group.

    The first cell is any. Of a group, the cells with the most drawn around them come
    first (the sum over drawn neighbours of 1 / distance, ties by lot), if that is
    `NEAR` or more, and if no cell of the group is within `repulsion` rows and columns;
    where none is left, the cell that is farthest from the group's others.

    Args:
      key: of the picture.
      grid: rows and columns.
      sizes: of the groups, static; together all cells.
      repulsion: 0 is none.
    """
    h, w = grid
    n = h * w
    cell = jnp.arange(n)
    row, column = cell // w, cell % w
    begins = np.zeros(n, bool)
    begins[np.cumsum((0, *sizes))[:-1]] = True

    def around(drawn):
        """The sum over drawn neighbours of 1 / distance, [N]."""
        p = jnp.pad(drawn.reshape(h, w).astype(jnp.float32), 1)
        at = lambda i, j: p[1 + i : 1 + i + h, 1 + j : 1 + j + w]
        straight = at(-1, 0) + at(1, 0) + at(0, -1) + at(0, 1)
        diagonal = at(-1, -1) + at(-1, 1) + at(1, -1) + at(1, 1)
        return (straight + diagonal * 0.5**0.5).reshape(n)

    def pick(state, inputs):
        drawn, worth, near, close, square = state
        number, first = inputs
        # A new group: how much is drawn around each cell. Different sums are more than
        # 0.1 apart, so that lots decide between equal ones only.
        lot = jax.random.uniform(jax.random.fold_in(key, number), (n,))
        score = around(drawn)
        worth = jnp.where(first, score + 0.1 * lot, worth)
        near = jnp.where(first, score >= NEAR, near)
        square = jnp.where(first, h * h + w * w, square)
        close &= ~first

        good = ~drawn & near & ~close
        farthest = ~drawn & (square == jnp.max(jnp.where(drawn, -1, square)))
        late = jnp.where(near, worth - 100, worth)  # the others of them first
        choice = jnp.where(jnp.any(good), good, farthest)
        order = jnp.where(jnp.any(good), worth, late)
        chosen = jnp.argmax(jnp.where(choice, order, -jnp.inf)).astype(jnp.int32)

        rows, columns = jnp.abs(row - row[chosen]), jnp.abs(column - column[chosen])
        close |= jnp.maximum(rows, columns) <= repulsion
        square = jnp.minimum(square, rows**2 + columns**2)
        drawn = drawn.at[chosen].set(True)
        return (drawn, worth, near, close, square), chosen

    none = jnp.zeros(n, bool)
    start = none, jnp.zeros(n), none, none, jnp.zeros(n, jnp.int32)
    inputs = jnp.arange(n), jnp.asarray(begins)
    return jax.lax.scan(pick, start, inputs)[1]
