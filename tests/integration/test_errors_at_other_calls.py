"""Errors that ranks raise at different calls, or that the caller has seen already: the saves after them succeed."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from kit.faults import FaultStore
from kit.ranks import Managers
from kit.repositories import OPTIONS, created, opened
from snapstore import InvalidInputError, RanksError, SnapshotManager, SnapstoreError, StorageError
from snapstore.storage.memory import MemoryStore

COUNT = 3


@pytest.fixture
def store():
    return created()


def state(step):
    return {"w": torch.full((4,), float(step)), "step": step}


def wait(managers):
    managers.all(lambda m, _: m._background.join())


def failed_on_one_rank(managers, stores, rank):
    """Save step 1, which fails on all ranks."""
    stores[rank].at, stores[rank].mode = len(stores[rank].log), "outage"
    managers.all(lambda m, _: m.save(1, {"w": torch.randn(3000)}))
    wait(managers)
    stores[rank].heal()


@pytest.mark.parametrize("early", [0, 1])
def test_ranks_that_raise_an_error_at_different_calls_save_together_again(store, early):
    stores = [FaultStore(store) for _ in range(COUNT)]
    managers = Managers(store, stores=stores)
    failed_on_one_rank(managers, stores, 2)
    with pytest.raises(StorageError):
        managers[early].check_for_errors()
    found = managers.all(lambda m, _: m.save(2, state(2)))
    for rank, one in enumerate(found):
        if rank == early:
            with pytest.raises(StorageError, match=r"save a@2 was not begun: the save of a@1 has failed: .*injected"):
                one.result()
        else:
            assert isinstance(one, StorageError)
            assert "save a@2 was not begun: the save of a@1 has failed: " in str(one)
    for step in range(3, 6):
        assert [h.result().step for h in managers.all(lambda m, _, s=step: m.save(s, state(s)))] == [step] * COUNT
    assert managers.all(lambda m, _: m.restore()["step"]) == [5] * COUNT
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [3, 4, 5]


@pytest.mark.parametrize("early", [0, 1])
def test_a_save_that_another_rank_has_not_begun_is_an_error_of_the_wait(store, early):
    """The next save does not raise it, but the loop may not take this step for saved."""
    stores = [FaultStore(store) for _ in range(COUNT)]
    managers = Managers(store, stores=stores)
    failed_on_one_rank(managers, stores, 2)
    with pytest.raises(StorageError):
        managers[early].check_for_errors()
    managers.all(lambda m, _: m.save(2, state(2)))
    with pytest.raises(StorageError, match="save a@2 was not begun"):
        managers[early].wait_until_finished()
    managers.all(lambda m, _: m.save(3, state(3)))
    assert managers.end() == [None] * COUNT


@pytest.mark.parametrize("early", [0, 1])
def test_ranks_that_restore_after_an_error_which_they_raised_at_different_calls(store, early):
    """Some have tried another save, and the others have not: they restore the same step, and save together again."""
    stores = [FaultStore(store) for _ in range(COUNT)]
    managers = Managers(store, stores=stores)
    managers.all(lambda m, _: m.save(0, state(0)))
    wait(managers)
    failed_on_one_rank(managers, stores, 2)

    def work(manager, rank):
        with pytest.raises(StorageError):
            manager.check_for_errors() if rank == early else manager.save(2, state(2))
        assert manager.restore()["step"] == 0
        for step in range(2, 5):
            with suppress(SnapstoreError):
                manager.save(step, state(step)).result()
        return manager.latest_step()

    assert managers.all(work) == [4] * COUNT
    managers.end()
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()][-2:] == [3, 4]


@pytest.mark.parametrize("rank", range(COUNT))
@pytest.mark.parametrize("step", [-1, "two"])
def test_a_bad_step_on_one_rank_costs_one_save(store, rank, step):
    managers = Managers(store, total_s=20.0)
    managers.all(lambda m, _: m.save(0, state(0)))
    found = managers.all(lambda m, own: m.save(step if own == rank else 1, state(1)))
    assert isinstance(found[rank], InvalidInputError)
    for own, handle in enumerate(found):
        if own != rank:
            with pytest.raises(InvalidInputError, match=f"rank {rank}: step"):
                handle.result()
    assert [h.result().step for h in managers.all(lambda m, _: m.save(2, state(2)))] == [2] * COUNT
    managers.end()


@pytest.mark.parametrize("rank", range(COUNT))
def test_an_error_that_one_rank_alone_has_costs_one_save(store, rank, monkeypatch):
    managers = Managers(store)
    managers.all(lambda m, _: m.save(0, state(0)))
    wait(managers)
    with monkeypatch.context() as patch:

        def fail(*_):
            raise StorageError("after the commit")

        patch.setattr(managers[rank].repository.lineage, "note_saved", fail)
        managers.all(lambda m, _: m.save(1, state(1)))
        wait(managers)
    found = managers.all(lambda m, _: m.save(2, state(2)))
    assert [isinstance(one, StorageError) for one in found] == [own == rank for own in range(COUNT)]
    for step in range(3, 5):
        assert [h.result().step for h in managers.all(lambda m, _, s=step: m.save(s, state(s)))] == [step] * COUNT
    managers.end()
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [0, 1, 3, 4]


@pytest.mark.parametrize("rank", range(COUNT))
def test_ctrl_c_on_one_rank_costs_at_most_two_saves(store, rank):
    class Interrupted:
        def state_dict(self):
            raise KeyboardInterrupt

        def load_state_dict(self, state):
            """Take nothing."""

    managers = Managers(store, total_s=20.0)

    def work(manager, own):
        saved = []
        for step in range(5):
            with suppress(KeyboardInterrupt, SnapstoreError):
                manager.save(step, {"a": Interrupted() if own == rank and step == 1 else state(step)})
            manager._background.join()
            with suppress(SnapstoreError):
                saved.append(manager.latest_step())
        return saved[-1]

    assert managers.all(work) == [4] * COUNT
    managers.all(lambda m, _: m.close(timeout=5.0))


# -- one process


class Refusing(MemoryStore):
    refuse = None

    def lock(self, key, data):
        if self.refuse is not None:
            raise self.refuse
        super().lock(key, data)


@pytest.mark.parametrize("call", ["result", "wait_until_finished", "check_for_errors"])
def test_an_error_that_the_caller_has_seen_is_not_raised_by_the_next_save(call):
    store = Refusing()
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        for step in range(5):
            store.refuse = StorageError("no space left") if step == 2 else None
            handle = manager.save(step, state(step))
            manager._background.join()
            if step == 2:
                with pytest.raises(StorageError, match="no space left"):
                    handle.result() if call == "result" else getattr(manager, call)()
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1, 3, 4]


@pytest.mark.parametrize("error", [StorageError("no space", "left"), RanksError("no space", "left", ranks=[3])])
def test_a_save_that_raises_an_older_error_names_both_saves(error):
    store = Refusing()
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        store.refuse = error
        manager.save(1, state(1))
        manager._background.join()
        store.refuse = None
        with pytest.raises(type(error)) as caught:
            manager.save(2, state(2))
        assert str(caught.value) == "save a@2 was not begun: the save of a@1 has failed: no space\nleft"
        assert caught.value.__cause__ is error
        assert getattr(caught.value, "ranks", None) == getattr(error, "ranks", None)
        manager.save(3, state(3))
        manager.wait_until_finished()
        assert manager.all_steps() == [3]


def test_an_older_error_that_is_none_of_snapstore_gets_a_note():
    store = Refusing()
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        store.refuse = ZeroDivisionError("in the store")
        manager.save(1, state(1))
        manager._background.join()
        store.refuse = None
        with pytest.raises(ZeroDivisionError, match="in the store") as caught:
            manager.save(2, state(2))
        assert caught.value.__notes__ == [
            "save a@2 was not begun: the save of a@1 has failed; the next save tries again"
        ]
