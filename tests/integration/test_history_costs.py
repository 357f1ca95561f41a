"""A verb costs at most twice as much if the history of the repository is twice as long.

Requests, calls of the system, writes and digested bytes are counted, not timed. So a cost that grows with the square of
the history, or with the history of other runs, fails on every machine.
"""

from __future__ import annotations

import copy
import os
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import fields

import pytest

from kit.costs import Costs, CountedStore, counted
from kit.repositories import check_clean, opened, save, values
from snapstore import KeepLast, Repository, SaveOptions, SnapshotManager
from snapstore.protocol import revisions
from snapstore.save import upkeep
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore
from snapstore.threads import current_watch

OPTIONS = SaveOptions(threads=1, share_runs=False)
#: The length of the history, and twice that; a gc joins the records of either one.
LENGTHS = (72, 144)


def fill(repository, run, count):
    for step in range(count):
        save(repository, run, step, step)


@pytest.fixture(scope="module")
def histories(tmp_path_factory):
    """Return the folders of two repositories: one run, of LENGTHS snapshots."""
    made = []
    for length in LENGTHS:
        folder = tmp_path_factory.mktemp("history") / "repository"
        with Repository.create(folder, options=OPTIONS) as repository:
            fill(repository, "a", length)
        made.append(folder)
    return made


def copied(folder, to):
    """Return a store of equal content in another folder."""
    return CountedStore(LocalStore(shutil.copytree(folder, to)))


def require_proportion(costs, at_most=2.2):
    """Fail if the second costs are more than so many times the first."""
    once, twice = costs
    for name in (field.name for field in fields(Costs)):
        assert getattr(twice, name) <= at_most * max(getattr(once, name), 1), (name, once, twice)


# --- one run


def test_a_policy_on_a_long_run_costs_in_proportion_to_it(histories, tmp_path):
    """Each forgotten and each swept snapshot used to digest the whole index."""
    forgot, swept = [], []
    for folder in histories:
        with Repository.open(copied(folder, tmp_path / str(len(forgot))), options=OPTIONS) as repository:
            list(repository.snapshots("a"))
            with counted(repository.store) as costs:
                repository.forget(KeepLast(3), run="a")
            forgot.append(costs)
            with counted(repository.store) as costs:
                repository.gc()
            swept.append(costs)
            assert len(repository.snapshots("a")) == 3
            assert len(repository.view().snapshots("a", None)) == LENGTHS[len(swept) - 1]
            check_clean(repository.store.inner)
    assert [costs.index_writes for costs in forgot] == [1, 1]
    assert [costs.index_writes for costs in swept] == [1, 1]
    require_proportion(forgot)
    require_proportion(swept)


@pytest.mark.parametrize("verb", ["log", "gc", "check"])
def test_a_cold_start_costs_in_proportion_to_the_run(histories, tmp_path, monkeypatch, verb):
    costs = []
    for number, folder in enumerate(histories):
        monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / f"cold-{number}"))
        counted_store = copied(folder, tmp_path / str(number))
        with counted(counted_store) as cost, Repository.open(counted_store, options=OPTIONS) as repository:
            {"log": repository.snapshots, "gc": repository.gc, "check": repository.check}[verb]()
        costs.append(cost)
    require_proportion(costs)


# --- other runs


