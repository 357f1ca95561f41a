"""No listing and no answer passes over a snapshot whose record is damaged, gone, or cannot be read for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kit.damage import three
from kit.faults import Unreadable
from kit.objects import clone, flip
from kit.repositories import opened, save
from snapstore import IntegrityError, Repository, SnapshotManager
from snapstore.errors import StorageError

ERRORS = {"damaged": IntegrityError, "unread": StorageError, "gone": IntegrityError}
HOW = pytest.mark.parametrize("how", ERRORS)


@pytest.fixture
def store():
    return three()


@contextmanager
def harmed(store, ref: str, how: str) -> Iterator[tuple[Repository, str]]:
    """Open a copy of a repository in which the record of a snapshot is not known; yield it, and the record's key."""
    with opened(store) as found:
        key = found.snapshot(ref).key
    inner = clone(store)
    if how == "damaged":
        flip(inner, key, 60)
    with opened(Unreadable(inner, key) if how == "unread" else inner) as found:
        if how == "gone":
            assert found.snapshot(ref).key == key  # so the index knows it
            inner.delete([key])
        yield found, key


# --- the manager


@HOW
def test_the_steps_of_a_run_may_include_one_whose_record_is_unknown(store, how):
    with harmed(store, "a@1", how) as (found, key):
        manager = SnapshotManager(found, run="a")
        for ask in (manager.all_steps, lambda: manager.has_step(1)):
            with pytest.raises(ERRORS[how], match=f"may be a@1 .*{key}"):
                ask()
        assert (manager.has_step(0), manager.has_step(7)) == (True, False)
        save(found, "a", 1, 5)
        assert manager.all_steps() == [0, 1, 2], "the step was saved again"


@HOW
def test_a_run_with_an_unknown_record_only_is_no_new_run(store, how):
    """Its next save would have the parent of a fork."""
    with opened(store) as found:
        save(found, "b", 7, 7)
    with harmed(store, "b@7", how) as (found, _):
        with pytest.raises(ERRORS[how], match=r"parent a@1 of a new run b: may be b@7 "):
            SnapshotManager(found, run="b", parent="a@1")
        SnapshotManager(found, run="b").close()
        save(found, "b", 8, 8)
        SnapshotManager(found, run="b", parent="a@1").close()  # no effect: the run has a snapshot
        assert found.snapshot("b@8").parent is None
