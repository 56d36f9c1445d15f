"""A slow reference of MuLo-SD: one image, in loops and float64, over `Slow`."""

from itertools import product

import numpy as np

from jaxspec.decoding import ACCEPTED, DRAWN, RESAMPLED
from jaxspec.methods.mulo import MuLo
from tests.test_decoding import Slow


def around(rejected: np.ndarray, radius: int, how: str, clip: str) -> np.ndarray:
    """Cells [H, W] drawn again, by the words of `MuLo`."""
    h, w = rejected.shape
    rejects = [(i, j) for i, j in product(range(h), range(w)) if rejected[i, j]]
    out = np.zeros((h, w), bool)
    for (i, j), t in product(product(range(h), range(w)), rejects):
        near = max(abs(i - t[0]), abs(j - t[1])) <= radius
        if how == "forward":
            near &= (i, j) >= t
        if how == "raster":
            near = (i, j) >= min(rejects)
        if clip == "first":
            near &= (i, j) >= min(rejects)
        out[i, j] |= near
    return out


def islands_of(cells: np.ndarray) -> np.ndarray:
    """A number for each 8-connected part of cells [H, W], filled one by one."""
    numbers = np.full(cells.shape, -1)
    for start in np.argwhere(cells):
        border = [tuple(start)] if numbers[tuple(start)] < 0 else []
        while border:
            i, j = border.pop()
            inside = 0 <= i < cells.shape[0] and 0 <= j < cells.shape[1]
            if inside and cells[i, j] and numbers[i, j] < 0:
                numbers[i, j] = start[0] * cells.shape[1] + start[1]
                border += product(range(i - 1, i + 2), range(j - 1, j + 2))
    return numbers


class SlowMuLo(Slow):
    """MuLo-SD for one image, in loops and float64, by the words of its docstring."""

    def run(self, method: MuLo, low: "SlowDrafter", keeps, choose):
        """Tokens, origin and pass of each cell [N], and passes of target and drafter.

        Neither model is told more of the other than tokens.
        """
        (h, w), n = self.config.grid, self.config.cells
        self.tokens, self.fresh, self.number = {}, set(), 0
        self.passes, self.origin = [-1] * n, np.zeros(n, int)
        low_h, low_w = low.config.grid
        rows, drawn = method.rows or low_h, 0
        scale = h // low_h, w // low_w
        for top in range(0, low_h, rows):
            verified = np.array([self.tokens[u] for u in range(top * scale[0] * w)])
            verified = verified.reshape(-1, w)[:: scale[0], :: scale[1]]
            grid = low.draft(verified.ravel().tolist(), (top + rows) * low_w)
            drawn += rows * low_w - (top == 0) + (top > 0)
            drafts = grid.repeat(scale[0], 0).repeat(scale[1], 1).ravel()
            begin, end = top * scale[0] * w, (top + rows) * scale[0] * w
            self.round(method, dict(enumerate(drafts)), begin, end, keeps, choose)
        tokens = [self.tokens[u] for u in range(n)]
        return tokens, self.origin, self.passes, self.number, drawn

    def put(self, cell: int, token: int, seen) -> np.ndarray:
        """Feeds a token at a cell that sees others, and says what follows it."""
        p, x = self.config.prefix_length, self.p["token_embedding"][token]
        seen = [*range(p), *(p + c for c in seen if c < cell)]
        self.slots[p + cell], logits = self.feed(x, p + cell, seen)
        return logits

    def round(self, method: MuLo, drafts: dict, begin: int, end: int, keeps, choose):
        (h, w), n, size = self.config.grid, self.config.cells, end - begin
        block = range(begin, end)
        again = range(begin - size if method.refresh == "after" else begin, begin)
        late = {c for c in range(begin) if c not in self.fresh or c in again}
        self.tokens |= {u: drafts[u] for u in block}
        logits = {0: self.first}
        self.fresh |= late | {*range(begin - 1, begin)} - {-1}
        for c in sorted(late | {*range(begin - 1, end - 1)} - {-1}):
            logits[c + 1] = self.put(c, self.tokens[c], self.fresh | {*block})
        rejected = np.zeros(n, bool)
        for u in block:
            rejected[u] = not keeps(u, logits[u], drafts[u])
        redrawn = around(
            rejected.reshape(h, w), method.radius, method.expand, method.clip
        ).ravel()
        pending = {u for u in block if redrawn[u]}
        self.fresh |= {*block[:-1]} - pending
        for u in block:
            self.origin[u] = DRAWN if u in pending else ACCEPTED
            self.origin[u] = RESAMPLED if rejected[u] else self.origin[u]
        if 0 in pending:
            pending.remove(0)
            self.tokens[0] = choose(0, self.first)

        fed = -(-size // w // (method.rows_at_once or h))
        self.number += fed
        for u in {*block} - pending:
            self.passes[u] = self.number
        if method.refresh == "before" and pending:
            self.number += fed
            again = {*block[:-1]} - pending
            self.fresh |= again
            for c in sorted(again):
                self.put(c, self.tokens[c], self.fresh)
        self.redraw(method, pending, end, choose)

    def redraw(self, method: MuLo, pending: set, end: int, choose):
        (h, w), n = self.config.grid, self.config.cells
        labels = np.array([u in pending for u in range(n)]).reshape(h, w)
        labels = islands_of(labels).ravel()
        if method.order == "rows":
            labels = np.zeros(n, int)
        raster, stale = method.order == "raster", method.context == "stale"
        window = w if raster else min(method.window, w)
        most = 1 if raster else method.frontier or 2 * -(-w // method.window)
        while pending:
            self.number += 1
            now = [u for u in sorted(pending) if self.free(u, pending, window, labels)]
            inputs = {u - 1: u for u in now[:most]}
            due = [c for c in range(min(end, n - 1)) if c not in self.fresh | pending]
            inputs |= dict.fromkeys([c for c in due if c not in inputs][:most])
            new = {}
            for fed, u in sorted(inputs.items()):
                source = fed
                if fed in pending and not stale:
                    done = {c: 0 for c in range(end) if c not in pending}
                    source = self.stand_in(fed, done)
                seen = range(end) if stale else self.fresh
                logits = self.put(fed, self.tokens[source], seen)
                if fed not in pending:
                    self.fresh.add(fed)
                if u is not None:
                    new[u] = choose(u, logits)
            self.tokens |= new
            pending -= {*new}
            for u in new:
                self.passes[u] = self.number

    def free(self, u: int, pending: set, window: int, labels: np.ndarray) -> bool:
        w = self.config.grid[1]
        i, j = divmod(u, w)
        above = [(i - 1) * w + c for c in range(min(j + window, w))] if i else []
        above = [c for c in above if labels[c] == labels[u]]
        left = [u - 1] if j else []
        return not any(c in pending for c in above + left)


class SlowDrafter(Slow):
    """Draws rows in raster order behind others, which are fed first."""

    def draft(self, tokens: list[int], count: int) -> np.ndarray:
        p, logits = self.config.prefix_length, self.first
        for c in range(count):
            if c == len(tokens):
                tokens.append(self.choose(c, logits))
            x = self.p["token_embedding"][tokens[c]]
            if c < self.config.cells - 1:
                seen = [s for s in self.slots if s < p + c]
                self.slots[p + c], logits = self.feed(x, p + c, seen)
        return np.array(tokens).reshape(-1, self.config.grid[1])
