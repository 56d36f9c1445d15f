"""Slow references of methods: one image, in loops and float64, over `Slow`."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding import ACCEPTED, BONUS, DRAWN, RESAMPLED
from jaxspec.sampling import ACCEPT, DRAW, GUMBEL, INITIAL, cell_keys
from tests.test_decoding import Slow


class Chance:
    """All the chance that one image can meet, as tables.

    Attributes:
      draws: [attempt, cell, V], Gumbel noise to draw with; attempts are passes, and 0.
      coins: [attempt, cell], uniform, to accept with.
      lasting: [cell, V], Gumbel noise that belongs to the cell.
      codes: [cell], uniform codes.
    """

    def __init__(self, key: jax.Array, cells: int, codes: int):
        tables = _tables(key, cells, codes)
        self.draws, self.coins, self.lasting, self.codes = map(np.asarray, tables)


@partial(jax.jit, static_argnums=(1, 2))
def _tables(key: jax.Array, cells: int, codes: int):
    at = jnp.arange(cells)

    def table(purpose, sample):
        def one(attempt):
            return jax.vmap(sample)(cell_keys(key[None], at[None], purpose, attempt)[0])

        return jax.vmap(one)(at)  # there are no more passes than cells

    gumbel = lambda k: jax.random.gumbel(k, (codes,))
    code = lambda k: jax.random.randint(k, (), 0, codes)
    return (
        table(DRAW, gumbel),
        table(ACCEPT, jax.random.uniform),
        table(GUMBEL, gumbel)[0],
        table(INITIAL, code)[0],
    )


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Logits of the positive part of p - q, of log-probabilities."""
    rest = np.maximum(np.exp(p) - np.exp(q), 0)
    with np.errstate(divide="ignore"):
        return np.log(rest) if rest.any() else p


def board(cells: dict, grid: tuple[int, int]) -> np.ndarray:
    return np.array([cells[u] for u in range(grid[0] * grid[1])]).reshape(grid)


class SlowZipAR(Slow):
    """ZipAR's adaptive window, as its docstring says it."""

    def zipar(self, window: int, frontier: int, chance: Chance):
        """Tokens, pass and origin [H, W] of every cell, and how many were judged."""
        (h, w), p = self.config.grid, self.config.prefix_length
        tokens = {0: int(np.argmax(log_softmax(self.first) + chance.draws[0, 0]))}
        passes, origin, judged, number, candidate = {0: 0}, {0: DRAWN}, 0, 0, None
        while len(tokens) < h * w:
            number += 1
            now = [u for u in range(h * w) if self.ready(u, tokens, window)]
            inputs = {u - 1: u for u in now[:frontier]}
            due = [c for c in sorted(tokens) if p + c not in self.slots]
            inputs |= dict.fromkeys([c for c in due if c not in inputs][:1])
            new = {}
            for fed, u in sorted(inputs.items()):
                x = self.p["token_embedding"][tokens[self.stand_in(fed, tokens)]]
                seen = [s for s in self.slots if s < p + fed]
                slot, logits = self.feed(x, p + fed, seen)
                if fed in tokens:
                    self.slots[p + fed] = slot
                if u is None:
                    continue
                log_p, early = log_softmax(logits), fed not in tokens
                if candidate and candidate[0] == u:
                    _, x, log_q = candidate
                    same = chance.coins[number, u] < np.exp(log_p[x] - log_q[x])
                    if not same:
                        noise = chance.draws[number, u]
                        x = int(np.argmax(residual(log_p, log_q) + noise))
                    judged, come = judged + 1, ACCEPTED if same else RESAMPLED
                else:
                    same, come = False, DRAWN
                    x = int(np.argmax(log_p + chance.draws[0, u]))
                if early and not same:
                    candidate = u, x, log_p
                else:
                    new[u] = x
                    origin[u] = come
            tokens |= new
            passes |= dict.fromkeys(new, number)
        return *(board(x, (h, w)) for x in (tokens, passes, origin)), judged


