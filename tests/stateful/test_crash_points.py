"""After a crash or failure at any operation of any verb, committed snapshots restore and gc frees the rest.

For each k the verb runs on a copy of a prepared store whose k-th operation crashes, fails or loses its response. Then
either "the process" has died, and a fresh one with an empty index checks what is left; or it lives on, and uses the
same Repository once the fault is over.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kit import foreign
from kit.damage import die_in_a_save
from kit.faults import CRASHES, FAILURES, Crash, FaultStore, index_in_place, one_thread
from kit.objects import clone, keys_of
from kit.ranks import save_shared
from kit.repositories import OPTIONS, check_clean, check_whole, committed, created, opened, save, version_of
from kit.samples import sampled
from kit.tally import tally
from snapstore import (
    CapabilityError,
    InvalidInputError,
    KeepLast,
    NotFoundError,
    Repository,
    Snapshot,
    SnapstoreError,
    StorageError,
    StorageFullError,
)
from snapstore.catalog import policy_store
from snapstore.catalog.lmdb_file import Environment
from snapstore.format.manifests import manifest
from snapstore.protocol.claim import UNKNOWN
from snapstore.storage.base import ObjectStore
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

#: These tests run the same lines a thousand times: tracing them for coverage would take a fifth of the time.
untraced = pytest.mark.no_cover


# --- prepared stores -------------------------------------------------------------------------------------------------


@cache
def history() -> MemoryStore:
    """a@0 to a@3, of which a@1 is tagged, and b@0, which was forked from a@1; policies of run a."""
    store = created()
    with opened(store) as repository:
        repository.set_policies("a", [KeepLast(3)])
        for step in range(4):
            save(repository, "a", step, step, tags=("good",) if step == 1 else ())
        save(repository, "b", 0, 50, parent="a@1")
    return store


@cache
def longer() -> MemoryStore:
    """As `history`, with a@4: the next save of version 61 makes a skip, see `test_the_skip_save_skips`."""
    store = clone(history())
    with opened(store) as repository:
        save(repository, "a", 4, 60)
    return store


@cache
def forgotten() -> MemoryStore:
    """As `history`, but a@0 and a@2 are forgotten, and a dead save has left packs and a session."""
    store = clone(history())
    with opened(store) as repository:
        repository.forget([KeepLast(1)], run="a")
    die_in_a_save(store, 7)
    assert keys_of(store, "sessions/")
    return store


@cache
def marked() -> MemoryStore:
    """As `forgotten`, and a gc has died after it put its mark."""
    return _after_gc_until("put", ".mark")


@cache
def half_swept() -> MemoryStore:
    """As `forgotten`, and a gc has died between two deletes."""
    return _after_gc_until("delete", "packs/")


@cache
def unmarked() -> MemoryStore:
    """As `forgotten`, and a gc has died between deleting its mark and its wait list."""
    return _after_gc_until("delete", ".mark")


@cache
def shared() -> MemoryStore:
    """a@0 to a@3, which name the manifests of a@0 in codec 70, and b@0; all but a@3 and b@0 are forgotten."""
    store = created()
    with pytest.MonkeyPatch.context() as patch, opened(store) as repository, foreign.written():
        foreign.readable(patch)
        for step in range(4):
            save(repository, "a", step, 0)
        save(repository, "b", 0, 0)
        repository.forget_snapshots(["a@0", "a@1", "a@2"])
    return store


@cache
def abroad() -> MemoryStore:
    """a@0 to a@2 and the fork b@0 in codec 70, and a@3, portable and based on them; a@1 is forgotten, a@2 recoded."""
    store = created()
    with pytest.MonkeyPatch.context() as patch, opened(store) as repository:
        foreign.readable(patch)
        with foreign.written():
            for step in range(3):
                save(repository, "a", step, step)
            save(repository, "b", 0, 1, parent="a@1", bases=["a@1"])
        save(repository, "a", 3, 3)
        repository.forget_snapshots(["a@1"])
        repository.recode(["a@2"])
    return store


@cache
def of_ranks() -> MemoryStore:
    """a@2 of two ranks, a@3 of one process, a@4 and a@5 of three ranks, in codec 70; a@0 and a@1 are gone."""
    store = created()
    with pytest.MonkeyPatch.context() as patch, foreign.written():
        foreign.readable(patch)
        for step, count in enumerate((3, 3, 2)):
            assert all(isinstance(word, Snapshot) for word in save_shared([store] * count, "a", step, step))
        with opened(store) as repository:
            save(repository, "a", 3, 3)
        for step in (4, 5):
            assert all(isinstance(word, Snapshot) for word in save_shared([store] * 3, "a", step, step))
        with opened(store) as repository:
            repository.forget_snapshots(["a@0", "a@1"])
            repository.gc()
            repository.forget_snapshots(["a@2"])
    return store


@cache
def ranks_marked() -> MemoryStore:
    """As `of_ranks`, and a gc has died after it put its mark."""
    return _after_gc_until("put", ".mark", of_ranks)


@cache
def abroad_marked() -> MemoryStore:
    """As `abroad`, and a gc has died after it put its mark."""
    return _after_gc_until("put", ".mark", abroad)


@cache
def hollow() -> MemoryStore:
    """a@7 to a@9, whose chains need blobs of collected snapshots, and b@0, whose base is gone."""
    store = created()
    with opened(store) as repository:
        for step in range(10):
            save(repository, "a", step, step)
        save(repository, "b", 0, 50, parent="a@5", bases=["a@5"])
        repository.forget([KeepLast(3)], run="a")
        repository.gc()
    return store


@cache
def copies() -> MemoryStore:
    """a@3, b@3 and c@3, which store equal chunks of their own; a compact shares them."""
    store = created()
    with Repository.open(store, options=replace(OPTIONS, share_runs=False)) as repository:
        for run in "abc":
            save(repository, run, 3, 3)
    return store


@cache
def hollow_marked() -> MemoryStore:
    """As `hollow`, a@7 is forgotten, and a gc has died after it put its mark."""
    return _after_gc_until("put", ".mark", _hollow_forgotten)


@cache
def _hollow_forgotten() -> MemoryStore:
    store = clone(hollow())
    with opened(store) as repository:
        repository.forget_snapshots(["a@7"])
    return store


@cache
def half_copied() -> MemoryStore:
    """Copies of a@0, a@1 and b@0 of `history`; a@0 and b@0 are forgotten, and a gc has died after it put its mark."""
    store = clone(copied(history, "a@0", "a@1", "b@0"))
    with opened(store) as repository:
        repository.forget_snapshots(["a@0", "b@0"], force=True)
    return _after_gc_until("put", ".mark", lambda: store)


@cache
def copied(source: Callable[[], MemoryStore], *refs: str) -> MemoryStore:
    """Return a new repository with copies of some snapshots."""
    store = MemoryStore()
    with opened(source()) as repository:
        Repository.create(store, like=repository, options=OPTIONS).close()
        assert len(repository.copy(refs, to=store).copied) == len(refs)
    return store


def copy_in(repository: Repository, source: MemoryStore, ref: str) -> Snapshot:
    """Copy a snapshot into a repository."""
    with opened(source) as other:
        result = other.copy([ref], to=repository)
    for _, why in result.failed:  # a copy notes a record that cannot be read, and goes on with other snapshots
        assert "cannot be read" in why, why
        raise StorageError(why)
    return (result.copied + result.present)[0]


def _after_gc_until(name: str, part: str, before: Callable[[], MemoryStore] = forgotten) -> MemoryStore:
    dry = FaultStore(clone(before()))
    with opened(dry) as repository:
        repository.gc()
    store = clone(before())
    number = next(i for i, (op, key) in enumerate(dry.log) if op == name and part in key)
    dead = FaultStore(store, number, "crash-after")
    with pytest.raises(Crash), opened(dead) as repository:
        repository.gc()
    return store


# --- verbs -----------------------------------------------------------------------------------------------------------


def _tag(repository: Repository) -> None:
    repository.tag("a@3", "good")  # moves it


VERBS: dict[str, tuple[Callable[[], MemoryStore], Callable[[Repository], Any]]] = {
    "first save": (created, lambda r: save(r, "a", 0, 0)),
    "first save of another run": (history, lambda r: save(r, "c", 0, 3)),
    "first save of another run, marked": (marked, lambda r: save(r, "c", 0, 3)),
    "delta save": (history, lambda r: save(r, "a", 4, 4)),
    "skip save": (longer, lambda r: save(r, "a", 5, 61)),
    "step again": (history, lambda r: save(r, "a", 2, 12)),
    "tagged": (history, lambda r: save(r, "a", 4, 4, tags=("best",))),
    "fork": (history, lambda r: save(r, "c", 0, 1, parent="a@1", bases=["b@0"])),
    "forget": (history, lambda r: r.forget([KeepLast(1)], run="a")),
    "forget and gc": (history, lambda r: (r.forget([KeepLast(1)], run="a"), r.gc())),
    "gc": (forgotten, lambda r: r.gc()),
    "gc, marked": (marked, lambda r: r.gc()),
    "gc, half swept": (half_swept, lambda r: r.gc()),
    "gc, unmarked": (unmarked, lambda r: r.gc()),
    "unforget": (forgotten, lambda r: r.unforget("a@2")),
    "unforget, marked": (marked, lambda r: r.unforget("a@2")),
    "save, marked": (marked, lambda r: save(r, "a", 4, 4)),
    "tag": (history, _tag),
    "untag": (history, lambda r: r.untag("a@1", "good")),
    "policies": (history, lambda r: r.set_policies("a", [KeepLast(2)])),
    "rebuild": (forgotten, lambda r: r.rebuild_index()),
    "restore": (history, lambda r: r.restore("a@3")),
    "recode": (abroad, lambda r: r.recode()),
    "recode a forgotten one": (abroad, lambda r: r.recode(["a@1"])),
    "recode, marked": (abroad_marked, lambda r: r.recode()),
    "compact": (hollow, lambda r: r.compact()),
    "compact, copies": (copies, lambda r: r.compact()),
    "compact, marked": (hollow_marked, lambda r: r.compact()),
    "unchanged save": (shared, lambda r: save(r, "a", 4, 0)),
    "gc, shared": (shared, lambda r: r.gc()),
    "recode, shared": (shared, lambda r: r.recode()),
    "recode and gc, shared": (shared, lambda r: (r.recode(), r.gc())),
    "save, ranks": (ranks_marked, lambda r: save(r, "a", 6, 6)),
    "forget, ranks": (of_ranks, lambda r: r.forget([KeepLast(1)], run="a")),
    "gc, ranks": (ranks_marked, lambda r: r.gc()),
    "recode, ranks": (of_ranks, lambda r: r.recode()),
    "copy": (half_copied, lambda r: copy_in(r, history(), "a@3")),
    "copy back, marked": (half_copied, lambda r: copy_in(r, history(), "a@0")),
    "copy, ranks": (lambda: copied(of_ranks, "a@3"), lambda r: copy_in(r, of_ranks(), "a@5")),
    "compact, ranks": (ranks_marked, lambda r: r.compact()),
}
#: Verbs that may forget snapshots, and verbs that may add one; all other snapshots keep id, tags and `lasting` fields.
MAY_FORGET = {"forget", "forget and gc", "forget, ranks"}
MAY_ADD = {
    "first save",
    "first save of another run",
    "first save of another run, marked",
    "delta save",
    "skip save",
    "step again",
    "tagged",
    "fork",
    "save, marked",
    "save, ranks",
    "unchanged save",
    "unforget",
    "unforget, marked",
    "copy",
    "copy back, marked",
    "copy, ranks",
}
#: Verb -> the tags of (run, step) in the end.
TAGS = {"tag": {("a", 1): (), ("a", 3): ("good",)}, "untag": {("a", 1): ()}}


def operations(verb: str) -> int:
    prepare, act = VERBS[verb]
    store = FaultStore(clone(prepare()))
    with opened(store) as repository:
        before = len(store.log)
        act(repository)
        return len(store.log) - before


def run_until_fault(verb: str, inner: ObjectStore, k: int, mode: str) -> tuple[FaultStore, Repository, Any]:
    """Run a verb up to a fault; return the store, the repository, and the verb's result or error."""
    _, act = VERBS[verb]
    store = FaultStore(inner)
    repository = Repository.open(store, options=OPTIONS)
    store.at, store.mode = len(store.log) + k, mode
    tally("crash points")
    try:
        return store, repository, act(repository)
    except (Crash, SnapstoreError) as error:
        return store, repository, error


