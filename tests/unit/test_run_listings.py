"""A save and a forget list the records of their own run; a gc, a check and a repair list those of all runs."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs

from kit.faults import FaultStore, Unreadable
from kit.objects import clone, keys_of, with_keys_alone
from kit.repositories import OPTIONS, check_clean, created, opened, save, values
from kit.s3_stores import moto_bucket
from snapstore import FormatError, IntegrityError, KeepEvery, KeepLast, NotFoundError, Repository, SnapshotManager
from snapstore.catalog import index as index_module
from snapstore.catalog.history import View
from snapstore.catalog.index import Index
from snapstore.format import records
from snapstore.format.keys import name_of_record, records_prefix

pytestmark = pytest.mark.usefixtures("remembering")

#: Names of runs, some of which are prefixes of others.
RUNS = ("a", "a-b", "a.b", "ab", "a_", "A", "a-", "0-damaged-session")


@pytest.fixture(scope="module")
def made():
    """Return a store of runs a and b with three snapshots each."""
    store = created()
    with opened(store) as repository:
        for step in range(3):
            for run in ("a", "b"):
                save(repository, run, step, step)
    return store


@pytest.fixture
def store(made):
    return FaultStore(clone(made))


def listed(store):
    """Return which records each listing of records has asked for, and forget it."""
    found = [key for operation, key in store.log if operation == "list" and key.startswith("snapshots/")]
    store.log.clear()
    return found


def record_of(store, run, step):
    return next(key for key in keys_of(store, f"snapshots/{run}/") if f"/{step:012d}-" in key)


# --- what is listed


def test_a_save_lists_only_its_run(store):
    with opened(store) as repository:
        save(repository, "a", 3, 3)
        assert listed(store) == ["snapshots/a/"] * 2, "one listing may lack what others have saved"
        save(repository, "a", 4, 4)
        assert listed(store) == ["snapshots/a/"] * 2
        save(repository, "a", 5, 5, tags=["best"])
        assert set(listed(store)) == {"snapshots/a/"}
        save(repository, "c", 0, 0)
        assert listed(store) == ["snapshots/c/"] * 2 + ["snapshots/"], "the first save of a run looks for its chunks"
        save(repository, "c", 1, 1)
        save(repository, "d", 0, 0, parent="c@0")
        assert listed(store)[:2] == ["snapshots/c/"] * 2
        with Repository.open(store, options=replace(OPTIONS, share_runs=False)) as alone:
            save(alone, "e", 0, 0)
        assert listed(store) == ["snapshots/e/"] * 2
    check_clean(store)


def test_only_a_save_that_forgets_lists_all_runs(store):
    with SnapshotManager(store, run="a", keep=KeepLast(4), async_save=False, options=OPTIONS) as manager:
        manager.save(3, values("a", 3))
        assert set(listed(store)) == {"snapshots/a/"}, "nothing to forget: no gc"
        manager.save(4, values("a", 4))
        assert listed(store).count("snapshots/") == 4, "the first gc of a process lists twice also before its mark"
        manager.save(5, values("a", 5))
        assert listed(store).count("snapshots/") == 3
        manager.save(6, values("a", 6))
        assert [key for operation, key in store.log if operation == "list"].count("packs/") == 2
        assert [s.step for s in manager.repository.snapshots("a")] == [3, 4, 5, 6]
    check_clean(store)


def test_on_s3_a_save_asks_for_the_records_of_its_run(monkeypatch):
    prefixes = []
    with moto_bucket(monkeypatch) as url, Repository.create(f"{url}/runs", options=OPTIONS) as repository:
        for run in ("a", "a-b"):
            save(repository, run, 0, 0)
        inner = repository.store.list
        monkeypatch.setattr(repository.store, "list", lambda *of: (prefixes.append(of[0]), inner(*of))[1])
        save(repository, "a", 1, 1)
        assert [p for p in prefixes if p.startswith("snapshots/")] == ["snapshots/a/"] * 2
        assert repository.snapshot("a@1").parent == repository.snapshot("a@0").id


def test_a_first_listing_of_all_runs_is_made_twice_also_after_that_of_one_run(store):
    with opened(store) as repository:
        index = repository.context.index
        for run, count in (("a", 2), ("a", 1), ("b", 2), (None, 2), (None, 1), ("b", 1), ("new", 1)):
            index.refresh(run)
            assert len(listed(store)) == count, run
        index.refresh("a", list_twice=True)
        assert listed(store) == ["snapshots/a/"] * 2


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("looked", ["at nothing", "at another run", "at all runs", "at this run", "by a save"])
def test_one_listing_without_the_newest_record_costs_a_save_nothing(made, lacking, looked):
    """Whatever the process has listed before: another process has saved the newest since."""
    store, hidden, asked = clone(made), set(), []
    inner = store.list

    def list_(prefix, key_only=None):
        asked.append(prefix)
        skip = asked.count("snapshots/a/") == lacking + 1 and prefix == "snapshots/a/"
        return with_keys_alone((info for info in inner(prefix) if not (skip and info.key in hidden)), key_only)

    store.list = list_
    with SnapshotManager(store, run="a", keep=KeepLast(2), async_save=False, options=OPTIONS) as manager:
        if looked == "at another run":
            save(manager.repository, "b", 3, 3)
        elif looked == "at all runs":
            manager.repository.view()
        elif looked == "at this run":
            manager.repository.context.index.refresh("a")
        elif looked == "by a save":
            manager.save(3, values("a", 3))
        with opened(store) as other:
            others = [save(other, "a", step, step) for step in (4, 5)]
        hidden.update(s.key for s in others)
        asked.clear()
        saved = manager.save(6, values("a", 6)).result()
        assert saved.seq == others[-1].seq + 1
        assert saved.parent == others[-1].id or looked == "by a save", "a process goes on from its own save"
        assert manager.all_steps() == [5, 6], "and the policies keep what was saved last"
    check_clean(store)


@pytest.mark.parametrize("lacking", range(4))
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("record", ["its last revision", "all revisions"])
def test_one_listing_that_lacks_a_record_costs_a_gc_nothing(made, lacking, known, record):
    """In a process that has listed before, a gc lists once before its mark, and twice for its sweep."""
    store, asked, hidden = clone(made), [], set()
    inner = store.list

    def list_(prefix, key_only=None):
        asked.append(prefix)
        skip = prefix == "snapshots/" and asked.count(prefix) == lacking + 1
        return with_keys_alone((info for info in inner(prefix) if not (skip and info.key in hidden)), key_only)

    with opened(store) as repository:
        repository.view()
        repository.forget([KeepLast(1)], run="a")
        with opened(store) as other:
            other.unforget("a@1")
            new = save(other, "b", 3, 3)
        if known:
            repository.view()
        back = next(key for key in keys_of(store, "snapshots/a/") if key.endswith(".2"))
        hidden.update({back, new.key} if record == "its last revision" else keys_of(store, f"snapshots/{new.run}/"))
        asked.clear()
        store.list = list_
        result = repository.gc()
        assert result.deleted_objects > 0
        store.list = inner
        assert [s.step for s in repository.snapshots("a")] == [1, 2]
        assert [s.step for s in repository.snapshots("b")] == [0, 1, 2, 3]
        assert repository.gc().deleted_objects == 0
    check_clean(store, level="restore")


@pytest.mark.parametrize("lacking", range(4))
def test_one_listing_without_the_save_that_a_sweep_has_waited_for_costs_nothing(made, lacking):
    """The save builds on a snapshot that is forgotten and marked meanwhile; no session shows it any more."""
    store, asked, hidden = clone(made), [], set()
    inner, put = store.list, store.put

    def list_(prefix, key_only=None):
        asked.append(prefix)
        skip = prefix == "snapshots/" and asked.count(prefix) == lacking + 1
        return with_keys_alone((info for info in inner(prefix) if not (skip and info.key in hidden)), key_only)

    with opened(store) as collector, opened(store) as saver:
        collector.view()

        def put_(key, data):
            if key.startswith("snapshots/c/"):
                store.put = put
                collector.forget_snapshots(["b@1"])
                assert collector.gc().waiting_for
                hidden.add(key)
                asked.clear()
                store.list = list_
            put(key, data)

        store.put = put_
        saved = saver.save(values("b", 1), run="c", step=0, bases=["b@1"])
        assert (hidden, saved.new_chunks) == ({saved.key}, 0)
        collector.gc()
        store.list = inner
        assert "c" in [s.run for s in collector.snapshots()]
    check_clean(store, level="restore")


# --- a View of one run


def answers_of(view, run):
    """Return the answers of a View about one run."""
    return (
        [s.key for s in view.snapshots(run, None)],
        [s.key for s in view.snapshots(run)],
        view.newest(run),
        view.next_seq(run),
        view.unknown(run),
        view.unknown_ids(run),
        view.unknown_steps(run),
        {name: [s.id for s in found] for name, found in view.tagged(run).items()},
        view.superseded(run) if view.only_run else {s.id for s in view.snapshots(run)} & view.superseded(),
        [s.key for s in view.missing if s.run == run],
    )


def test_a_view_of_one_run_answers_as_that_of_all_runs():
    """Also if names of runs are prefixes of each other, and records are damaged, gone or revised."""
    store = created()
    with opened(store) as repository:
        for run in RUNS:
            for step in (0, 1, 2, 1, 3):
                save(repository, run, step, step, tags=["one"] if step == 2 else ())
            repository.forget([KeepLast(3)], run=run)
        repository.view()
        for number, run in enumerate(RUNS):
            keys = keys_of(store, f"snapshots/{run}/")
            store.delete(keys[number % len(keys) :][:1])
            if number % 2:
                data, info = store._objects[keys[-1]]
                store._objects[keys[-1]] = b"rubbish" + data[7:], structs.replace(info, modified_s=info.modified_s + 1)
        for _ in range(2):
            for run in (*RUNS, "none"):
                assert answers_of(repository.context.index.refresh(run), run) == answers_of(repository.view(), run)
    with opened(store) as fresh:
        found = [answers_of(fresh.context.index.refresh(run), run) for run in RUNS]
        assert found == [answers_of(fresh.view(), run) for run in RUNS]


def test_a_view_of_one_run_answers_no_question_about_others(store):
    with opened(store) as repository:
        view = repository.context.index.refresh("a")
        other = repository.snapshot("b@0")
        assert view.get(other.id) is None
        questions = [
            view.snapshots, view.runs, view.superseded, view.unknown, lambda: view.children("0" * 32),
            lambda: view.resolve("b@0"), lambda: view.resolve("id:" + "0" * 8), lambda: view.is_unknown("0" * 32),
            lambda: view.require_record("0" * 32), lambda: view.require_all_records("gc", "nothing was deleted"),
            *(
                (lambda ask=ask: ask(view, "b"))
                for ask in (
                    View.snapshots, View.newest, View.latest, View.next_seq, View.tagged, View.unknown,
                    View.unknown_ids, View.unknown_steps, View.superseded, View.require_run,
                )
            ),
            lambda: view.snapshots("b", None),
        ]  # fmt: skip
        for ask in questions:
            with pytest.raises(AssertionError, match="a listing of run 'a' says nothing about"):
                ask()


def test_no_gc_acts_on_a_view_of_one_run(store, monkeypatch):
    """If a gc gets one, it raises an error and deletes nothing."""
    with opened(store) as repository:
        repository.forget([KeepLast(1)], run="a")
        refresh = Index.refresh
        monkeypatch.setattr(Index, "refresh", lambda index, run=None, **options: refresh(index, "a", **options))
        before = keys_of(store.inner)
        for dry_run in (True, False):
            with pytest.raises(AssertionError):
                repository.gc(dry_run=dry_run)
        assert keys_of(store.inner) == before
        monkeypatch.undo()
        assert repository.gc().deleted_objects > 0
    check_clean(store)


# --- records of other runs


@pytest.mark.parametrize("ending", ["known from a listing", "known from the cache"])
def test_a_record_of_another_run_that_is_gone_stops_the_next_gc(store, tmp_path, monkeypatch, ending):
    """A save does not miss it, and no later listing of one run makes the index forget it."""
    with opened(store) as repository, ExitStack() as stack:
        index = repository.context.index
        if ending == "known from the cache":
            with closing(Index(store, index.uuid, tmp_path)) as earlier:
                earlier.refresh()
            stack.enter_context(closing(index))  # the repository closes the one that takes its place
            index = Index(store, index.uuid, tmp_path)
            monkeypatch.setattr(repository, "context", replace(repository.context, index=index))
        else:
            repository.view()
        gone = record_of(store, "b", 1)
        store.delete([gone])
        before = keys_of(store.inner, "packs/")
        for step in (3, 4):
            save(repository, "a", step, step)
            assert index.refresh("a").vanished == []
        assert index.refresh("b").vanished == [gone]
        repository.forget([KeepLast(1)], run="a")
        with pytest.raises(IntegrityError, match=f"the listing lacks 1 known record, first {gone}"):
            repository.gc()
        assert set(before) <= set(keys_of(store.inner, "packs/"))
        assert gone in [p.key for p in repository.check().problems]
        assert not repository.repair(apply=True).open
        assert repository.snapshot("b@1").step == 1


@pytest.mark.parametrize("how", ["parent", "bases", "restored", "fork"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_save_builds_on_a_snapshot_of_another_run(store, how, warm):
    with opened(store) as repository:
        there = repository.snapshot("b@1")
        if warm:
            save(repository, "c", 0, 0)
        if how in ("parent", "bases"):
            saved = save(repository, "c", 1, 1, **{how: "b@1" if how == "parent" else ["b@1"]})
        else:
            parent = "b@1" if how == "fork" and not warm else None
            with SnapshotManager(repository, run="c", parent=parent, async_save=False, options=OPTIONS) as manager:
                if how == "restored" or warm:
                    repository.lineage.go_on_from("c", there)
                saved = manager.save(1, values("b", 1)).result()
        assert there.id in saved.bases or how == "bases"
        if how != "bases":
            assert saved.parent == there.id
        listed(store)
        after = save(repository, "c", 2, 2)
        assert (after.parent, listed(store)) == (saved.id, ["snapshots/c/"] * 2)
    check_clean(store)


def test_a_forgotten_parent_of_another_run_is_no_base(store):
    with opened(store) as repository:
        there = repository.snapshot("b@0")
        repository.lineage.go_on_from("c", there)
        with opened(store.inner) as other:
            other.forget([KeepLast(1)], run="b")
            other.gc()
        saved = repository.save(values("b", 0), run="c", step=0)
        assert (saved.parent, saved.bases) == (there.id, [])
    check_clean(store)


def test_a_first_save_beside_a_foreign_config_is_refused_though_no_record_is_read(store):
    with opened(store) as repository:
        config = repository.config
    foreign = msgspec.structs.replace(config, digest_seed=config.digest_seed ^ 1)
    store.delete(["config"])
    store.put("config", records.encode(foreign))
    store.log.clear()
    with opened(store) as repository, pytest.raises(FormatError, match="have different digest seeds"):
        save(repository, "new", 0, 0)
    store.log.clear()
    options = replace(OPTIONS, share_runs=False)
    with Repository.open(store, options=options) as repository, pytest.raises(FormatError, match="digest seeds"):
        save(repository, "new", 0, 0)
    assert not [key for operation, key in store.log if operation == "get" and key.startswith("snapshots/")]


def test_manifests_that_cannot_be_read_do_not_refuse_a_first_save(store):
    with opened(Unreadable(store.inner, *keys_of(store, "manifests/"))) as repository:
        save(repository, "new", 0, 0)
    check_clean(store)


def test_a_record_that_is_slow_to_fail_stays_paused_while_other_runs_are_listed(made, monkeypatch):
    """Else a save of another run would make the next gc wait for it again."""
    store, tries, now = clone(made), [], [1000.0]
    slow, get = record_of(store, "b", 2), store.get
    monkeypatch.setattr(index_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def get_(key, **options):
        if key == slow:
            tries.append(key)
            now[0] += 30
            raise index_module.StorageError(f"{key}: 503")
        return get(key, **options)

    store.get = get_
    with opened(store) as repository:
        index = repository.context.index
        assert list(index.refresh().unread) == [slow]
        assert index.refresh("a").unread == {}
        save(repository, "a", 3, 3)
        assert list(index.refresh().unread) == list(index.refresh("b").unread) == [slow]
        assert len(tries) == 1
        now[0] += 61
        assert list(index.refresh("b").unread) == [slow]
        assert len(tries) == 2


# --- two writers


def test_two_writers_of_two_runs_and_of_one(store, caplog):
    """Each sees the other's saves of its own run, and no number is taken twice."""
    with opened(store) as one, opened(store.inner) as two, caplog.at_level(logging.WARNING, logger="snapstore"):
        for step in range(3, 6):
            save(one, "a", step, step)
            save(two, "b", step, step)
        assert "another process" not in caplog.text
        for step in range(6, 9):
            save(one, "a", step, step)
            save(two, "a", step + 100, step)
            save(two, "b", step, step)
        assert one.forget([KeepLast(2)], run="a").forgotten
        result = two.gc()
        left = sum(info.size_bytes for kind in ("packs/", "manifests/") for info in store.list(kind))
        assert (result.deleted_objects > 0, result.stored_bytes) == (True, left)
        assert [s.step for s in two.snapshots("a")] == [8, 108]
        assert len(two.snapshots("b")) == 9
        for run in ("a", "b"):
            seqs = [s.seq for s in one.view().snapshots(run, None)]
            assert len(set(seqs)) == len(seqs)
    check_clean(store)


