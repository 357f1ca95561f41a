"""One wrong answer of a store, to any operation of any verb, costs no committed snapshot.

Each scenario runs once with an honest store, which shows the operations of the liar's verb. Then it runs once for each
operation and each lie of `lies_of`. At the end an honest client restores, bit for bit, every snapshot that was
committed or that a verb has reported as committed. A save and a gc work, and nothing is left that nobody needs. A verb
either raises, or has done what it reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from test_crash_points import abroad, forgotten, half_copied, half_swept, history, hollow, marked, shared, unmarked

from kit import foreign
from kit.actors import Actor
from kit.faults import Crash, FaultStore, one_thread
from kit.lies import LyingStore, every_lie
from kit.objects import clone, flip, keys_of, with_keys_alone
from kit.rank_snapshots import manifests_of
from kit.ranks import save_shared
from kit.repositories import OPTIONS, check_clean, check_whole, committed, created, opened, save, version_of
from kit.samples import SEED, THOROUGH, sampled
from kit.tally import tally
from snapstore import (
    ConflictError,
    IntegrityError,
    KeepLast,
    Repository,
    SaveOptions,
    Snapshot,
    SnapstoreError,
    StorageError,
    StorageFullError,
)
from snapstore.catalog import policy_store
from snapstore.check.damaged_packs import DamagedPacks
from snapstore.format.keys import pack_key
from snapstore.storage.base import ObjectInfo
from snapstore.storage.memory import MemoryStore

FULL = SaveOptions(pack_bytes=4096, threads=1, verify_writes="full")
#: A run tries one case in so many, with another start in each run.
EVERY = 1 if THOROUGH else 100


@dataclass
class World:
    """One store and all that use it.

    Attributes:
        may_go: versions that the scenario may forget.
        told: snapshots that a caller was told are committed.
        outcome: the result or the error of the liar's verb.
    """

    store: MemoryStore
    liar: LyingStore
    actors: list[Actor]
    may_go: set[tuple[str, int]] = field(default_factory=set)
    told: list[Snapshot] = field(default_factory=list)
    outcome: Any = None

    def enter(self, name: str, body: Callable[[Any], Any], *, store: Any = None, seen_dead: bool = False) -> Actor:
        actor = Actor(name, store or self.store, body, seen_dead=seen_dead)
        self.actors.append(actor)
        return actor

    def end(self, actor: Actor) -> None:
        """Let a save go on to its end: committed, or an honest error."""
        with suppress(ConflictError, StorageError):
            self.told.append(actor.finish())

    def lying(self, act: Callable[[Repository], Any]) -> None:
        """Run the liar's verb in a fresh process."""
        try:
            with Repository.open(self.liar, options=FULL) as repository:
                self.outcome = act(repository)
        except SnapstoreError as error:
            self.outcome = error


def saving(run: str, step: int, version: int, **options: Any) -> Callable[[Any], Any]:
    def body(store: Any) -> Any:
        with Repository.open(store, options=FULL) as repository:
            return save(repository, run, step, version, **options)

    return body


# --- scenarios -------------------------------------------------------------------------------------------------------


def beside_a_save(operation: str, part: str, *, given_up: bool = False) -> Callable[[World], None]:
    """Return a gc beside a save of another process, which has stopped before an operation; `given_up`: gc fences it."""

    def scenario(world: World) -> None:
        other = world.enter("save", saving("a", 8, 8)).until(operation, part)
        world.liar._seen_dead = given_up
        world.lying(lambda r: r.gc(fence_after_s=0.0 if given_up else 3600.0))
        world.end(other)

    return scenario


def beside_a_rewrite(verb: str, *, given_up: bool) -> Callable[[World], None]:
    def scenario(world: World) -> None:
        def body(store: Any) -> None:
            with opened(store) as repository:
                getattr(repository, verb)()

        other = world.enter(verb, body).until("put", "snapshots/")
        world.liar._seen_dead = given_up
        world.lying(lambda r: r.gc(fence_after_s=0.0 if given_up else 3600.0))
        with suppress(ConflictError):
            other.finish()

    return scenario


