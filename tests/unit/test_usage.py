"""du, forget --free and KeepBytes: what each needs is what a gc frees without it, and nothing is counted twice."""

import random

import pytest
import torch

from kit.objects import keys_of
from snapstore import (
    InvalidInputError,
    KeepBytes,
    KeepLast,
    KeepSteps,
    NotFoundError,
    SaveOptions,
    SnapshotManager,
)
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.protocol import forget
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


# --- forget --free


def tried(repository, target):
    """Return the result of forget_to_free; None if so much cannot be freed."""
    before = repository.snapshots()
    try:
        return repository.forget_to_free(target)
    except InvalidInputError:
        assert repository.snapshots() == before
        return None


def freed_by_gc(repository):
    before = sum(files(repository).values())
    repository.gc()
    return before - sum(files(repository).values())


@pytest.mark.parametrize("seed", range(4))
def test_forget_to_free_frees_what_it_says_and_no_snapshot_too_many(seed):
    with made() as repository:
        history(repository, seed)
        repository.tag("b@1", "paper")
        target = random.Random(seed).randrange(40_000, 90_000)
        while (result := tried(repository, target)) is None:
            target = target * 2 // 3
        assert result.forgotten
        assert result.frees_bytes >= target
        for snapshot in result.forgotten:
            repository.unforget(f"id:{snapshot.id}")
            assert repository.du().unneeded_bytes < target, "this one need not go"
            repository.forget_snapshots([f"id:{snapshot.id}"], force=True)
        assert freed_by_gc(repository) == result.frees_bytes
        left = {s.ref for s in repository.snapshots()}
        newest = {max((s for s in repository.snapshots() if s.run == run), key=lambda s: s.seq).ref for run in "abc"}
        assert {"b@1", *newest} <= left
        assert repository.check(level="restore").ok


