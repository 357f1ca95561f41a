"""du: what each row needs is what a gc frees without it, and what each part needs is counted once."""

import random

import pytest
import torch

from kit.objects import keys_of
from snapstore import InvalidInputError, NotFoundError, SaveOptions
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.repository import Repository
from snapstore.storage.memory import MemoryStore


def made():
    return Repository.create(MemoryStore(), chunk_bytes=1024, options=SaveOptions(threads=2))


def floats(count, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def files(repository):
    """Return the sizes of packs and manifests."""
    store = repository.store
    return {key: len(store.get(key)) for prefix in ("packs/", "manifests/") for key in keys_of(store, prefix)}


def history(repository, seed):
    """Save three runs that share tensors: in a run, between runs, and with deltas."""
    rng = random.Random(seed)
    frozen = floats(9000, 1)
    for run in ("a", "b", "c"):
        weights, number = floats(5000, ord(run)), rng.randint(2, 4)
        for step in range(number):
            weights = weights + 1e-3 * floats(5000, step)
            state = {"base": {"w": frozen}, "head": {"w": weights, "new": floats(3000, rng.randrange(9))}, "step": step}
            repository.save(
                state, run=run, step=step, parent=rng.choice([None, "a@0"]) if run != "a" and not step else None
            )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("by", ["run", "snapshot"])
def test_freed_is_what_gc_frees_without_the_row(by, seed):
    """Forget the snapshots of one row, collect, and compare the sizes of the files."""
    with made() as repository:
        history(repository, seed)
        before = files(repository)
        found = repository.du(by)
        assert found.stored_bytes == sum(before.values())
        assert found.unneeded_bytes == 0
        row = random.Random(seed).choice(found.rows)
        chosen = [s for s in repository.snapshots() if row.id in ("", s.id) and (row.id or s.run == row.name)]
        assert row.logical_bytes == sum(s.logical_bytes for s in chosen)
        repository.forget_snapshots([f"id:{s.id}" for s in chosen], force=True)
        assert repository.du().unneeded_bytes == row.freed_bytes
        repository.gc()
        assert sum(before.values()) - sum(files(repository).values()) == row.freed_bytes
        assert row.freed_bytes <= row.unshared_bytes <= row.stored_bytes


def needed(repository, snapshot):
    """Return the sizes of what a snapshot needs: blobs by (pack, offset), and its manifests."""
    found = {key: len(repository.store.get(key)) for key in snapshot.named_keys}
    for ref in snapshot.manifests:
        m = manifest.read(repository.store, ref, None)
        columns = zip(m.table.ref_packs, m.table.ref_offsets, m.table.ref_lengths, strict=True)
        found |= {(pack_key(m.header.pack_names[number]), int(at)): int(length) for number, at, length in columns}
    return found


@pytest.mark.parametrize("seed", range(4))
def test_unshared_is_what_lies_in_no_other_row(seed):
    """Of a pack that one row alone needs, its footer counts too."""
    with made() as repository:
        history(repository, seed)
        whole, all_needed = files(repository), {s.id: needed(repository, s) for s in repository.snapshots()}
        for row in repository.du("snapshot").rows:
            own = all_needed[row.id]
            others = set().union(*(found for id_, found in all_needed.items() if id_ != row.id))
            packs = {name[0] for name in own if isinstance(name, tuple)}
            alone = packs - {name[0] for name in others if isinstance(name, tuple)}
            footers = sum(whole[pack] - sum(n for name, n in own.items() if name[0] == pack) for pack in alone)
            assert row.unshared_bytes == sum(size for name, size in own.items() if name not in others) + footers
            assert row.stored_bytes == sum(own.values()) + footers


def test_a_frozen_base_is_counted_once_and_shared_by_the_runs_that_fork():
    with made() as repository:
        frozen = {"base": {"w": floats(50_000, 1)}}
        repository.save({**frozen, "lora": floats(500, 2)}, run="a", step=0)
        repository.save({**frozen, "lora": floats(500, 3)}, run="b", step=0, parent="a@0")
        runs = {row.name: row for row in repository.du().rows}
        assert set(runs) == {"a", "b"}
        assert runs["a"].stored_bytes > 100_000 < runs["b"].stored_bytes
        assert runs["b"].unshared_bytes < 6000
        parts = {row.name: row for row in repository.du("part").rows}
        assert parts["base"].logical_bytes == 2 * 200_000
        assert parts["base"].stored_bytes < 200_000
        assert parts["base"].freed_bytes is None
        tensors = {row.name: row for row in repository.du("tensor", run="b").rows}
        assert tensors["base.w"].logical_bytes == 200_000
        assert tensors["base.w"].stored_bytes == parts["base"].stored_bytes
        (alone,) = repository.du(run="b").rows
        assert alone == runs["b"]


def test_equal_tensors_of_two_parts_are_unshared_in_neither():
    with made() as repository:
        repository.save(
            {"a": {"w": floats(9000, 1)}, "b": {"w": floats(9000, 1)}, "c": {"w": floats(9000, 2)}}, run="r", step=0
        )
        a, b, c = (row for row in repository.du("part").rows if row.name in "abc")
        assert a.stored_bytes == b.stored_bytes > 0 == a.unshared_bytes == b.unshared_bytes
        assert c.unshared_bytes == c.stored_bytes


def test_an_empty_repository_and_wrong_arguments():
    with made() as repository:
        assert repository.du().rows == repository.du("tensor").rows == []
        with pytest.raises(NotFoundError, match="nowhere"):
            repository.du(run="nowhere")
        with pytest.raises(InvalidInputError, match="by"):
            repository.du("layer")
        repository.save({"n": 3}, run="r", step=0)
        (row,) = repository.du("snapshot").rows
        assert row.name == "r@0"
        assert row.freed_bytes == row.stored_bytes == row.unshared_bytes > 0
        assert "r@0" in repository.du("snapshot")._repr_html_()
        assert repository.du("part").cells == []