def check_outcome(verb: str, before: dict[str, Any], inner: ObjectStore, outcome: Any, about: str) -> None:
    """Check that nothing committed is gone or changed, no object is there without reason, and the verb has not lied."""
    after = committed(inner)
    done = not isinstance(outcome, Crash | SnapstoreError)
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    if verb not in MAY_FORGET:
        assert not gone, about
    assert {before[i][2] for i in gone} <= {()}, f"{about}: a tagged one was forgotten"
    for i in before.keys() & after.keys():
        assert after[i][:2] == before[i][:2], about
        assert after[i][3] == before[i][3], about
        of_run, step, tags = after[i][1][0], after[i][0], {before[i][2]}
        if verb in TAGS and (of_run, step) in TAGS[verb]:
            tags = {TAGS[verb][of_run, step]} | (set() if done else tags)
        assert after[i][2] in tags, f"{about}: tags of {of_run}@{step}"
    if verb != "untag" and any(tags for _, _, tags, _ in before.values()):
        assert any("good" in tags for _, _, tags, _ in after.values()), f"{about}: nobody has the tag"
    ruling = [[KeepLast(2)]] if verb == "policies" else []
    if verb != "policies" or not done:
        ruling.append(policy_store.read(VERBS[verb][0](), "a"))
    assert policy_store.read(inner, "a") in ruling, about
    assert len(new) <= (1 if verb in MAY_ADD else 0), about
    if isinstance(outcome, Crash):
        return
    if isinstance(outcome, SnapstoreError):
        assert isinstance(outcome, StorageError), f"{about}: {outcome!r}"
        if "save" in verb and UNKNOWN not in str(outcome):
            assert not new, f"{about}: reported as failed, yet committed: {outcome}"
    elif verb in MAY_ADD:
        assert new == {outcome.id}, about


