"""The first save of a run without a parent stores no chunk that the newest snapshots of other runs have."""

from __future__ import annotations

import pytest
import torch

from kit.faults import FaultStore
from kit.objects import keys_of
from kit.ranks import save_shared
from kit.repositories import check_clean, created, opened, save
from snapstore import InvalidInputError, SaveOptions, StorageError
from snapstore.protocol.session import MOST_MANIFESTS
from snapstore.repository import Repository
from snapstore.storage.memory import MemoryStore

OPTIONS = SaveOptions(threads=1)


def made(store=None, **options):
    options = SaveOptions(threads=1, pack_bytes=1 << 17, **options)
    return Repository.create(store or MemoryStore(), chunk_bytes=4096, options=options)


def floats(count, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def lora(seed, base=1):
    """Return the state of a LoRA run: a frozen base, an adapter and its optimizer."""
    return {
        "model": {"base": floats(100_000, base), "lora": floats(3000, seed)},
        "optimizer": {"exp_avg": floats(3000, 1000 + seed), "exp_avg_sq": floats(3000, 2000 + seed)},
        "step": seed,
    }


def refuse(key):
    raise StorageError(f"{key}: refused")


def equal(got, expected):
    return all(
        torch.equal(got[part][name], tensor)
        for part in ("model", "optimizer")
        for name, tensor in expected[part].items()
    )


def requests(store):
    """Return how many reads of manifests and records, and listings of all records, a store has answered since."""
    found = [
        sum(op.startswith("get") and key.startswith("manifests/") for op, key in store.log),
        sum(op.startswith("get") and key.startswith("snapshots/") for op, key in store.log),
        sum((op, key) == ("list", "snapshots/") for op, key in store.log),
    ]
    store.log.clear()
    return found


def test_ten_runs_over_one_frozen_base_store_it_once():
    with made() as repository:
        for number in range(10):
            saved = repository.save(lora(number), run=f"r{number}", step=0)
            own = 4 * 9000
            if number:
                assert saved.stored_bytes <= 1.1 * own + 4096, "its own tensors, and manifests"
                assert saved.parent is None
                assert saved.bases == [repository.snapshot("r0@0").id if number == 1 else saved.bases[0]]
                assert saved.depth == 0
        for number in range(10):
            assert equal(repository.restore(f"r{number}@0"), lora(number))
        repository.forget_snapshots(["r0@0", "r4@0"], force=True)
        repository.gc()
        for number in (1, 5, 9):
            assert equal(repository.restore(f"r{number}@0"), lora(number))
        assert repository.check(level="restore").ok
        repository.forget_snapshots([f"r{number}@0" for number in (1, 2, 3, 5, 6, 7, 8, 9)], force=True)
        assert repository.gc().stored_bytes == 0, "the last one that needs the base"


def test_only_the_first_save_of_a_run_looks_and_reads_at_most_eight_manifests():
    inner = MemoryStore()
    store = FaultStore(inner)
    with made(inner) as repository:
        for number in range(12):
            repository.save(lora(number, base=number), run=f"r{number}", step=0)
    with Repository.open(store, options=OPTIONS) as repository:  # a process that knows no record
        store.log.clear()
        repository.save(lora(50), run="new", step=0)
        manifests, records, listings = requests(store)
        assert manifests == MOST_MANIFESTS
        assert records <= 8 + 1, "and its own is read back"
        assert listings == 1
        repository.save(lora(51), run="new", step=1)
        assert requests(store) == [0, 1, 0]
    with Repository.open(store, options=SaveOptions(threads=1, share_runs=False)) as repository:
        store.log.clear()
        repository.save(lora(52), run="other", step=0)
        assert requests(store) == [1, 1, 0], "a header, to compare the seed"


def test_the_runs_that_were_saved_last_are_looked_through():
    with made() as repository:
        repository.save(lora(1, base=1), run="old", step=9)
        for number in range(2, 6):  # two manifests each: model and optimizer
            repository.save(lora(number, base=number), run=f"r{number}", step=0)
        assert repository.save(lora(50, base=2), run="a", step=0).stored_bytes < 100_000
        assert repository.save(lora(51, base=1), run="b", step=0).stored_bytes > 350_000


def test_neither_forgotten_runs_nor_a_damaged_one_hide_the_others():
    """A forget puts records of runs that were saved long ago."""
    store = MemoryStore()
    with made(store) as repository:
        for number in range(10):
            repository.save({"base": floats(9000, number)}, run=f"old{number}", step=0)
        for number, run in enumerate("ab"):
            repository.save(lora(number), run=run, step=0)
        repository.forget_snapshots([f"old{number}@0" for number in range(10)], force=True)
        store.delete([ref.key for ref in repository.snapshot("b@0").manifests])
    with opened(store) as repository:
        assert repository.save(lora(2), run="c", step=0).stored_bytes < 100_000


def test_of_many_parts_the_largest_are_looked_through():
    with made() as repository:
        state = {f"part{number}": {"w": floats(2000 + number, number)} for number in range(12)}
        repository.save(state, run="a", step=0)
        assert repository.save(state, run="b", step=0).new_chunks == 2 * (12 - MOST_MANIFESTS)


def test_a_run_whose_snapshots_are_all_forgotten_begins_again():
    """The repository remembers its last save of the run, which was the parent."""
    with made() as repository:
        repository.save(lora(1), run="a", step=0)
        repository.save(lora(2), run="b", step=0)
        repository.forget_snapshots(["b@0"], force=True)
        repository.gc()
        assert repository.save(lora(3), run="b", step=0).stored_bytes < 100_000


@pytest.mark.parametrize("way", ["forgotten", "aborted", "gone", "full", "parent", "not shared"])
def test_which_snapshots_are_looked_through(way):
    store = MemoryStore()
    with made(store, share_runs=way != "not shared") as repository:
        first = repository.save(lora(1), run="a", step=0)
        options = {}
        if way == "forgotten":
            repository.save(lora(2, base=2), run="a", step=1)
            repository.forget_snapshots(["a@0"])
        elif way == "aborted":  # the step before counts
            put = store.put
            store.put = lambda key, data: refuse(key) if key.startswith("manifests/") else put(key, data)
            with pytest.raises(StorageError):
                repository.save(lora(2, base=2), run="a", step=1)
            del store.put
            assert len(keys_of(store, "snapshots/a/")) == 2
        elif way == "gone":
            for key in keys_of(store, "packs/"):
                store.delete([key])
        elif way == "parent":
            repository.save(lora(2, base=2), run="c", step=0)
            options = {"parent": "c@0"}
        elif way == "full":
            options = {"full": True}
        saved = repository.save(lora(50), run="b", step=0, **options)
        is_shared = way in ("aborted", "full")
        assert (saved.stored_bytes < 100_000) == is_shared
        assert (first.id in saved.bases) == is_shared
        assert equal(repository.restore("b@0"), lora(50))


def test_a_snapshot_of_which_no_chunk_is_used_is_no_base():
    with made() as repository:
        repository.save(lora(1), run="a", step=0)
        saved = repository.save(lora(2, base=2), run="b", step=0)
        assert (saved.bases, saved.parent, saved.generation) == ([], None, 0)


def test_deltas_go_to_no_other_run_and_then_to_the_own():
    with made() as repository:
        repository.save(lora(1), run="a", step=0)
        state = lora(1)
        state["model"]["lora"] += 1e-3
        saved = repository.save(state, run="b", step=0)
        assert saved.depth == 0
        state["model"]["lora"] += 1e-3
        second = repository.save(state, run="b", step=1)
        assert second.depth == 1
        assert second.bases == [saved.id]
        assert equal(repository.restore("b@1"), state)


def test_the_option_is_a_bool():
    with pytest.raises(InvalidInputError, match="share_runs"):
        SaveOptions(share_runs=1)


def test_each_rank_of_a_job_looks():
    """Both ranks refer to chunks of another job, and of a run of one process; each reads at most eight manifests."""
    store = created()
    first = save_shared([store] * 2, "a", 0, 3)[0]
    stores = [FaultStore(store), FaultStore(store)]
    saved = save_shared(stores, "c", 0, 3)[0]
    assert saved.bases == [first.id]
    assert saved.new_chunks < first.new_chunks
    assert all(0 < requests(one)[0] <= MOST_MANIFESTS + 1 for one in stores), "and rank 0 reads the other's header"
    second = save_shared(stores, "c", 1, 3)[0]
    assert second.bases == [saved.id]
    with opened(store) as repository:
        save(repository, "b", 0, 7)
    third = save_shared([store] * 2, "d", 0, 7)[0]
    with opened(store) as repository:
        assert third.bases == [repository.snapshot("b@0").id]
        repository.forget_snapshots(["a@0", "b@0"], force=True)
        repository.gc()
    check_clean(store)
