"""Delta choice: whether a changed chunk is stored as a delta or full, by what a restore of it may cost.

In: estimated sizes, what chains cost, generations; numbers or arrays. Out: the decision, in the same form. How the
constants were measured is in docs/design/chains.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Column
from .chunk_table import ChunkTable

#: The most that restoring a chunk may cost, as a multiple of restoring it stored full.
DEFAULT_RESTORE_COST = 3.0
#: A delta must be this much smaller than the full chunk, as every restore pays for one more read.
MIN_SAVING = 1 / 32
#: A restore pays for a blob: its stored bytes, this share of the chunk's plain bytes, and LINK_BYTES.
PLAIN_SHARE = 1 / 128
LINK_BYTES = 128
#: No chain is made longer: the format ends at chunk_table.MAX_CHAIN, and compact joins chains.
MAX_LINKS = 160
#: Where so few links fit into the cost, every chunk has its turn to be full in each period of them; where more fit, in
#: the last quarter of the period.
SHORT_PERIOD = 8
#: A skip is made once the links since the last one cost this share of what all links may, or once they are so many, and
#: at the latest then; a chunk's number says where between half of it and all.
SKIP_SHARE, SKIP_LINKS = 0.7, 40
#: It leaves out at least so many links. A link of twice the mean bytes of the newer ones counts as a skip.
MIN_SKIPPED, SKIP_RATIO = 4, 2
SKIP_ROWS = 65536  # chains looked at together
GOLDEN = (5**0.5 - 1) / 2


def cost(stored_bytes: Any, plain_bytes: Any, links: Any = 1) -> Any:
    """Return what a restore pays for `links` blobs of one chunk: bytes read, and decoding as bytes of the same time.

    Args:
        stored_bytes: of all of them together.
        plain_bytes: of the chunk. All arguments are numbers or arrays.
    """
    return stored_bytes + links * (plain_bytes * PLAIN_SHARE + LINK_BYTES)


def delta_limit(restore_cost: float, full_cost: Any, base_cost: Any, plain_bytes: Any) -> Any:
    """Return the most stored bytes that a delta may take.

    Args:
        restore_cost: as in SaveOptions.
        full_cost, base_cost: of the full blob of the base's chain, and of the whole chain.
    """
    return restore_cost * full_cost - base_cost - cost(0, plain_bytes)


def pays(delta_bytes: Any, full_bytes: Any, limit_bytes: Any) -> Any:
    """Return whether a delta of about `delta_bytes` is worth more than a full chunk of about `full_bytes`.

    Args:
        limit_bytes: the chunk's `delta_limit`. All arguments are numbers or arrays.
    """
    return (delta_bytes <= full_bytes * (1 - MIN_SAVING)) & (delta_bytes <= limit_bytes)


class ChainCosts:
    """The costs of restoring the chunks of a table, (n,) float64 each.

    Attributes:
        whole: of the chain.
        full: of its full blob alone.
        newest: of its newest blob, if that is a delta; else of the shortest delta.
    """

    def __init__(self, table: ChunkTable) -> None:
        self._table, self._plain, self._depths = table, table.lengths.astype(np.float64), table.depths
        self.whole = cost(table.chain_bytes, self._plain, table.ref_counts)
        self.full = cost(table.ref_lengths[table.starts[1:] - 1], self._plain)
        self.newest = cost(np.where(self._depths > 0, table.ref_lengths[table.starts[:-1]], 0), self._plain)

    def skips(self, restore_cost: float, numbers: Column) -> tuple[Column, Column]:
        """Return which chunks are to be stored as a delta to an older chunk of the chain than the newest.

        Such a delta, a skip, holds what the links that it leaves out say together, in fewer bytes. Its base is that of
        the oldest of them: the chunk of the last skip, or the full one.

        Args:
            numbers: (n,) of the chunks, which spread skips over the saves.

        Returns:
            (rows (k,), the reference of each where its base begins (k,)).
        """
        shares = 1 - numbers * GOLDEN % 1 / 2
        limits, most_links = shares * SKIP_SHARE * (restore_cost - 1) * self.full, shares * SKIP_LINKS
        spent = self.whole - self.full + self.newest
        due = np.flatnonzero((self._depths >= MIN_SKIPPED) & ((spent > limits) | (self._depths > most_links)))
        found = [self._skips_of(due[i : i + SKIP_ROWS], limits, most_links) for i in range(0, len(due), SKIP_ROWS)]
        rows, refs = zip(*found, strict=True) if found else ((due,), (due,))
        return np.concatenate(rows), np.concatenate(refs)

    def _skips_of(self, rows: Column, limits: Column, most_links: Column) -> tuple[Column, Column]:
        """Return which of some chains exceed one of their limits since the last skip, and the references of these."""
        table, counts = self._table, self._depths[rows] + 1
        lengths = table.ref_lengths[table.refs_of(rows)].astype(np.int64)
        begins = np.cumsum(counts) - counts
        newer = np.arange(len(lengths)) - np.repeat(begins, counts)  # how many links are newer
        newer_bytes = np.cumsum(lengths) - lengths
        newer_bytes -= np.repeat(newer_bytes[begins], counts)
        is_base = (lengths * newer >= SKIP_RATIO * newer_bytes) & (newer > 0)
        is_base[begins + counts - 1] = True
        at = np.flatnonzero(is_base)
        at = at[np.searchsorted(at, begins)]  # the newest one of each chain
        skipped, plain = newer[at], self._plain[rows]
        spent = cost(newer_bytes[at], plain, skipped) + self.newest[rows]
        chosen = (skipped >= MIN_SKIPPED) & ((spent > limits[rows]) | (skipped > most_links[rows]))
        return rows[chosen], (table.starts[rows] + skipped)[chosen]

    def delta_limits(self, rows: Column, restore_cost: float, above: Column | float = 0.0) -> Column:
        """Return the `delta_limit` of a delta to each of some chunks, (k,) int64.

        Args:
            above: (k,) what further links on top of the delta cost.
        """
        limits = delta_limit(restore_cost, self.full[rows], self.whole[rows] + above, self._plain[rows])
        return np.asarray(np.maximum(limits, 0), np.int64)

    def may_grow(self, rows: Column, restore_cost: float, generation: int, numbers: Column) -> Column:
        """Return which of some chains may become longer by a link like their newest one, (k,) bool.

        A chain whose cost is spent may not; nor one whose turn it is in this generation. By turns, the chunks of a
        snapshot that was stored full do not all become full again in the same later one.

        Args:
            rows: (k,) of the table.
            numbers: (k,) of the chunks, by which they take turns.
        """
        full, link, depths = self.full[rows], self.newest[rows], self._depths[rows]
        room, spent = (restore_cost - 1) * full, self.whole[rows] - full + link
        period = 1 + np.minimum(room / link, MAX_LINKS).astype(np.int64)
        is_short = period <= SHORT_PERIOD
        since = (generation + numbers) % np.where(is_short, period, period // 4)  # saves since its turn
        # at its turn it was full still, and nothing known of its deltas: another save of the period
        missed = is_short & (depths == since) & (depths == 1 + numbers // period % np.maximum(period - 1, 1))
        turn = (depths > 0) & (is_short | (spent > room * 3 / 4)) & (since == 0)
        fits: Column = (spent <= room) & (depths < MAX_LINKS) & ~(turn | missed)
        return fits