#: Verbs that are much like another one: a run tries fewer of their operations, see `points`.
ALIKE = {
    "step again",
    "tagged",
    "fork",
    "first save of another run",
    "first save of another run, marked",
    "save, marked",
    "forget and gc",
    "gc, unmarked",
    "rebuild",
    "restore",
    "recode",
    "recode, marked",
    "recode a forgotten one",
    "compact",
    "compact, copies",
    "compact, marked",
    "unchanged save",
    "gc, shared",
}


@pytest.mark.parametrize("verb", ["first save of another run", "first save of another run, marked"])
def test_the_first_save_shares_with_another_run(verb):
    prepare, act = VERBS[verb]
    with opened(clone(prepare())) as repository:
        assert act(repository).bases == [repository.snapshot("a@3").id]


def test_the_compact_of_copies_shares():
    store = clone(copies())
    with opened(store) as repository:
        report = repository.compact()
        assert report.rewritten
        assert report.bytes_written < 4096 < report.freed_bytes


def test_the_skip_save_skips():
    """A new delta is against an older chunk than the last one, so its chain does not grow."""
    store = clone(longer())
    with opened(store) as repository:
        before, after = (_chains(store, s) for s in (repository.snapshot("a@4"), VERBS["skip save"][1](repository)))
    assert [b for a, b in zip(before, after, strict=True) if len(b) > 1 and b[0] != a[0] != b[1] and b[1] in a]