def of_what_a_gc_wants(world: World, run: str = "a", step: int = 4, version: int = 4) -> None:
    """A save beside a gc that has listed sessions; its base is brought back, and forgotten once more."""
    with opened(world.store) as repository:
        repository.forget_snapshots(["a@3"], force=True)

    def collecting(store: Any) -> None:
        with opened(store) as repository:
            repository.gc()

    gc = world.enter("gc", collecting).until("put", ".wait")
    gc.step()
    with opened(world.store) as repository:
        repository.unforget("a@3")
    liar = world.enter("save", saving(run, step, version), store=world.liar)
    while not liar.ended and liar.at[0:2] != ("put", _record_of(liar)):
        liar.step()
    with opened(world.store) as repository:
        repository.forget_snapshots(["a@3"], force=True)
    world.may_go.add(("a", 3))
    with suppress(IntegrityError):  # the save's session was not stored, so nothing explains its packs
        gc.finish()
    try:
        world.outcome = liar.finish()
    except SnapstoreError as error:
        world.outcome = error


def _record_of(actor: Actor) -> str:
    return actor.at[1] if actor.at and actor.at[1].startswith("snapshots/") else "-"


def by_ranks(liar: int) -> Callable[[World], None]:
    """Return a save by two ranks, one of which is lied to."""

    def scenario(world: World) -> None:
        stores = [world.liar if rank == liar else world.store for rank in range(2)]
        words = save_shared(stores, "a", 4, 4, save_options=FULL)
        world.outcome = words[liar]
        if isinstance(word := words[1 - liar], Snapshot):
            world.told.append(word)
        for word in words:
            assert isinstance(word, Snapshot | SnapstoreError), word

    return scenario


def verb(act: Callable[[Repository], Any], *, may_go: set[tuple[str, int]] = frozenset()) -> Callable[[World], None]:
    def scenario(world: World) -> None:
        world.may_go |= may_go
        world.lying(act)

    return scenario


def outdated(look: Callable[[Repository], Any], run: str) -> Callable[[World], None]:
    """Return a save by a process that has looked at the store before another process has saved the run twice."""

    def scenario(world: World) -> None:
        k, lie = world.liar.lie_at, world.liar.lie
        world.liar.lie_at = None
        with Repository.open(world.liar, options=FULL) as repository:
            if isinstance(seen := look(repository), Snapshot):
                world.told.append(seen)
            world.liar.asked.clear()
            if k is not None:
                world.liar.lie_once(k, lie)  # a stale listing lacks what follows
            with opened(world.store) as other:
                world.told += [save(other, run, step, step) for step in (10, 11)]
            try:
                world.outcome = save(repository, run, 20, 20)
            except SnapstoreError as error:
                world.outcome = error

    return scenario


def warm(act: Callable[[Repository], Any], *, may_go: set[tuple[str, int]] = frozenset()) -> Callable[[World], None]:
    """Return a verb in a process that has saved before; the lie is told after that save."""

    def scenario(world: World) -> None:
        world.may_go |= may_go
        k, lie = world.liar.lie_at, world.liar.lie
        world.liar.lie_at = None
        with Repository.open(world.liar, options=FULL) as repository:
            world.told.append(save(repository, "a", 4, 4))
            world.liar.asked.clear()
            if k is not None:
                world.liar.lie_once(k, lie)
            try:
                world.outcome = act(repository)
            except SnapstoreError as error:
                world.outcome = error

    return scenario


def copy_in(repository: Repository, *refs: str) -> Any:
    """Copy snapshots into the repository of the liar."""
    with opened(clone(history())) as source:
        result = source.copy(refs, to=repository)
    if result.failed:
        raise IntegrityError(result.failed[0][1])
    return (result.copied + result.present)[-1]