class SlowPJD(Slow):
    """PJD, as the docstrings of `PJD` and of `decoding.rows` say it."""

    def pjd(self, method, most: int, chance: Chance):
        """Tokens, pass and origin [H, W] of every cell, and how many were judged."""
        (h, w), v = self.config.grid, self.config.vocab_size
        method = replace(method, window=min(method.window, w))
        self.tokens = {0: int(np.argmax(log_softmax(self.first) + chance.draws[0, 0]))}
        self.drafts = {}  # cell -> token, log_q
        passes, origin, judged, number = {0: 0}, {0: DRAWN}, 0, 0
        while len(self.tokens) < h * w:
            number += 1
            final = [sum(i * w + j in self.tokens for j in range(w)) for i in range(h)]
            top = min(i for i in range(h) if final[i] < w)
            if most > 1 and top > 0 and final[top] > 0:
                self.put(top * w - 1)
            new, rows = {}, []
            for i in range(top, min(h, top + most)):
                above = w if i == top else final[i - 1]
                is_open = above >= min(method.context, w)
                length = min(method.window, above - final[i]) if is_open else 0
                begin = i * w + final[i]
                self.begin(begin, length, method, chance, v)
                rows.append((begin, *self.row(begin, length, waits=final[i] > 0)))
            for begin, log_p, own in rows:
                judged += min(len(log_p), method.window - 1)
                is_top = begin // w == top
                at = partial(_at, chance, number)
                for u, x, come in self.verdict(begin, log_p, own, is_top, method, at):
                    new[u], origin[u] = x, come
            self.tokens |= new
            passes |= dict.fromkeys(new, number)
            self.drafts = {u: x for u, x in self.drafts.items() if u not in new}
        cells = (self.tokens, passes, origin)
        return *(board(x, (h, w)) for x in cells), judged

    def begin(self, begin: int, length: int, method, chance: Chance, codes: int):
        """First drafts, for the cells that have none."""
        for u in range(begin, begin + min(length, method.window - 1)):
            if u in self.drafts:
                continue
            if method.initial == "random":
                even = np.full(codes, -np.log(codes))
                self.drafts[u] = int(chance.codes[u]), even
            else:  # repeat-left
                x = self.fed(u - 1) if u == begin else self.drafts[u - 1][0]
                with np.errstate(divide="ignore"):
                    self.drafts[u] = x, np.log(np.arange(codes) == x)

    def fed(self, u: int) -> int:
        return self.tokens[self.stand_in(u, self.tokens)]

    def put(self, u: int):
        """Feeds a final cell; what follows it."""
        slot, logits = self.see(self.tokens[u], u, {})
        self.slots[self.config.prefix_length + u] = slot
        return logits

    def see(self, token: int, u: int, own: dict):
        """Feeds a token at cell u, which sees the final cells and `own` ones."""
        p, final = self.config.prefix_length, self.slots
        self.slots = final | own
        x = self.p["token_embedding"][token]
        out = self.feed(x, p + u, [s for s in self.slots if s < p + u])
        self.slots = final
        return out

    def row(self, begin: int, length: int, waits: bool) -> tuple[list, dict]:
        """Feeds a row's newest token and drafts: log-probabilities of `length` cells.

        Also the slots of the drafts, for they may be accepted.
        """
        p, log_p, own = self.config.prefix_length, [], {}
        for u in range(begin, begin + max(length, waits)):
            if u > begin:
                token = self.drafts[u - 1][0]
                own[p + u - 1], logits = self.see(token, u - 1, own)
            elif u - 1 in self.tokens:
                logits = self.put(u - 1)
            else:
                _, logits = self.see(self.fed(u - 1), u - 1, {})
            log_p.append(log_softmax(logits))
        return log_p[:length], own

    def verdict(self, begin, log_p, own, is_top, method, chance):
        """Yields the cells that become final, and renews the drafts of the others."""
        p, drafted = self.config.prefix_length, min(len(log_p), method.window - 1)
        old = [self.drafts[begin + k] for k in range(drafted)]
        kept = [
            chance("coins", begin + k) < np.exp(log_p[k][x] - q[x])
            for k, (x, q) in enumerate(old)
        ]
        accepted = kept.index(False) if False in kept else drafted
        for k in range(accepted):
            yield begin + k, old[k][0], ACCEPTED
            if p + begin + k in own:  # the last draft of a short row is not fed
                self.slots[p + begin + k] = own[p + begin + k]
        first = begin + accepted  # the cell that is drawn
        move = accepted
        if accepted < drafted:
            rest = residual(log_p[accepted], old[accepted][1])
            x = int(np.argmax(rest + chance("draws", first)))
            if is_top:
                yield first, x, RESAMPLED
                move += 1
            else:
                self.drafts[first] = x, log_p[accepted]
        elif accepted < len(log_p):
            x = int(np.argmax(log_p[accepted] + chance("draws", first)))
            yield first, x, BONUS
        for k in range(accepted + 1, min(len(log_p), move + method.window - 1)):
            u = begin + k
            if method.coupling == "gumbel":
                x = int(np.argmax(log_p[k] + chance("lasting", u)))
            elif method.coupling == "independent" or k >= drafted:
                x = int(np.argmax(log_p[k] + chance("draws", u)))
            elif kept[k]:
                x = old[k][0]
            else:
                rest = residual(log_p[k], old[k][1])
                x = int(np.argmax(rest + chance("draws", u)))
            self.drafts[u] = x, log_p[k]


def _at(chance: Chance, number: int, table: str, u: int):
    x = getattr(chance, table)
    return x[u] if table == "lasting" else x[number, u]