def _chains(store: ObjectStore, snapshot: Snapshot) -> list[list[Any]]:
    """Return the digests of the blobs of each chunk's chain, the newest first."""
    found = []
    for ref in snapshot.manifests:
        table = manifest.read(store, ref, None).table
        digests = table.ref_digests.tolist()
        found += [digests[a:b] for a, b in zip(table.starts[:-1], table.starts[1:], strict=True)]
    return found


def points(verb: str, mode: str, total: int) -> range:
    """Return the operations to try."""
    sparse = verb in ALIKE or (mode == "full" and verb != "gc")
    if verb.endswith(", ranks"):
        return sampled(total, 26)
    # a recode has sixty operations, each of which some other verb has too
    return sampled(total, 22 if verb.startswith(("recode", "compact", "copy")) else 11 if sparse else 6)


def faults(verb: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, ...]]:
    """Run a verb with a fault at each of its `points`.

    Yield (snapshots before, store below the faults, faulty store, repository, outcome, text about it).
    """
    one_thread(monkeypatch, index=False)
    prepare = VERBS[verb][0]
    before = committed(clone(prepare()))
    total = operations(verb)
    assert total > 1
    for k in points(verb, mode, total):
        inner = clone(prepare())
        store, repository, outcome = run_until_fault(verb, inner, k, mode)
        about = f"{verb}, {mode} at {k} of {total}: {store.log[-1]}, {outcome}"
        yield before, inner, store, repository, outcome, about