def copy_out(repository: Repository) -> None:
    """Copy from the liar: each snapshot is copied whole or not at all."""
    target = MemoryStore()
    Repository.create(target, like=repository).close()
    with suppress(SnapstoreError):
        repository.copy(to=target)
    with opened(target) as copied:
        copied.gc()
    check_clean(target)


OLD = {("a", 0), ("a", 2), ("a", 3), ("a", 4)}
SCENARIOS: dict[str, tuple[Callable[[], MemoryStore], Callable[[World], None]]] = {
    "gc beside a save that has begun": (forgotten, beside_a_save("list", "gc/")),
    "gc beside a save that writes": (forgotten, beside_a_save("put", "manifests/")),
    "gc beside a save that commits": (forgotten, beside_a_save("put", "snapshots/")),
    "gc beside a save that ends": (forgotten, beside_a_save("release", "")),
    "gc that gives a save up early": (forgotten, beside_a_save("put", "manifests/", given_up=True)),
    "gc that gives a save up": (forgotten, beside_a_save("put", "snapshots/", given_up=True)),
    "gc beside a compact": (hollow, beside_a_rewrite("compact", given_up=False)),
    "gc that gives a compact up": (hollow, beside_a_rewrite("compact", given_up=True)),
    "gc, marked": (marked, verb(lambda r: r.gc())),
    "gc, half swept": (half_swept, verb(lambda r: r.gc())),
    "gc, unmarked": (unmarked, verb(lambda r: r.gc())),
    "gc, warm": (forgotten, warm(lambda r: r.gc())),
    "first save": (created, verb(lambda r: save(r, "a", 0, 0))),
    "first save of another run": (history, verb(lambda r: save(r, "c", 0, 3))),
    "first save of what a gc wants": (history, lambda world: of_what_a_gc_wants(world, "c", 0, 3)),
    "save": (history, verb(lambda r: save(r, "a", 4, 4))),
    "save, warm": (history, warm(lambda r: save(r, "a", 5, 5))),
    "save, outdated": (history, outdated(lambda r: save(r, "a", 4, 4), "a")),
    "save, outdated, new run": (history, outdated(lambda r: r.view(), "c")),
    "save, marked": (marked, verb(lambda r: save(r, "a", 4, 4))),
    "save of what a gc wants": (history, of_what_a_gc_wants),
    "save by ranks, rank 0 lied to": (history, by_ranks(0)),
    "save by ranks, rank 1 lied to": (history, by_ranks(1)),
    "forget and gc": (history, verb(lambda r: (r.forget([KeepLast(1)], run="a"), r.gc()), may_go=OLD - {("a", 3)})),
    "forget and gc, warm": (
        history, warm(lambda r: (r.forget([KeepLast(1)], run="a"), r.gc()), may_go=OLD - {("a", 4)}),
    ),
    "unforget": (forgotten, verb(lambda r: r.unforget("a@2"))),
    "save, unchanged": (shared, verb(lambda r: save(r, "a", 4, 0))),
    "save, unchanged, warm": (history, warm(lambda r: save(r, "a", 5, 4))),
    "gc, shared": (shared, verb(lambda r: r.gc())),
    "recode and gc, shared": (shared, verb(lambda r: (r.recode(), r.gc()))),
    "tag": (history, verb(lambda r: r.tag("a@3", "good"))),
    "untag": (history, verb(lambda r: r.untag("a@1", "good"))),
    "policies": (history, verb(lambda r: r.set_policies("a", [KeepLast(2)]))),
    "recode and gc": (abroad, verb(lambda r: (r.recode(), r.gc()))),
    "compact and gc": (hollow, verb(lambda r: (r.compact(), r.gc()))),
    "repair": (forgotten, verb(lambda r: r.repair(apply=True))),
    "copy in": (half_copied, verb(lambda r: copy_in(r, "a@2", "a@3"))),
    "copy in, brought back": (half_copied, verb(lambda r: copy_in(r, "a@0"))),
    "copy out": (history, verb(copy_out)),
}  # fmt: skip


