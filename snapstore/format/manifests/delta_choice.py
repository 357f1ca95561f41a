"""Delta choice: whether a changed chunk is stored as a delta or full, so that a restore of it stays cheap.

In: estimated sizes, costs of chains, generations; numbers or arrays. Out: the decision, in the same form.
docs/design/chains.md says how the constants were measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import Column
from .chunk_table import ChunkTable

#: The most that the restore of a chunk may cost, as a multiple of the cost of its full blob alone.
DEFAULT_RESTORE_COST = 3.0
#: A delta must be smaller than the full chunk by this share, because every restore pays for one more read.
MIN_SAVING = 1 / 32
#: If at most this share of the elements changed, planes take more bytes than estimated from entropies, by this factor.
FEW_CHANGED_SHARE, FEW_CHANGED_EXCESS = 0.2, 1.25
#: The cost of a blob in a restore: its stored bytes, this share of the chunk's plain bytes, and LINK_BYTES.
PLAIN_SHARE = 1 / 128
LINK_BYTES = 128
#: No save makes a longer chain. The format allows chunk_table.MAX_CHAIN links, and compact joins chains.
MAX_LINKS = 160
#: The period of a chain is the number of links that its cost allows, plus 1. If it is at most this long, every chunk
#: has one turn in each period to be stored full. In longer periods, turns count only in the last quarter of the cost.
SHORT_PERIOD = 8
#: A skip is due when the links since the last skip cost more than this share of the cost that all links may have, or
#: are more than this many. Each chunk has its own limits, from one half of these to all, by its number.
SKIP_SHARE, SKIP_LINKS = 0.7, 40
#: A skip leaves out at least this many links.
MIN_SKIPPED = 4
#: A link counts as a skip if it has at least SKIP_RATIO times the mean bytes of the newer links, and at least
#: SKIP_GROWTH times the square root of n times, where the chunk's limits allow n links without a skip.
SKIP_RATIO, SKIP_GROWTH = 2, 2 / 3
SKIP_ROWS = 65536  # chains that one step examines
GOLDEN = (5**0.5 - 1) / 2


def cost(stored_bytes: Any, plain_bytes: Any, links: Any = 1) -> Any:
    """Return the cost of `links` blobs of one chunk in a restore [bytes].

    It is the bytes read, plus the bytes that could be read in the time of decoding.

    Args:
        stored_bytes: of all of them together.
        plain_bytes: of the chunk. All arguments are numbers or arrays.
    """
    return stored_bytes + links * (plain_bytes * PLAIN_SHARE + LINK_BYTES)


def delta_limit(restore_cost: float, full_cost: Any, base_cost: Any, plain_bytes: Any) -> Any:
    """Return the most stored bytes that a delta may take.

    Args:
        restore_cost: as in SaveOptions.
        full_cost: the cost of the full blob in the base's chain.
        base_cost: the cost of the base's whole chain.
        plain_bytes: of the chunk. All arguments but the first are numbers or arrays.
    """
    return restore_cost * full_cost - base_cost - cost(0, plain_bytes)


def pays(delta_bytes: Any, full_bytes: Any, limit_bytes: Any) -> Any:
    """Return whether to store a delta of about `delta_bytes` instead of `full_bytes`.

    Args:
        limit_bytes: the chunk's `delta_limit`. All arguments are numbers or arrays.
    """
    return (delta_bytes <= full_bytes * (1 - MIN_SAVING)) & (delta_bytes <= limit_bytes)


def most_bytes(full_bytes: Any, limit_bytes: Any) -> Any:
    """Return the most bytes of a delta that pays."""
    return np.minimum(full_bytes * (1 - MIN_SAVING), limit_bytes)


class ChainCosts:
    """The costs to restore chunks of a table [bytes], (n,) float64.

    Attributes:
        whole: of the whole chain.
        full: of its full blob alone.
        newest: of its newest blob, if that is a delta; else of a delta of 0 bytes.
    """

    def __init__(self, table: ChunkTable) -> None:
        self._table, self._plain, self._depths = table, table.lengths.astype(np.float64), table.depths
        self.whole = cost(table.chain_bytes, self._plain, table.ref_counts)
        self.full = cost(table.ref_lengths[table.starts[1:] - 1], self._plain)
        self.newest = cost(np.where(self._depths > 0, table.ref_lengths[table.starts[:-1]], 0), self._plain)

    def skips(self, restore_cost: float, numbers: Column) -> tuple[Column, Column]:
        """Return which chunks to store as a delta to an older chunk of their chain than the newest.

        Such a delta is a skip: it replaces several links, in fewer bytes than these have together. Its base is the
        chunk of the last skip, or the full chunk.

        Args:
            restore_cost: as in SaveOptions.
            numbers: (n,) of the chunks; they spread the skips over the saves.

        Returns:
            (rows (k,); for each row the reference at which the chain of the new base begins (k,)).
        """
        shares = 1 - numbers * GOLDEN % 1 / 2
        limits, most_links = shares * SKIP_SHARE * (restore_cost - 1) * self.full, shares * SKIP_LINKS
        spent = self.whole - self.full + self.newest
        due = np.flatnonzero((self._depths >= MIN_SKIPPED) & ((spent > limits) | (self._depths > most_links)))
        found = [self._skips_of(due[i : i + SKIP_ROWS], limits, most_links) for i in range(0, len(due), SKIP_ROWS)]
        rows, refs = zip(*found, strict=True) if found else ((due,), (due,))
        return np.concatenate(rows), np.concatenate(refs)

    def _skips_of(self, rows: Column, limits: Column, most_links: Column) -> tuple[Column, Column]:
        """Return the rows of chains that exceed a limit since their last skip, and their new bases' references."""
        table, counts = self._table, self._depths[rows] + 1
        lengths = table.ref_lengths[table.refs_of(rows)].astype(np.int64)
        begins = np.cumsum(counts) - counts
        newer = np.arange(len(lengths)) - np.repeat(begins, counts)  # how many links of the chain are newer
        newer_bytes = np.cumsum(lengths) - lengths
        newer_bytes -= np.repeat(newer_bytes[begins], counts)
        most = np.minimum(most_links[rows], limits[rows] / self.newest[rows])
        ratios = np.repeat(np.maximum(SKIP_RATIO, SKIP_GROWTH * np.sqrt(most)), counts)
        is_base = (lengths * newer >= ratios * newer_bytes) & (newer > 0)
        is_base[begins + counts - 1] = True
        at = np.flatnonzero(is_base)
        at = at[np.searchsorted(at, begins)]  # the newest base of each chain
        skipped, plain = newer[at], self._plain[rows]
        spent = cost(newer_bytes[at], plain, skipped) + self.newest[rows]
        chosen = (skipped >= MIN_SKIPPED) & ((spent > limits[rows]) | (skipped > most_links[rows]))
        return rows[chosen], (table.starts[rows] + skipped)[chosen]

    def delta_limits(self, rows: Column, restore_cost: float, above: Column | float = 0.0) -> Column:
        """Return the `delta_limit` of a delta to each of `rows`, (k,) int64.

        Args:
            rows: (k,) of the table.
            restore_cost: as in SaveOptions.
            above: (k,) the cost of further links on top of the delta.
        """
        limits = delta_limit(restore_cost, self.full[rows], self.whole[rows] + above, self._plain[rows])
        return np.asarray(np.maximum(limits, 0), np.int64)

    def may_grow(self, rows: Column, restore_cost: float, generation: int, numbers: Column) -> Column:
        """Return which chains may get one more link like their newest one, (k,) bool.

        A chain may not grow if the link would exceed its cost, or if it is its chunk's turn to be stored full. Turns
        spread the full chunks: else all chunks of a snapshot that was stored full would become full in one later save.

        Args:
            rows: (k,) of the table.
            restore_cost: as in SaveOptions.
            generation: of the new snapshot.
            numbers: (k,) of the chunks, by which they take turns.
        """
        full, link, depths = self.full[rows], self.newest[rows], self._depths[rows]
        room, spent = (restore_cost - 1) * full, self.whole[rows] - full + link
        period = 1 + np.minimum(room / link, MAX_LINKS).astype(np.int64)
        is_short = period <= SHORT_PERIOD
        since = (generation + numbers) % np.where(is_short, period, period // 4)  # saves since its last turn
        # at its last turn the chunk was still full, so the turn had no effect: another save of the period replaces it
        missed = is_short & (depths == since) & (depths == 1 + numbers // period % np.maximum(period - 1, 1))
        turn = (depths > 0) & (is_short | (spent > room * 3 / 4)) & (since == 0)
        fits: Column = (spent <= room) & (depths < MAX_LINKS) & ~(turn | missed)
        return fits
