"""No listing and no answer passes over a snapshot whose record is damaged, gone, or cannot be read for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kit.damage import refs, three
from kit.faults import Unreadable
from kit.objects import clone, flip
from kit.repositories import opened, save
from snapstore import IntegrityError, Repository, SnapshotManager
from snapstore.errors import StorageError
from snapstore.integrations.fsspec import SnapstoreFileSystem

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


# --- lists of snapshots


@HOW
def test_a_list_of_snapshots_names_the_records_that_it_leaves_out_once(store, how, caplog):
    with opened(store) as found:
        save(found, "b", 0, 50)
    with harmed(store, "a@1", how) as (found, key):
        assert refs(found.snapshots("b")) == {"b@0"}
        assert not caplog.records
        assert refs(found.snapshots("a")) == {"a@0", "a@2"}
        assert refs(found.snapshots()) == {"a@0", "a@2", "b@0"}
        assert [record.message for record in caplog.records] == [
            f"{found.url}: left out snapshots whose records cannot be read or are gone; run 'snapstore check': {key}"
        ]


@HOW
def test_children_name_the_records_that_they_leave_out(store, how, caplog):
    with harmed(store, "a@1", how) as (found, key):
        assert found.children("a@0") == []
        assert f"run 'snapstore check': {key}" in caplog.text


@HOW
def test_a_run_whose_only_record_is_unknown_does_not_count_as_empty(store, how):
    with opened(store) as found:
        save(found, "b", 7, 7)
    with harmed(store, "b@7", how) as (found, _):
        with pytest.raises(ERRORS[how], match=r"run 'b': may be b@7 "):
            found.snapshots("b")
        assert found.snapshots("c") == []


# --- fsspec


@HOW
def test_no_path_of_an_unknown_snapshot_is_not_there(store, how, caplog, monkeypatch):
    with harmed(store, "a@1", how) as (found, key):
        files = SnapstoreFileSystem(repository="memory", skip_instance_cache=True)
        monkeypatch.setattr(SnapstoreFileSystem, "repository", found)
        assert files.ls("", detail=False) == ["a@0", "a@2"]
        assert caplog.text.count(f"run 'snapstore check': {key}") == 1
        assert len(files.glob("a@*/all.safetensors")) == 2
        asks = (files.info, files.ls, files.exists, files.isdir, files.isfile, files.glob, files.find, files.cat)
        for path in ("a@1", "a@1/all.safetensors"):
            for ask in asks:
                with pytest.raises(ERRORS[how], match="may be a@1 "):
                    ask(path)
        with pytest.raises(ERRORS[how], match="may be a@1 "):
            files.glob("a@1/*")
        for path in ("a@7", "a@0/none.safetensors", "c@1"):
            assert not any(ask(path) for ask in (files.exists, files.isdir, files.isfile, files.glob, files.find))
        assert files.isfile("a@0/all.safetensors")
        assert files.isdir("a@0")