# --- what must hold --------------------------------------------------------------------------------------------------


def play(name: str, k: int | None, lie: str, actors: list[Actor]) -> World:
    """Run a scenario once, and check what must hold."""
    prepare, scenario = SCENARIOS[name]
    store = clone(prepare())
    before = committed(store)
    liar = LyingStore(store)
    if k is not None:
        liar.lie_once(k, lie)
    world = World(store, liar, actors)
    scenario(world)
    about = f"{name}: {lie} at {k}: {liar.asked[k] if k is not None and k < len(liar.asked) else ''}; {world.outcome!r}"
    liar.die()
    store.drop_locks()
    try:
        _look(name, world, before)
        if name == "repair":  # the next repair releases what this one wrongly took for damaged
            with opened(store) as repository:
                repository.repair(apply=True)
        check_whole(store, about)
    except BaseException as error:
        error.add_note(about)
        raise
    finally:
        for actor in actors:
            actor.stop()
        actors.clear()
    return world


def _look(name: str, world: World, before: dict[str, Any]) -> None:
    after = committed(world.store)
    gone = {before[i][1] for i in before.keys() - after.keys()}
    assert gone <= world.may_go, f"lost {gone}"
    wanted = [s for s in world.told if version_of(s) not in world.may_go]
    if isinstance(world.outcome, Snapshot) and name != "unforget":
        wanted.append(world.outcome)
    for snapshot in wanted:
        assert snapshot.id in after, f"{snapshot.ref} was called committed"
    if isinstance(world.outcome, SnapstoreError):
        new = after.keys() - before.keys() - {s.id for s in world.told}
        assert not new or "save" not in name or "could not be rolled back" in str(world.outcome)
        return
    if name.startswith(("save", "first save")):
        with opened(world.store) as repository:
            assert repository.snapshot(f"{world.outcome.run}@latest").id == world.outcome.id
    tags = {(of[1], tag) for of in after.values() for tag in of[2]}
    if name == "tag":
        assert (("a", 3), "good") in tags
    if name == "untag":
        assert not tags
    if name == "unforget":
        assert world.outcome.id in after
    if name == "policies":
        assert policy_store.read(world.store, "a") == [KeepLast(2)]


@cache
def cases(name: str) -> list[tuple[int, str]]:
    """Return every (operation of the liar, lie), by an honest run."""
    actors: list[Actor] = []
    world = play(name, None, "", actors)
    assert not isinstance(world.outcome, SnapstoreError), world.outcome
    return every_lie(world.liar.asked)


@pytest.mark.sampled(8)
@pytest.mark.no_cover  # see test_crash_points.py
@pytest.mark.parametrize("name", SCENARIOS)
def test_one_lie_costs_no_snapshot(name, actors, monkeypatch):
    one_thread(monkeypatch, index=False)
    found = cases(name)
    for k, lie in found[SEED % min(EVERY, len(found)) :: EVERY]:
        tally("lies")
        play(name, k, lie, actors)


# --- lies that last --------------------------------------------------------------------------------------------------


class Blind(LyingStore):
    """A store whose listings never show some records, as behind a cache, or if a server has lost part of its index."""

    hidden: frozenset[str] = frozenset()

    def list(self, prefix: str, key_only=None) -> Iterator[ObjectInfo]:
        return with_keys_alone((info for info in super().list(prefix) if info.key not in self.hidden), key_only)


@cache
def rewritten() -> MemoryStore:
    """As `hollow`, compacted and collected; a@8 is forgotten and brought back, a@9 tagged."""
    store = clone(hollow())
    with opened(store) as repository:
        repository.compact()
        repository.gc()
        repository.forget_snapshots(["a@8"])
        repository.unforget("a@8")
        repository.tag("a@9", "good")
    return store