def test_a_forget_of_a_run_that_is_not_there_names_the_runs(store):
    with opened(store) as repository, pytest.raises(NotFoundError, match=r"run 'c': has no snapshots.*runs: a, b"):
        repository.forget([KeepLast(1)], run="c")


# --- forged records


@contextmanager
def forged(store, run, of):
    """Put the record of a snapshot under another run, or under another step, with its id; remove it at the end."""
    record = msgspec.structs.replace(of, run=run, step=of.step + 50, seq=of.seq + 50, write_id=records.new_id())
    time.sleep(0.01)  # it is stored later
    store.put(record.key, records.encode(record))
    try:
        yield record
    finally:
        store.delete([key for key in keys_of(store, records_prefix(run)) if name_of_record(key) in record.key])


@pytest.mark.parametrize("where", ["own run", "own run, id of another run", "another run"])
def test_a_record_that_repeats_an_id_harms_no_snapshot(store, where):
    """A save of one run does not see that the id is also used in another run; nothing depends on that.

    At worst the forged record counts as a snapshot of the run, as one with a new id would. Every gc sees both, and
    deletes nothing. Once the forged record is removed, everything is whole.
    """
    with opened(store) as repository:
        of = repository.snapshot("b@1" if where == "own run, id of another run" else "a@1")
        with forged(store, "a" if where != "another run" else "z", of) as record:
            saved = save(repository, "a", 3, 3)
            assert (saved.parent == of.id) is (where == "own run, id of another run")
            forgotten = repository.forget([KeepEvery(1000), KeepLast(2)], run="a").forgotten
            assert [s.step for s in forgotten] == ([1, 2] if where == "own run, id of another run" else [1])
            with pytest.raises(IntegrityError, match=r"repeats the id of .* one of the two is forged"):
                repository.gc()
            assert record.key in [p.key for p in repository.check().problems]
    with opened(store) as repository:
        assert repository.gc().deleted_objects > 0
        for snapshot in repository.snapshots():
            repository.restore(f"id:{snapshot.id}")
        assert [s.step for s in repository.snapshots("b")] == [0, 1, 2]
