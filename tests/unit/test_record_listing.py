"""The ruling record of each snapshot is found with few looks at files, and as if a listing described all of them."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.repositories import created, opened, save
from kit.samples import examples
from snapstore import KeepLast, Repository, SnapshotManager
from snapstore.catalog.index import Index
from snapstore.catalog.record_listing import KnownRecord, KnownRecords, list_ruling
from snapstore.format.keys import parse_record_key, record_key, superseded
from snapstore.format.records import Snapshot
from snapstore.storage import folders
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

IDS = [f"{number:032x}" for number in range(2)]


def keys():
    """Keys of records, with gaps between revisions, in runs whose names look like records."""
    revisions = st.sampled_from([0, 1, 2, 3, 9, 10, 11, 19, 20])
    records = st.builds(record_key, st.sampled_from(["a", "a.0"]), st.just(1), st.sampled_from(IDS), revisions)
    others = ["snapshots/a/x.0", "snapshots/a/x.1", "snapshots/a/deep/x.0", "snapshots/a/y/x.1"]
    return records | st.sampled_from(others)


def known_records(store, chosen):
    """Return these records as an index knows them."""
    found = KnownRecords()
    for key in chosen:
        if (parsed := parse_record_key(key)) is not None:
            run, step, name, revision = parsed
            snapshot = Snapshot(
                id=name, run=run, step=step, seq=1, state="committed", write_id="0" * 32, parent=None, revision=revision
            )
            found[key] = KnownRecord.from_listing(snapshot, store.stat(key))
    return found


@given(st.sets(st.integers(0, 999)))
def test_only_a_record_below_another_one_is_superseded(revisions):
    named = {record_key("a", 1, IDS[0], revision): revision for revision in revisions}
    assert all(named[key] + 1 in revisions for key in superseded(named))
    assert superseded(named) >= {key for key, n in named.items() if n + 1 in revisions and n % 10 != 9}


def test_neither_a_run_nor_a_higher_revision_is_superseded():
    assert superseded(["snapshots/a.0", "snapshots/a.1"]) == set()
    assert superseded([record_key("a", 1, IDS[0], revision) for revision in (1, 19)]) == set()


@settings(max_examples=examples(300), deadline=None)
@given(st.sets(keys(), max_size=12), st.data())
def test_keys_alone_tell_the_same_as_whole_listings(stored, data):
    store = MemoryStore()
    for key in sorted(stored):
        store.put(key, key.encode())
    known = data.draw(st.sets(st.sampled_from(sorted(stored)), max_size=6)) if stored else ()
    gone = data.draw(st.sets(st.sampled_from(sorted(known)), max_size=2)) if known else ()
    records = known_records(store, known)
    store.delete(gone)
    for prefix in ("snapshots/", "snapshots/a/", "snapshots/a.0/"):
        for times in (1, 2):
            whole = list_ruling(store, records, prefix, times, whole=True)
            assert list_ruling(store, records, prefix, times) == whole


@pytest.mark.parametrize("kind", ["folder", "gone"])
def test_a_record_below_one_that_is_no_file_rules(tmp_path, monkeypatch, kind):
    store, (first, second) = LocalStore(tmp_path), [record_key("a", 1, IDS[0], revision) for revision in (0, 1)]
    store.prepare()
    store.put(first, b"x")
    store.put(second, b"x")
    if kind == "folder":
        (tmp_path / second).unlink()
        (tmp_path / second).mkdir()
    else:
        real = folders.stat_entry
        monkeypatch.setattr(
            "snapstore.storage.local.stat_entry",
            lambda folder, name, shown: real(folder, f"{name}!" if shown == second else name, shown),
        )
    ruling, _ = list_ruling(store, KnownRecords(), "snapshots/", 1)
    assert list(ruling) == [first]
    assert ruling[first] == store.stat(first)


def test_runs_whose_names_look_like_revisions_are_all_listed(tmp_path):
    with Repository.create(tmp_path / "r") as repository:
        for run in ("a.0", "a.1", "a.2"):
            save(repository, run, 1, 1)
    with Repository.open(tmp_path / "r") as repository:
        assert repository.view().runs() == ["a.0", "a.1", "a.2"]


@pytest.fixture
def looked_at(monkeypatch):
    """Count how often a listing looks at each file."""
    counts = {}
    real = folders.stat_entry

    def look(folder, name, shown):
        counts[shown] = counts.get(shown, 0) + 1
        return real(folder, name, shown)

    monkeypatch.setattr("snapstore.storage.local.stat_entry", look)
    return counts


def test_a_save_looks_at_the_file_of_each_ruling_record_once(tmp_path, looked_at):
    """It lists the records of its run twice; a run may have tens of thousands."""
    with SnapshotManager(tmp_path / "r", run="a", async_save=False) as manager:
        for step in range(5):
            manager.save(step, {"x": step})
        before = manager.repository.snapshots()
        looked_at.clear()
        manager.save(5, {"x": 5})
        assert {looked_at[snapshot.key] for snapshot in before} == {1}


def test_a_gc_looks_at_no_record_that_a_later_one_supersedes(tmp_path, looked_at):
    with SnapshotManager(tmp_path / "r", run="a", async_save=False, keep=[KeepLast(1)]) as manager:
        for step in range(4):
            manager.save(step, {"x": step})
        records = [info.key for info in manager.repository.store.list("snapshots/")]
        looked_at.clear()
        manager.repository.gc()
        older = superseded(records)
        assert len(older) >= 6
        assert not older & looked_at.keys()


def test_a_repository_forgets_what_a_program_changes_in_its_answers():
    """A program may change lists and dicts of an answer; no later answer shows that, nor another of the same view."""
    store = created()
    with opened(store) as repository:
        save(repository, "a", 1, 1)
        repository.tag("a@1", "best-of-all")
        view = repository.view()
        ways = SimpleNamespace(
            get=lambda: view.get(view.newest("a").id),
            newest=lambda: view.newest("a"),
            latest=lambda: view.latest("a"),
            snapshots=lambda: view.snapshots("a")[0],
            all=lambda: view.snapshots()[0],
            resolve=lambda: view.resolve("a@1"),
            tag=lambda: view.resolve("a@best-of-all"),
            word=lambda: view.resolve("a@highest"),
            id=lambda: view.resolve(f"id:{view.newest('a').id}"),
            beside=lambda: view.latest_beside(view, "a", "a@latest"),
        )
        for name, answer in vars(ways).items():
            for changed in (answer(), repository.snapshot("a@1")):
                changed.tags.append("forged")
                changed.metrics["forged"] = 1.0
                changed.manifests.clear()
                changed.bases.append("forged")
            assert (name, answer().tags, answer().metrics, answer().bases) == (name, ["best-of-all"], {"loss": 0.5}, [])
            assert answer().manifests
        save(repository, "a", 2, 2)
        assert repository.snapshot("a@1").tags == ["best-of-all"]


def test_a_cache_learns_how_records_are_listed_before_the_program_ends(tmp_path):
    """Else each of them would be read once more after a kill."""
    with Repository.create(tmp_path / "r") as repository:
        for step in range(4):
            save(repository, "a", step, step)
        index = repository.context.index
        other = Index(repository.store, index.uuid, index.folder)
        other._load("snapshots/a/")
        sizes = {record.snapshot.step: record.size_bytes for record in other._records.values()}
        other.close()
    assert sizes == {0: ANY, 1: ANY, 2: ANY, 3: -1}
    assert min(sizes[step] for step in range(3)) > 0


def test_files_that_are_no_records_make_no_listing_whole(tmp_path, looked_at):
    store, record = LocalStore(tmp_path), record_key("a", 1, IDS[0], 0)
    store.prepare()
    for key in (record, "snapshots/a/x.bak1", "snapshots/a/x.bak2"):
        store.put(key, b"x")
    looked_at.clear()
    assert list(list_ruling(store, KnownRecords(), "snapshots/", 1)[0]) == [record]
    assert looked_at[record] == 1