@cache
def shared_rewritten() -> MemoryStore:
    """As `shared`; a@3 names manifests in another codec that were written for a@1, which is forgotten."""
    store = clone(shared())
    with pytest.MonkeyPatch.context() as patch, opened(store) as repository:
        foreign.readable(patch)
        repository.unforget("a@1")
        repository.recode(["a@1", "a@3"])
        repository.forget_snapshots(["a@1"])
    return store


@pytest.mark.no_cover
@pytest.mark.parametrize("prepare", [forgotten, marked, half_swept, abroad, rewritten, shared, shared_rewritten])
def test_a_gc_that_never_sees_some_records_deletes_nothing_that_they_need(prepare, monkeypatch):
    """One record is hidden, or all from one on, or all; the gc knows nothing from before."""
    one_thread(monkeypatch, index=False)
    before = committed(clone(prepare()))
    keys = keys_of(prepare(), "snapshots/")
    hidden = [frozenset([key]) for key in keys] + [frozenset(keys[n:]) for n in range(len(keys))]
    stopped = 0
    for number in sampled(len(hidden), 4):
        tally("lies")
        store = clone(prepare())
        blind = Blind(store)
        blind.hidden = hidden[number]
        about = f"without {sorted(hidden[number])}"
        with Repository.open(blind, options=FULL) as repository:
            try:
                repository.gc()
            except (IntegrityError, StorageError) as error:
                stopped += "nothing was deleted" in str(error)
        blind.die()
        store.drop_locks()
        assert committed(store) == before, about
        check_whole(store, about)
    assert stopped


def test_objects_that_nothing_explains_are_deleted_only_if_that_is_asked_for(monkeypatch):
    """Records that were removed by hand: the gc cannot tell them from records that a listing lacks."""
    one_thread(monkeypatch, index=False)
    store = clone(history())
    lost = [key for key in keys_of(store, "snapshots/") if "/000000000002-" in key]
    store.delete(lost)
    objects = keys_of(store, "packs/") + keys_of(store, "manifests/")
    with opened(store) as repository:
        for dry_run in (True, False):
            with pytest.raises(IntegrityError, match=r"that no record explains.*nothing was deleted.*--unexplained"):
                repository.gc(dry_run=dry_run)
        assert keys_of(store, "packs/") + keys_of(store, "manifests/") == objects
        assert keys_of(store, "gc/") == []  # no mark, which would keep saves from building on them
        assert repository.gc(dry_run=True, unexplained=True).deleted_objects
        assert repository.gc(unexplained=True).deleted_objects
    check_whole(store)


# --- what a save asks ------------------------------------------------------------------------------------------------