@pytest.mark.sampled(8)
@untraced
@pytest.mark.parametrize("mode", CRASHES)
@pytest.mark.parametrize("verb", VERBS)
def test_the_process_dies(verb, mode, monkeypatch):
    for before, inner, _, repository, outcome, about in faults(verb, mode, monkeypatch):
        assert isinstance(outcome, Crash), about
        repository.close()
        check_outcome(verb, before, inner, outcome, about)
        check_whole(inner, about)


#: Verbs that a user would simply run again, see `test_the_same_verb_again`.
AGAIN = [
    "first save",
    "delta save",
    "step again",
    "tagged",
    "fork",
    "forget",
    "unforget",
    "unforget, marked",
    "tag",
    "untag",
    "policies",
    "rebuild",
    "copy",
]


@pytest.mark.sampled(8)
@untraced
@pytest.mark.parametrize("mode", [*CRASHES, "lost", "fail"])
@pytest.mark.parametrize("verb", AGAIN)
def test_the_same_verb_again(verb, mode, monkeypatch):
    """Whatever the first call did, the second one ends in the same state as one call without a fault."""
    one_thread(monkeypatch, index=False)
    prepare, act = VERBS[verb]
    undisturbed = clone(prepare())
    with opened(undisturbed) as repository:
        act(repository)
    there = _ids(clone(prepare()))
    wanted = _known(undisturbed, there)
    total = operations(verb)
    for k in sampled(total, 32 if verb in MAY_ADD else 15):
        inner = clone(prepare())
        store, repository, outcome = run_until_fault(verb, inner, k, mode)
        about = f"{verb} again, {mode} at {k} of {total}: {store.log[-1]}, {outcome}"
        repository.close()
        store.die()
        left = _known(inner, there)
        refused = None
        with opened(inner) as repository:
            try:
                act(repository)
            except (InvalidInputError, NotFoundError) as error:
                refused = error
        if refused is not None:  # only a verb that was done already
            assert any(says in str(refused) for says in ("is not forgotten", "has no tag 'good'")), (
                f"{about}: {refused}"
            )
            assert left == wanted, f"{about}: {refused}"
        assert _known(inner, there) == wanted, about
        with opened(inner) as repository:
            tags = [(s.run, tag) for s in repository.snapshots() for tag in s.tags]
        assert len(tags) == len(set(tags)), f"{about}: a tag names one snapshot of a run"
        check_whole(inner, about)


