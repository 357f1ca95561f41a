"""The reader fills batches by the sizes of rows; the time to compute sizes grows with the rows that are asked for."""

import numpy as np
import pytest

from snapstore.chunks.reader import _ChunkSizes
from snapstore.format.manifests.chunk_table import COLUMNS, ChunkTable


def table_of(chunks, rng):
    """Return a table of chains of 1 to 5 references."""
    counts = rng.integers(1, 6, chunks)
    refs = int(counts.sum())
    columns = {name: np.zeros((refs, *shape), dtype) for name, (dtype, shape) in COLUMNS.items()}
    columns |= {"digests": np.zeros((chunks, 16), np.uint8), "ref_counts": counts.astype(np.uint16)}
    columns |= {"lengths": rng.integers(1, 1 << 26, chunks).astype(np.uint32)}
    columns |= {"ref_lengths": rng.integers(1, 1 << 32, refs).astype(np.uint32)}
    return ChunkTable(**columns)


def test_sizes_are_those_of_every_row():
    rng = np.random.default_rng(1)
    tables, sizes = [table_of(n, rng) for n in (1, 7, 400)], _ChunkSizes()
    for _ in range(200):
        table = tables[rng.integers(len(tables))]
        rows = rng.integers(0, len(table), rng.integers(1, 5))
        refs = [table.ref_lengths[table.starts[row] : table.starts[row + 1]] for row in rows]
        wanted = [int(table.lengths[row]) + sum(map(int, own)) for row, own in zip(rows, refs, strict=True)]
        assert sizes.of(table, rows).tolist() == wanted


def test_few_rows_do_not_pay_for_a_large_table(monkeypatch):
    """The sizes of a few rows are computed without the sizes of the whole table.

    Before, a slice of one tensor of a terabyte took 30 ms and 130 MiB for these.
    """
    table, sizes, looked = table_of(10_000, np.random.default_rng(2)), _ChunkSizes(), []
    whole = ChunkTable.chain_bytes.fget
    monkeypatch.setattr(ChunkTable, "chain_bytes", property(lambda self: looked.append(1) or whole(self)))
    for row in range(600):
        sizes.of(table, np.array([row]))
    assert not looked
    for row in range(600, 10_000):
        sizes.of(table, np.array([row]))
    assert len(looked) == 1, "after many rows, all sizes are computed once"


@pytest.mark.parametrize("kept", [True, False])
def test_a_new_table_at_the_place_of_an_old_one_has_its_own_sizes(kept):
    sizes, rng, before = _ChunkSizes(), np.random.default_rng(3), []
    for _ in range(50):
        table = table_of(3, rng)
        before += [table] if kept else []
        rows = np.arange(3)
        assert (sizes.of(table, rows) == table.lengths + table.chain_bytes).all()
        del table