def test_requests_of_a_save_beside_packs_and_manifests(monkeypatch):
    """All operations but those on packs and manifests. On S3 each is a request, which `tools/bench s3` counts."""
    one_thread(monkeypatch, index=False)
    store = LyingStore(clone(history()))
    with opened(store) as repository:
        save(repository, "a", 4, 4)
        store.asked.clear()
        save(repository, "a", 5, 5)
    asked = [(one.name, one.key.partition("/")[0]) for one in store.asked if one.name not in ("sync", "is_locked")]
    beside = [one for one in asked if one[1] not in ("packs", "manifests")]
    session, record, page = "sessions", "snapshots", "pages"
    assert beside == [
        ("get", "config"), ("lock", session), ("list", "gc"), ("list", "gc"), ("list", record), ("list", record),
        ("get", page),  # the next one, after the records
        ("sizes", ""), ("get", session), ("put", record), ("get", record),
        ("get", session), ("get", page),  # is there a page that makes the record void?
        ("release", session),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
@pytest.mark.parametrize("verify", ["sample", "full"])
def test_a_pack_or_manifest_that_was_not_stored(monkeypatch, verify, kind):
    """The default trusts the store; `verify_writes="full"` does not."""
    one_thread(monkeypatch, index=False)
    inner = clone(history())
    store = LyingStore(inner)
    with Repository.open(store, options=replace(FULL, verify_writes=verify)) as repository:
        real = store._put

        def losing(name: str, key: str, data: Any) -> None:
            if not key.startswith(kind):
                real(name, key, data)

        store._put = losing
        if verify == "sample":
            save(repository, "a", 4, 4)
            store._put = real
            assert [s.ref for s in repository.check().damaged] == ["a@4"]
            after = save(repository, "a", 5, 4)  # the same content: a pack that is not listed is not taken for stored
            assert [s.ref for s in repository.check("restore").damaged] == ["a@4"]
            assert after.new_chunks or kind == "manifests/"
            return
        with pytest.raises(StorageError, match=r"was put, but is not there.*nothing was committed"):
            save(repository, "a", 4, 4)
        store._put = real
    assert {s.state for s in _states(inner, 4)} == {"aborted"}
    check_whole(inner)


def _states(store: MemoryStore, step: int) -> list[Snapshot]:
    with opened(store) as repository:
        return [s for s in repository.view().snapshots("a", states=None) if s.step == step]


def test_a_sleeper_whose_session_is_gone_commits_nothing(actors):
    """Its session was removed, by hand or by a gc that did not see it: the objects of the save may be gone."""
    store = clone(history())
    actor = Actor("save", store, saving("a", 8, 8)).until("get", "sessions/")
    actors.append(actor)
    for key in keys_of(store, "sessions/"):
        store.delete([key])
    with pytest.raises(ConflictError, match=r"its session is gone.*nothing was committed; save again"):
        actor.finish()
    assert {s.state for s in _states(store, 8)} == {"aborted"}
    check_whole(store)


@pytest.mark.parametrize("at", [0, 8, 40, 56])
@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
def test_a_damaged_header_that_no_snapshot_needs_stops_no_gc(monkeypatch, kind, at):
    """An object of a dead save is damaged in its magic, its version, or the key of the record that it was made for."""
    one_thread(monkeypatch, index=False)
    store = clone(history())
    dead = FaultStore(store)
    with opened(dead) as repository:
        monkeypatch.setattr(dead, "put", _dying(dead))
        with pytest.raises(Crash):
            save(repository, "a", 7, 7)
    key = next(key for key in keys_of(store, kind) if key not in keys_of(history(), kind))
    flip(store, key, at, 0x55)
    check_whole(store)


def _dying(store: FaultStore) -> Callable[[str, Any], None]:
    """Return a `put` that ends the process when it would commit."""
    real = store.put

    def put(key: str, data: Any) -> None:
        if key.startswith("snapshots/"):
            store.die()
            raise Crash(key)
        real(key, data)

    return put


class Hiding(FaultStore):
    """A store whose listings never show one object."""

    hidden = ""

    def list(self, prefix, key_only=None):
        return with_keys_alone((info for info in super().list(prefix) if info.key != self.hidden), key_only)


@pytest.mark.parametrize("verb", ["gc", "forget", "forget_snapshots"])
def test_a_revision_that_no_listing_shows_keeps_no_snapshot_for_ever(verb):
    inner = MemoryStore()
    with Repository.create(inner, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        repository.forget_snapshots(["a@1"])
        if verb == "gc":
            revision = repository.unforget("a@1")
        else:
            repository.unforget("a@1")
            revision = repository.tag("a@1", "kept")
    store = Hiding(inner)
    store.hidden = revision.key
    before = keys_of(inner)
    with opened(store) as repository, pytest.raises(StorageError, match="does not show it"):
        {
            "gc": repository.gc,
            "forget": lambda: repository.forget([KeepLast(1)], run="a"),
            "forget_snapshots": lambda: repository.forget_snapshots(["a@1"]),
        }[verb]()
    assert {key for key in before if not key.startswith("gc/")} <= set(keys_of(inner))
    with opened(inner) as repository:
        assert repository.snapshot("a@1").state == "committed"


def test_a_full_store_that_does_not_delete_leaves_the_session():
    """The session of a save explains its objects, so it stays until they are certainly gone."""

    class Full(FaultStore):
        kept = True

        def put(self, key, data):
            if key.startswith("snapshots/"):
                raise StorageFullError(f"{key}: full")
            super().put(key, data)

        def delete(self, keys):
            if not self.kept:
                super().delete(keys)

    for kept in (True, False):
        inner = MemoryStore()
        with Repository.create(inner, chunk_bytes=1024, options=OPTIONS) as repository:
            save(repository, "a", 0, 0)
        store = Full(inner)
        store.kept = kept
        with opened(store) as repository, pytest.raises(StorageFullError):
            save(repository, "a", 1, 1)
        assert bool(keys_of(inner, "sessions/")) == kept
        with opened(inner) as repository:
            repository.gc()
            assert repository.stats().unneeded_bytes == 0


# --- a check that is lied to -----------------------------------------------------------------------------------------


@cache
def damaged() -> MemoryStore:
    """As `history`; a pack, the newest record of a@1 and the policies of run a are damaged."""
    store = clone(history())
    with opened(store) as repository:
        record = repository.snapshot("a@1").key
    for key, at in ((keys_of(store, "packs/")[0], 300), (record, 60), (keys_of(store, "policies/")[0], 20)):
        flip(store, key, at)
    return store


def _checked(store: LyingStore, level: str) -> Any:
    """Return what a check finds; an error."""
    try:
        with Repository.open(store, options=OPTIONS) as repository:
            found = repository.check(level)
    except SnapstoreError as error:
        return error
    keys = [{s.key for s in some} for some in (found.restorable, found.damaged, found.unknown)]
    return {(p.kind, p.key) for p in found.problems}, keys, found.packs, found.packs_read, found.unneeded_bytes


@pytest.mark.no_cover
@pytest.mark.parametrize("prepare", [history, damaged])
def test_one_lie_changes_no_finding_of_a_check(prepare, monkeypatch):
    one_thread(monkeypatch, index=False)
    honest = LyingStore(clone(prepare()))
    expected = _checked(honest, "data")
    assert isinstance(expected, tuple)
    found = every_lie(honest.asked)
    told = 0
    for k, lie in (found[n] for n in sampled(len(found), 7)):
        tally("lies")
        lying = LyingStore(clone(prepare()))
        lying.lie_once(k, lie)
        outcome = _checked(lying, "data")
        told += lying.told
        assert isinstance(outcome, SnapstoreError) or outcome == expected, (lie, honest.asked[k])
    assert told > 10


def test_a_blob_of_another_pack_is_read_again():
    """The bytes of another pack are a valid blob there, of another chunk."""
    store = MemoryStore()
    rng = np.random.default_rng(0)
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        for run in "ab":
            repository.save({"w": rng.integers(0, 256, 4096, np.uint8)}, run=run, step=0)
        _, m = manifests_of(store, repository.view().resolve("a@0"))[-1]
    lying = LyingStore(store)
    lying.lie_once(0, "other 0")
    at = int(m.table.ref_offsets[0]), int(m.table.ref_lengths[0]), m.table.ref_digests[0].tobytes()
    assert DamagedPacks(lying).holds(pack_key(m.header.pack_names[0]), *at)
    assert lying.told
    assert len(lying.asked) == 2


@pytest.mark.no_cover
def test_one_lie_changes_no_count(monkeypatch):
    """`stats` counts what is there, or names the records that it could not read, or fails."""
    one_thread(monkeypatch, index=False)
    honest = LyingStore(clone(forgotten()))
    with Repository.open(honest, options=OPTIONS) as repository:
        expected = repository.stats()
    told = 0
    for k, lie in every_lie(honest.asked):
        if honest.asked[k].name != "list":
            continue
        tally("lies")
        lying = LyingStore(clone(forgotten()))
        lying.lie_once(k, lie)
        with suppress(SnapstoreError), Repository.open(lying, options=OPTIONS) as repository:
            found = repository.stats()
            assert found.unknown or found == expected, (lie, honest.asked[k])
        told += lying.told
    assert told > 5