def _ids(store: ObjectStore) -> set[str]:
    with opened(store) as repository:
        return {snapshot.id for snapshot in repository.view().snapshots(states=None)}


def _known(store: ObjectStore, ids: set[str]) -> Any:
    """Return a user's view of a repository: the snapshots of these ids, what other references name, and policies.

    A save whose answer was lost has committed, and so has the next one: a reference names the newest of a step.
    """
    with opened(store) as repository:
        old = {s.id: (s.state, version_of(s), s.tags) for s in repository.view().snapshots(states=None) if s.id in ids}
        new = {s.ref: (s.state, version_of(s), s.tags) for s in repository.snapshots() if s.id not in ids}
        return old, new, [repository.policies(run) for run in ("a", "b", "c")]


@pytest.mark.sampled(4)
@untraced
@pytest.mark.parametrize("mode", [*CRASHES, *FAILURES, "torn", "late"])
@pytest.mark.parametrize("verb", ["recode", "compact"])
def test_the_next_rewrite_finishes_what_one_has_begun(verb, mode, monkeypatch):
    """The next one uses all that the first has published: after a gc, all is as if nothing had stopped it."""
    one_thread(monkeypatch, index=False)
    prepare = VERBS[verb][0]
    finish = {"recode": _left_over, "compact": _compacted}[verb]
    wanted = finish(clone(prepare()))
    total = operations(verb)
    for k in sampled(total, 24):
        inner = clone(prepare())
        store, repository, outcome = run_until_fault(verb, inner, k, mode)
        about = f"{verb}, {mode} at {k} of {total}: {store.log[-1]}, {outcome}"
        repository.close()
        store.heal()
        store.die()
        _repair_torn_record(inner, store, mode)
        left = finish(inner)
        assert left <= wanted + 4096 if verb == "compact" else left == wanted, about


def _repair_torn_record(inner: MemoryStore, store: FaultStore, mode: str) -> None:
    """Repair if a record is torn: any other verb stops at a record that it cannot read."""
    if mode == "torn" and store.log[-1][1].startswith("snapshots/"):
        with opened(inner) as repository:
            repository.repair(apply=True)


def _compacted(store: MemoryStore) -> int:
    """Compact and collect everything; return the stored bytes that are left."""
    with opened(store) as repository:
        for _ in range(2):
            assert repository.compact().failed == []
            repository.gc()
        stored_bytes = repository.stats().stored_bytes
    check_clean(store)
    return stored_bytes


def _left_over(store: MemoryStore) -> tuple[int, dict[str, int]]:
    """Recode and collect everything; return the packs' bytes of planes by codec, and the snapshots."""
    with opened(store) as repository:
        result = repository.recode()
        assert result.failed == []
        repository.gc()
        found = repository.stats()
    check_clean(store)
    return found.snapshots, found.codecs


@pytest.mark.sampled(14)
@untraced
@pytest.mark.parametrize("mode", FAILURES)
@pytest.mark.parametrize("verb", VERBS)
def test_the_process_lives_on(verb, mode, monkeypatch):
    for before, inner, store, repository, outcome, about in faults(verb, mode, monkeypatch):
        assert store.fired or mode == "full", about
        store.heal()
        with repository:
            check_outcome(verb, before, inner, outcome, about)
            save(repository, "a", 800, 800)
            repository.gc()
            result = repository.gc()
            assert result.waiting_for == [], about
        check_clean(inner, about)


@pytest.mark.sampled(3)
@untraced
@pytest.mark.parametrize("mode", ["outage", "lost-outage", "full"])
@pytest.mark.parametrize("verb", ["delta save", "gc, marked", "recode", "compact"])
def test_the_process_dies_after_a_failure(verb, mode, monkeypatch):
    for before, inner, store, repository, outcome, about in faults(verb, mode, monkeypatch):
        repository.close()
        store.die()
        check_outcome(verb, before, inner, outcome, about)
        check_whole(inner, about)