@pytest.fixture(scope="module")
def crowds(tmp_path_factory):
    """Return the folders of repositories of one short run beside runs of LENGTHS snapshots in all."""
    made = []
    for length in LENGTHS:
        folder = tmp_path_factory.mktemp("crowd") / "repository"
        with Repository.create(folder, options=OPTIONS) as repository:
            for number in range(length // 6):
                fill(repository, f"other-{number}", 6)
            fill(repository, "a", 4)
        made.append(folder)
    return made


def manager(store, **options):
    return SnapshotManager(store, run="a", async_save=False, options=OPTIONS, **options)


def target():
    return copy.deepcopy(values("a", 0))


QUESTIONS = {
    "open": lambda _: None,
    "latest_step": lambda found: found.latest_step(),
    "all_steps": lambda found: found.all_steps(),
    "has_step": lambda found: found.has_step(2),
    "highest_step": lambda found: found.highest_step(),
    "restore": lambda found: found.restore(),
    "restore a step": lambda found: found.restore(2),
    "restore_into": lambda found: found.restore_into(target(), 2),
    "with fallback": lambda found: found.restore_into(target(), fallback=True),
    "snapshots": lambda found: found.repository.snapshots("a"),
    "restore by reference": lambda found: found.repository.restore("a@latest"),
    "tensors": lambda found: found.repository.tensors("a@1"),
    "tag": lambda found: found.repository.tag("a@1", "best"),
    "save": lambda found: found.save(4, values("a", 4)),
    "save that tags": lambda found: found.save(4, values("a", 4), tags=["best"]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_about_a_run_costs_the_same_beside_any_other_runs(crowds, question, tmp_path, monkeypatch):
    """A fresh process used to read every record of every run."""
    costs = []
    for number, folder in enumerate([crowds[0], *crowds]):  # the first time imports modules
        monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / f"cold-{number}"))
        counted_store = copied(folder, tmp_path / str(number))
        with counted(counted_store) as cost, manager(counted_store) as found:
            QUESTIONS[question](found)
        costs.append(cost)
        assert all("other-" not in key and key != "snapshots/" for _, key in counted_store.log)
    _, once, twice = costs
    assert (once.requests, once.index_writes) == (twice.requests, twice.index_writes)
    assert abs(once.digested_bytes - twice.digested_bytes) <= 8192, "two pages of the index"
    assert abs(once.os_calls - twice.os_calls) <= LENGTHS[0] // 2, (once, twice)  # folders depend on names


# --- one verb, one write


def moved(repository):
    repository.tag("a@2", "best")
    return lambda: repository.tag("a@3", "best")


def forgotten(repository, target):
    repository.forget_snapshots(["a@1"])
    return lambda: repository.unforget("a@1")


VERBS = {
    "tag": lambda repository, _: lambda: repository.tag("a@1", "best"),
    "move a tag": lambda repository, _: moved(repository),
    "forget": lambda repository, _: lambda: repository.forget(KeepLast(2), run="a"),
    "forget by name": lambda repository, _: lambda: repository.forget_snapshots(["a@1", "a@2", "a@3"]),
    "unforget": forgotten,
    "recode": lambda repository, _: lambda: repository.recode(),
    "compact": lambda repository, _: lambda: repository.compact(),
    "copy": lambda repository, target: lambda: repository.copy(to=target),
    "repair": lambda repository, _: lambda: repository.repair(apply=True),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_writes_its_index_once(verb):
    store, other = MemoryStore("memory://one"), MemoryStore("memory://other")
    with ExitStack() as stack:
        repository = stack.enter_context(Repository.create(store, options=OPTIONS))
        fill(repository, "a", 8)
        target = stack.enter_context(Repository.create(other, like=repository, options=OPTIONS))
        call = VERBS[verb](repository, target)
        repository.view()
        with counted() as costs:
            call()
    assert costs.index_writes <= (2 if verb == "copy" else 1), costs  # one in each of its two repositories


# --- the first policy of a long run


@pytest.fixture
def few_at_once(monkeypatch):
    monkeypatch.setattr(upkeep, "AT_ONCE", 8)


def test_a_save_forgets_and_sweeps_a_bounded_number(few_at_once):
    store = MemoryStore("memory://long")
    with Repository.create(store, options=OPTIONS) as repository:
        fill(repository, "a", 40)
    with manager(store, keep=KeepLast(3)) as found:
        for saves in range(1, 4):
            found.save(39 + saves, values("a", 39 + saves))
            states = [s.state for s in found.repository.view().snapshots("a", None)]
            assert (states.count("swept"), states.count("forgotten")) == (8 * saves, 0)
        assert found._upkeep.is_left
    with opened(store) as repository:  # `close` has done the rest
        states = [s.state for s in repository.view().snapshots("a", None)]
        assert (states.count("swept"), states.count("committed")) == (40, 3)
    check_clean(store)


def test_what_a_save_has_left_is_done_by_later_saves(few_at_once):
    store = MemoryStore("memory://long")
    with Repository.create(store, options=OPTIONS) as repository:
        fill(repository, "a", 20)
    with manager(store, keep=KeepLast(3)) as found:
        for step in range(20, 24):
            found.save(step, values("a", step))
        assert not found._upkeep.is_left
        assert found.all_steps() == [21, 22, 23]


def left_to_close(store, **options):
    """Return a manager whose saves have left something."""
    with Repository.create(store, options=OPTIONS) as repository:
        fill(repository, "a", 40)
    found = manager(store, keep=KeepLast(3), **options)
    found.save(40, values("a", 40))
    found.wait_until_finished()
    assert found._upkeep.is_left
    return found


def forgotten_of(store):
    with opened(store) as repository:
        return len(repository.view().snapshots("a", ("forgotten", "swept")))


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_a_snapshot_that_stays_as_it_is_damaged_costs_one_look(what):
    """Each save used to list all objects and all records, for a snapshot that no policy keeps and that must stay."""
    store = CountedStore(MemoryStore("memory://damaged"))
    with Repository.create(store.inner, options=OPTIONS) as repository:
        fill(repository, "a", 4)
        fill(repository, "other", 2)
    with manager(store, keep=KeepLast(100)) as found:
        found.save(4, values("a", 4))
        stays = found.repository.snapshot("a@1")
        if what == "damaged":
            found.repository.context.index.marks.add(stays, "a test says so")
        else:
            store.inner.delete([stays.key])
        found.save(1, values("a", 1))
        before = len(store.log)
        found.save(5, values("a", 5))
        found.save(6, values("a", 6))
        assert not {("list", "packs/"), ("list", "snapshots/")} & {*store.log[before:]}
        found.save(6, values("a", 7))
        assert [s.step for s in found.repository.view("a").snapshots("a", ("forgotten", "swept"))] == [6]
        found._upkeep.error = None  # a gc refuses to act on a listing that lacks a record


def test_close_with_a_timeout_forgets_no_more_after_it(few_at_once, monkeypatch):
    """It used to raise TimeoutError after the first store that takes long for each of thousands of records."""
    store = MemoryStore("memory://long")
    found = left_to_close(store)
    put = store.put

    def slow_put(key, data):
        if key.startswith("snapshots/"):
            time.sleep(0.7)
        put(key, data)

    monkeypatch.setattr(store, "put", slow_put)
    monkeypatch.setattr(revisions, "REVISIONS_AT_ONCE", 1)
    found.close(timeout=1)
    monkeypatch.undo()
    assert 8 < forgotten_of(store) < 38
    with manager(store, keep=KeepLast(3)) as found:
        found.save(41, values("a", 41))
    assert forgotten_of(store) == 39
    check_clean(store)


def test_close_ends_if_no_thread_can_be_started(few_at_once, monkeypatch, caplog):
    store = MemoryStore("memory://long")
    found = left_to_close(store)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found.close()
    monkeypatch.undo()
    assert found._closed
    assert "what the saves have left to forget stays" in caplog.text
    assert forgotten_of(store) == 8


def test_ctrl_c_in_close_ends_what_the_saves_have_left(few_at_once, monkeypatch):
    """The interpreter's exit used to wait until all of it was forgotten and swept."""
    store = MemoryStore("memory://long")
    found = left_to_close(store)
    put, goes_on, join = store.put, threading.Event(), found._background.join

    def slow_put(key, data):
        assert goes_on.wait(60)
        put(key, data)

    def interrupted(timeout=None):
        if found._background.is_busy():
            raise KeyboardInterrupt
        return join(timeout)

    monkeypatch.setattr(store, "put", slow_put)
    monkeypatch.setattr(revisions, "REVISIONS_AT_ONCE", 1)
    monkeypatch.setattr(found._background, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.close()
    goes_on.set()
    monkeypatch.undo()
    found.close()
    assert forgotten_of(store) <= 9


def test_close_waits_for_a_silent_store_no_longer_than_a_save(few_at_once, monkeypatch):
    watches = []
    with left_to_close(MemoryStore("memory://long"), on_error="warn") as found:
        monkeypatch.setattr(found._upkeep, "retain", lambda *args, **options: watches.append(current_watch()))
    assert watches == [found._retrying._require_answer]


def test_close_forgets_nothing_in_a_forked_child(few_at_once):
    store = MemoryStore("memory://long")
    found = left_to_close(store)
    found._upkeep._pid = -1  # as in a child
    found._upkeep.begin_rest(found.keep, found._background, found._retrying)
    found._background.join()
    assert forgotten_of(store) == 8
    found._upkeep._pid = os.getpid()
    found.close()
    assert forgotten_of(store) == 38


@pytest.mark.parametrize("most", [1, 3, 8])
def test_a_bounded_gc_sweeps_the_oldest_and_deletes_nothing_that_others_need(most):
    store = MemoryStore("memory://bounded")
    with Repository.create(store, options=OPTIONS) as repository:
        fill(repository, "a", 12)
        repository.forget(KeepLast(2), run="a")
        left = 10
        while left:
            with repository.context.store.pinned():
                result = upkeep.collect(repository.context, most=most)
            forgotten = [s.step for s in repository.view().snapshots("a", ("forgotten",))]
            assert len(forgotten) <= max(0, left - most)
            assert result.left <= len(forgotten) + 1
            for step in forgotten:
                assert repository.restore(f"a@{step}")["version"] == step
            assert len(forgotten) < left, "each gc frees something"
            left = len(forgotten)
    check_clean(store)


def test_snapshots_of_equal_content_are_swept_too():
    """Each needs what all the others need, so a bound must not keep them for ever."""
    store = MemoryStore("memory://equal")
    with Repository.create(store, options=OPTIONS) as repository:
        for step in range(10):
            save(repository, "a", step, 0)
        save(repository, "a", 10, 1)
        repository.forget(KeepLast(1), run="a")
        for _ in range(10):
            upkeep.collect(repository.context, most=2)
        assert not repository.view().snapshots("a", ("forgotten",))
    check_clean(store)


def test_the_index_is_bounded_by_what_is_kept(tmp_path, monkeypatch):
    """Headers of swept snapshots, and records that are in a page, leave it: a run under a policy may never end."""
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    sizes = []
    with SnapshotManager(tmp_path / "r", run="a", async_save=False, options=OPTIONS, keep=KeepLast(3)) as snapshots:
        for step in range(4 * LENGTHS[0]):
            snapshots.save(step, values("a", step))
            environment = snapshots.repository.context.index._environment
            sizes.append(sum(len(environment.items(name)) for name in (b"records", b"manifests")))
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2]) + 3
