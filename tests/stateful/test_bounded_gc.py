"""A bounded gc beside an unbounded one: what the bound has left of a mark stays marked.

The unbounded gc may have decided to delete it, and a save that one wrong listing misleads would build on it.
"""

from __future__ import annotations

import threading
from functools import partial

from kit.repositories import OPTIONS, check_clean, created, opened, same, save, values
from snapstore import Repository
from snapstore.format.keys import parse_record_key
from snapstore.protocol.gc import GcResult, _Gc, collect
from snapstore.protocol.notes import standing_marks


class Stopping:
    """A store whose operations a test may replace."""

    def __init__(self, inner):
        self._inner, self.instead = inner, {}

    def __getattr__(self, name):
        operation = getattr(self._inner, name)
        return partial(self.instead[name], operation) if name in self.instead else operation


def marked():
    """Return a store with two forgotten snapshots, f@0 and g@0, and the mark of a gc that has died."""
    store = created()
    with opened(store) as repository:
        for number, run in enumerate("fgk"):
            save(repository, run, 0, number)
        repository.forget_snapshots(["f@0", "g@0"], force=True)
        context = repository.context
        with context.store.pinned():
            mark = _Gc(context, 3600.0, False, GcResult(), lambda: False, None, None)._mark(set())
    return store, mark


def test_a_mark_stays_until_all_of_it_is_swept():
    store, mark = marked()
    with opened(store) as repository:
        for left in (1, 0):
            with repository.context.store.pinned():
                result = collect(repository.context, most=1)
            assert result.left == left
            assert [found.id for found in standing_marks(store)] == [mark.id] * left
        assert not repository.view().snapshots(states=("forgotten",))
        assert repository.gc(dry_run=True).deleted_objects == 0
    check_clean(store)


def test_the_bound_is_that_of_all_marks_together():
    store = created()
    with opened(store) as repository:
        context = repository.context
        for number, run in enumerate("fghk"):
            save(repository, run, 0, number)
        for run in "fgh":  # each leaves a mark of a gc that has died
            repository.forget_snapshots([f"{run}@0"], force=True)
            pending = set().union(*(mark.keys() for mark in standing_marks(store)))
            with context.store.pinned():
                assert _Gc(context, 3600.0, False, GcResult(), lambda: False, None, None)._mark(pending)
        for left in (2, 1, 0):
            with context.store.pinned():
                result = collect(context, most=1)
            assert len(repository.view().snapshots(states=("forgotten",))) == left
            assert bool(result.left) == bool(left)
    check_clean(store)


def test_no_save_builds_on_what_another_gc_deletes():
    """The bounded gc used to remove the mark of g@0 while the other one was about to delete its packs."""
    store, _ = marked()
    bounded, whole, misled = Stopping(store), Stopping(store), Stopping(store)
    has_swept, goes_on, has_ended, has_saved = (threading.Event() for _ in range(4))

    def stat(operation, key):
        if key.endswith(".mark"):
            has_swept.set()
            assert goes_on.wait(60)
        return operation(key)

    def collect_one():
        with Repository.open(bounded, options=OPTIONS) as repository, repository.context.store.pinned():
            bounded.instead["list"] = listed
            collect(repository.context, most=1)
        has_ended.set()

    def listed(operation, prefix, key_only=None):
        if goes_on.is_set():  # it has done with the first mark, and is stopped before it puts one of its own
            has_ended.set()
            assert has_saved.wait(60)
        return operation(prefix, key_only)

    bounded.instead["stat"] = stat
    thread = threading.Thread(target=collect_one, daemon=True)
    thread.start()
    assert has_swept.wait(60)

    def lied(operation, prefix, key_only=None):
        if prefix != "snapshots/":
            return operation(prefix, key_only)
        del misled.instead["list"]
        return iter([info for info in operation(prefix) if info.key[10:11] != "g" or not parse_record_key(info.key)[3]])

    def delete(operation, keys):
        if not has_saved.is_set():
            goes_on.set()
            assert has_ended.wait(60)
            with Repository.open(misled, options=OPTIONS) as repository:
                misled.instead["list"] = lied
                repository.save(values("g", 1), run="new", step=0, metadata=["g", 1])
            has_saved.set()
        operation(keys)

    whole.instead["delete"] = delete
    with Repository.open(whole, options=OPTIONS) as repository:
        repository.gc()
    thread.join(60)
    with opened(store) as repository:
        assert same(repository.restore("new@0"), values("g", 1))
    check_clean(store)