#: For repair see test_repair_faults.py.
ON_A_DISK = ["delta save", "forget", "unforget", "tag", "gc", "gc, half swept", "rebuild", "recode", "compact"]


def on_a_disk(source: MemoryStore, root: Path) -> LocalStore:
    """Return a copy of a prepared store on a disk."""
    store = LocalStore(root, create=True)
    for key in keys_of(source):
        (store.lock if source.is_locked(key) else store.put)(key, source.get(key))
    return store


@pytest.mark.sampled(4)
@untraced
@pytest.mark.parametrize("mode", ["crash-before", "crash-after", "lost", "fail"])
@pytest.mark.parametrize("verb", ON_A_DISK)
def test_on_a_disk(verb, mode, monkeypatch, tmp_path):
    """The same on a LocalStore, with its index in place; a sample of the operations."""
    one_thread(monkeypatch)
    index_in_place(monkeypatch)
    total = operations(verb)
    for k in sampled(total, 16):
        inner = on_a_disk(VERBS[verb][0](), tmp_path / str(k))
        before = committed(inner)  # this also makes an index from before the fault
        store, repository, outcome = run_until_fault(verb, inner, k, mode)
        about = f"{verb}, {mode} at {k} of {total}: {store.log[-1]}, {outcome}"
        repository.close()
        store.die()
        (inner.root / "tmp" / ("0" * 32)).write_bytes(b"torn")  # a writer that died before its link
        check_outcome(verb, before, inner, outcome, about)
        check_whole(inner, about)


@untraced
@pytest.mark.parametrize("left", ["no seal", "half a seal"])
def test_a_rebuild_killed_before_its_seal(left, monkeypatch, tmp_path, caplog):
    """A commit of LMDB without a seal is not trusted: the next open rebuilds the index, and its answers are right."""
    one_thread(monkeypatch)
    monkeypatch.setattr("snapstore.catalog.index.RECORDS_IN_MEMORY", 2)  # several transactions
    inner = on_a_disk(forgotten(), tmp_path / "repository")
    before = _known(inner, _ids(inner))
    seals, real = count(), Environment._seal

    def rebuild(kill_at: int | None) -> None:
        numbers = count()

        def seal(environment: Environment) -> None:
            if next(numbers) == kill_at:
                if left == "half a seal":
                    (environment._folder / "verified").write_text("16384 ")
                os.kill(os.getpid(), signal.SIGKILL)
            next(seals)
            real(environment)

        with opened(inner) as repository, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Environment, "_seal", seal)
            repository.rebuild_index()

    rebuild(None)
    total = next(seals)
    assert total >= 4
    for k in range(total):
        caplog.clear()
        assert _known(inner, before[0].keys()) == before
        assert "is rebuilt" not in caplog.text
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                rebuild(k)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, k
        assert _known(inner, before[0].keys()) == before, k
        assert "damaged or unfinished; it is rebuilt" in caplog.text, k
    check_whole(inner)


def test_a_crash_in_create_leaves_a_place_that_can_be_used(monkeypatch, tmp_path):
    one_thread(monkeypatch)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / ("a" * 32)).write_bytes(b"half a config")
    with Repository.create(tmp_path) as repository:
        assert repository.snapshots() == []


def test_marks_do_not_pile_up_while_a_session_is_waited_for(monkeypatch):
    """Each retention pass of a second trainer calls gc while the first one saves."""
    one_thread(monkeypatch)
    store = clone(history())
    with opened(store) as repository:
        store.lock("sessions/" + "1" * 32, clone(forgotten()).get(keys_of(forgotten(), "sessions/")[0]))
        for step in range(10, 14):
            save(repository, "a", step, step)
            repository.forget([KeepLast(1)], run="a")
            result = repository.gc()
            assert result.deleted_objects == 0
            assert result.waiting_for == ["1" * 32]
        repository.gc()
        repository.gc()
        marks = [key for key in keys_of(store, "gc/") if key.endswith(".mark")]
        assert len(marks) <= 4
        store.release("sessions/" + "1" * 32)
        repository.gc()
    check_clean(store)