def test_what_policies_keep_goes_last_and_the_last_policy_first():
    with made() as repository:
        for step in range(8):  # nothing is shared
            repository.save({"w": floats(9000, step)}, run="r", step=step, full=True)
        repository.save({"w": floats(9000, 99)}, run="r", step=1, full=True)  # 1 is superseded, and then the newest
        repository.set_policies("r", [KeepSteps([2]), KeepLast(4)])
        size = repository.du("snapshot").rows[0].freed_bytes
        order = []
        for count in range(1, 8):
            result = repository.forget_to_free((count - 1) * size + size // 2, dry_run=True)
            order += [s.step for s in result.forgotten if s.step not in order]
        assert order[:4] == [0, 1, 3, 4]  # superseded or kept by no policy, the oldest first
        assert order[4:] == [5, 6, 7]  # kept by the last policy
        assert [s.step for s in repository.forget_to_free(7 * size + size // 2, dry_run=True).forgotten][-1] == 2
        assert len(repository.snapshots()) == 9, "a dry run writes nothing"
        with pytest.raises(InvalidInputError, match="at most"):
            repository.forget_to_free(9 * size)
        assert len(repository.snapshots()) == 9


def test_what_gc_frees_anyway_counts():
    with made() as repository:
        history(repository, 1)
        repository.forget_snapshots(["a@0", "a@1"], force=True)
        waiting = repository.du().unneeded_bytes
        assert waiting > 0
        result = repository.forget_to_free(waiting)
        assert (result.forgotten, result.frees_bytes) == ([], waiting)
        for wrong in (0, -1, True, 1.5, "1G"):
            with pytest.raises(InvalidInputError, match="free_bytes"):
                repository.forget_to_free(wrong)
        with pytest.raises(NotFoundError):
            repository.forget_to_free(1, run="nowhere")


def test_what_a_running_save_has_put_is_not_free():
    with made() as repository:
        history(repository, 1)
        waiting = repository.du().unneeded_bytes
        assert waiting == 0
        put = repository.store.put

        def looked(key, data, **options):
            put(key, data, **options)
            if key.startswith("manifests/"):
                assert repository.du().unneeded_bytes == 0
                assert repository.forget_to_free(4000, dry_run=True).forgotten

        repository.store.put = looked
        repository.save({"w": floats(9000, 77)}, run="d", step=0)
        del repository.store.put


def test_one_that_is_tagged_meanwhile_stays_and_frees_nothing(monkeypatch):
    with made() as repository:
        history(repository, 2)
        wanted = repository.forget_to_free(3000, dry_run=True)
        first, real = wanted.forgotten[0], forget.revisions.forget
        monkeypatch.setattr(
            forget.revisions,
            "forget",
            lambda *args, **more: (repository.tag(f"id:{first.id}", "x"), real(*args, **more))[1],
        )
        result = repository.forget_to_free(3000)
        assert first.id not in {s.id for s in result.forgotten}
        assert freed_by_gc(repository) == result.frees_bytes < wanted.frees_bytes


# --- KeepBytes


def objects_of(repository, snapshot):
    """Return what a snapshot needs: its list, its manifests, and the packs of their chunks."""
    return {name[0] if isinstance(name, tuple) else name for name in needed(repository, snapshot)}


@pytest.mark.parametrize("seed", range(8))
def test_keep_bytes_keeps_the_newest_that_fit(seed):
    """Forget the oldest one at a time, collect in a copy of the store, and count the files that only this run has."""
    rng = random.Random(seed)
    with made() as repository:
        history(repository, seed)
        for step in range(9, 14):
            shared = floats(4000, rng.randrange(3))  # some chunks of other snapshots, some new ones
            repository.save({"w": floats(3000, step), "v": shared}, run="b", step=step)
        repository.tag("b@10", "paper")
        of_run = [s for s in repository.snapshots() if s.run == "b"]
        stays = {s.id for s in repository.snapshots() if s.run != "b" or s.tags or s.step == 1}
        sizes = files(repository)
        free = set().union(*(objects_of(repository, s) for s in repository.snapshots() if s.id in stays))
        totals, seen = [], free
        for snapshot in reversed(of_run):
            seen = seen | objects_of(repository, snapshot)
            totals.append(sum(sizes[key] for key in seen - free))
        size = rng.choice([*totals, max(1, rng.choice(totals) - 1), rng.randrange(1, totals[-1])])
        most = max([count for count, total in enumerate(totals, 1) if total <= size], default=1)
        result = repository.forget([KeepBytes(size), KeepSteps([1])], run="b")
        expected = {s.id for s in of_run[-most:]} | (stays & {s.id for s in of_run})
        assert {s.id for s, _ in result.kept} == expected
        repository.gc()
        left = files(repository)
        assert sum(left[key] for key in left.keys() - free) == totals[most - 1]
        assert repository.check(level="restore").ok


def noted(read, keys):
    """Return a method of a store that also notes the key of each read."""
    return lambda key, *args, **more: (keys.append(key), read(key, *args, **more))[1]


def test_keep_bytes_of_a_manager_bounds_the_files_and_reads_no_manifest(monkeypatch):
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=SaveOptions(threads=2)) as repository:
        repository.save({"w": floats(9000, 500)}, run="other", step=0)
        fixed, reads = sum(files(repository).values()), []
        for name in ("get", "get_range"):
            monkeypatch.setattr(store, name, noted(getattr(store, name), reads))
        with SnapshotManager(repository, run="r", keep=KeepBytes(200_000)) as snapshots:
            for step in range(12):
                reads.clear()
                snapshots.save(step, {"w": floats(9000, step), "frozen": floats(9000, 100)})
                snapshots.wait_until_finished()
                read = [key for key in reads if key.startswith("manifests/")]
                assert len(read) == (step == 0), "the first save of a run looks for its chunks"
                taken = sum(files(repository).values()) - fixed
                assert taken <= 200_000
            assert snapshots.all_steps() == [9, 10, 11]
            assert taken > 140_000
    with Repository.open(store) as again:
        assert again.policies("r") == [KeepBytes(200_000)]


def test_forget_to_free_takes_first_what_keep_bytes_would_not_keep():
    with made() as repository:
        for step in range(6):
            repository.save({"w": floats(9000, step)}, run="r", step=step, full=True)
        size = repository.du("snapshot").rows[0].freed_bytes
        repository.set_policies("r", [KeepSteps([0]), KeepBytes(2 * size + size // 2)])
        result = repository.forget_to_free(3 * size + size // 2, dry_run=True)
        assert [s.step for s in result.forgotten] == [1, 2, 3, 4]


def test_keep_bytes_forgets_nothing_while_the_size_of_a_snapshot_is_not_known():
    with made() as repository:
        for step in range(3):
            repository.save({"w": floats(3000, step)}, run="a", step=step)
        other = repository.save({"w": floats(3000, 9)}, run="b", step=0)
        repository.store.delete([ref.key for ref in other.manifests])
        with Repository.open(repository.store) as fresh:
            with pytest.raises(NotFoundError, match=r"b@0: its size is not known"):
                fresh.forget([KeepBytes(1)], run="a")
            assert len(fresh.snapshots("a")) == 3