@pytest.mark.parametrize("verb", ["forget", "gc"])
def test_a_listing_is_synced_before_it_is_used(verb, monkeypatch):
    """Records are listed, then synced. In the other order, a power loss could take a record that appears in between."""
    one_thread(monkeypatch)
    prepare, act = VERBS[verb]
    store = FaultStore(clone(prepare()))
    with opened(store) as repository:
        begin = len(store.log)
        act(repository)
    log = store.log[begin:]
    acts = [i for i, (op, key) in enumerate(log) if (op, key[:10]) == ("put", "snapshots/") or op == "delete"]
    # Before a fence, gc lists the records of its session once more; it deletes nothing because of that listing.
    end = min(acts[0], *(i for i, (op, _) in enumerate(log) if op == "is_locked"), len(log))
    listed = max(i for i in range(end) if log[i][0] == "list" and log[i][1] in ("snapshots/", "snapshots/a/"))
    assert ("sync", "snapshots/a/") in log[listed:end]


def test_a_heartbeat_that_fails_ends_no_save(monkeypatch):
    one_thread(monkeypatch)
    monkeypatch.setattr("snapstore.protocol.claim.HEARTBEAT_S", 0.0)
    store = FaultStore(clone(history()))
    real = store.inner.touch

    def touch(key: str) -> None:
        raise StorageError("503")

    with opened(store) as repository:
        monkeypatch.setattr(store.inner, "touch", touch)
        save(repository, "a", 4, 4)
        monkeypatch.setattr(store.inner, "touch", real)
        save(repository, "a", 5, 5)
        repository.gc()
    assert "touch" in {operation for operation, _ in store.log}
    check_clean(store.inner)


def test_a_store_that_takes_no_heartbeats_ends_no_save(monkeypatch, caplog):
    """A server without CopyObject: each save warns once and does not ask again."""
    one_thread(monkeypatch)
    monkeypatch.setattr("snapstore.protocol.claim.HEARTBEAT_S", 0.0)
    store, asked = clone(history()), []

    def touch(key: str) -> None:
        asked.append(key)
        raise CapabilityError("NotImplemented")

    monkeypatch.setattr(store, "touch", touch)
    with opened(store) as repository:
        for step in (4, 5):
            asked.clear(), caplog.clear()
            save(repository, "a", step, step)
            assert len(asked) == 1
            (said,) = [record.message for record in caplog.records if "heartbeat" in record.message]
            assert "takes no heartbeats (NotImplemented)" in said
            assert "an hour" in said
        repository.gc()
    check_clean(store)


@pytest.mark.parametrize("is_clear", [True, False])
def test_full_at_the_commit(monkeypatch, is_clear):
    """The disk refuses the record for certain, unless a first PUT of it timed out and may still take effect."""
    one_thread(monkeypatch)
    store = FaultStore(clone(history()))
    answers = [StorageFullError("full")] * 10
    if not is_clear:
        answers[0] = StorageError("timed out")
    real = store.inner.put

    def put(key: str, data: bytes) -> None:
        if key.startswith("snapshots/"):
            raise answers.pop(0)
        real(key, data)

    with opened(store) as repository:
        monkeypatch.setattr(store.inner, "put", put)
        error, said = (StorageFullError, "full") if is_clear else (StorageError, "could not be rolled back")
        with pytest.raises(error, match=said):
            save(repository, "a", 4, 4)
        assert (keys_of(store.inner, "sessions/") == []) == is_clear  # else it protects the packs
        monkeypatch.setattr(store.inner, "put", real)
        assert len(repository.gc().fenced) == (not is_clear)
    check_clean(store.inner)
