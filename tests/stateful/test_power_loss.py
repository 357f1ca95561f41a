"""A power loss after any system call on a local disk loses no snapshot whose save had returned."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kit import foreign, power
from kit.faults import one_thread
from kit.objects import flip, keys_of
from kit.ranks import save_shared
from kit.repositories import OPTIONS, check_whole, lasting, opened, save, values
from kit.samples import SEED, THOROUGH, sampled
from kit.tally import tally
from snapstore import KeepLast, Repository, Snapshot
from snapstore.catalog.lmdb_file import Environment
from snapstore.format.blobs import pack
from snapstore.protocol import joining
from snapstore.storage.base import is_key
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.no_cover

#: By the id of a snapshot, or by `policies of RUN`.
Standing = dict[str, Any]


@dataclass
class History:
    """The operations on files, and what a user could rely on.

    Attributes:
        begins: the number of the first event of every verb.
        around: `standing` before and after every verb.
        index: (events so far, data of LMDB, its seal).
    """

    events: list[power.Event] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    around: list[tuple[Standing, Standing]] = field(default_factory=list)
    index: list[tuple[int, bytes, bytes]] = field(default_factory=list)

    def at(self, moment: int) -> tuple[str, Standing, Standing]:
        verb = bisect_right(self.begins, moment) - 1
        return self.names[verb], *self.around[verb]


def standing(repository: Repository) -> Standing:
    """Return each snapshot's state, tags and lasting fields, and each run's policies.

    Of a swept one pages keep less: where it was, and when.
    """
    found = repository.view().snapshots(states=("committed", "forgotten", "swept"))
    of_runs = {f"policies of {run}": repository.policies(run) for run in sorted({s.run for s in found})}
    swept = {s.id: (s.state, s.run, s.step, s.seq, s.parent, s.created, s.reason) for s in found if s.state == "swept"}
    return {s.id: (s.state, s.tags, lasting(s)) for s in found} | swept | of_runs


def _verbs(do, verb):
    for step in range(3):
        do(f"save a@{step}", verb(lambda r, step=step: save(r, "a", step, step)))
    do("fork", verb(lambda r: save(r, "b", 0, 50, parent="a@1")))
    do("tag", verb(lambda r: r.tag("a@1", "good")))
    do("forget", verb(lambda r: r.forget([KeepLast(1)], run="a")))
    do("gc", verb(lambda r: r.gc()))
    do("save again", verb(lambda r: save(r, "a", 3, 0)))  # content that gc has deleted
    do("forget one", verb(lambda r: r.forget_snapshots(["a@2"])))
    do("unforget", verb(lambda r: r.unforget("a@2")))
    do("forget more", verb(lambda r: r.forget_snapshots(["a@2", "b@0"], force=True)))
    do("second gc", verb(lambda r: r.gc()))
    do("last save", verb(lambda r: save(r, "b", 1, 51)))


def _joining(do, verb):
    """Joins beside all of `_verbs`: each gc joins too, and each join ends with a volume and deletions."""
    joins = itertools.count()

    def also(name, play):
        do(name, play)
        if name != "create":
            do(f"join {next(joins)}", verb(lambda r: [joining.join(r.context, run, at_least=1) for run in "ab"]))

    _verbs(also, verb)


def _twin(repository):
    """Save an independent copy of a snapshot, to repair the other from."""
    options = replace(repository.context.options, share_runs=False)
    with Repository.open(repository.store, options=options) as alone:
        alone.save(values("a", 4), run="twin", step=0, metadata=["a", 4])


def _rewriting(do, verb):
    """recode, compact and repair; untag and policies. From "damage" on, only a repair helps."""
    for step in range(5):
        do(f"save a@{step}", verb(lambda r, step=step: save(r, "a", step, step)))
    with foreign.written():
        do("foreign save", verb(lambda r: save(r, "b", 0, 50, tags=("good",))))
    do("recode", verb(lambda r: _did(r.recode().recoded)))
    do("untag", verb(lambda r: r.untag("b@0", "good")))
    do("policies", verb(lambda r: r.set_policies("a", [KeepLast(2)])))
    do("forget", verb(lambda r: r.forget(r.policies("a"), run="a")))
    do("gc", verb(lambda r: r.gc()))
    do("compact", verb(lambda r: _did(r.compact().rewritten)))
    do("second gc", verb(lambda r: r.gc()))
    do("twin", verb(_twin))
    do("damage", verb(_damage))
    do("repair", verb(lambda r: _did(r.repair(apply=True).healed)))
    do("purge", verb(lambda r: r.repair(apply=True, purge=True)))
    do("last gc", verb(lambda r: r.gc()))


def _ranks(do, verb):
    """Saves of several ranks: on other numbers of ranks, of content that gc has deleted, and on one rank after them."""
    for step, count in enumerate((3, 2, 3)):
        do(f"save a@{step}", verb(lambda r, step=step, count=count: _save_on(count, r, step, step)))
    do("forget", verb(lambda r: r.forget([KeepLast(2)], run="a")))
    do("gc", verb(lambda r: r.gc()))
    do("save again", verb(lambda r: _save_on(2, r, 3, 0)))
    do("save alone", verb(lambda r: save(r, "a", 4, 4)))


def _save_on(count, repository, step, version):
    words = save_shared([LocalStore(repository.store.root) for _ in range(count)], "a", step, version)
    assert all(isinstance(word, Snapshot) for word in words), words


def _did(something):
    assert something


def _damage(repository):
    """Flip a bit in the first pack that a@4 has written."""
    store, wanted = repository.store, repository.snapshot("a@4").id
    heads = {key: pack.read_header(store, key) for key in keys_of(store, "packs/")}
    key = min((head.sequence, key) for key, head in heads.items() if head.save_id.hex() == wanted)[1]
    flip(store, key, pack.HEADER.size + 50)


#: These need a repair, whatever the power loss has done.
DAMAGED = {"damage", "repair", "purge", "last gc"}
PAGE_BYTES = 4096
HISTORIES = {"verbs": _verbs, "joining": _joining, "rewriting": _rewriting, "ranks": _ranks}


@cache
def history(which: str) -> History:
    """Play one of `HISTORIES`; record its file operations, and its index whenever that is sealed."""
    made = History()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        one_thread(patch)
        foreign.readable(patch)
        patch.setattr(joining, "AT_LEAST", 2)
        real = Environment._seal

        def seal(environment: Environment) -> None:
            real(environment)
            data, seal = ((environment._folder / name).read_bytes() for name in ("data.mdb", "verified"))
            made.index.append((len(recorder.events), data[: int(seal.split()[0])], seal))

        patch.setattr(Environment, "_seal", seal)
        root = Path(folder) / "repository"
        root.mkdir()
        recorder = power.Recorder(root)
        made.events = recorder.events
        before: Standing = {}

        def do(name, verb):
            nonlocal before
            made.begins.append(len(recorder.events))
            made.names.append(name)
            with recorder.recording():
                verb()
            with opened(LocalStore(root)) as repository:
                after = standing(repository)
            made.around.append((before, after))
            before = after

        def verb(function):
            def run():
                with opened(LocalStore(root)) as repository:  # a process of its own: it trusts no directory yet
                    function(repository)

            return run

        def create():
            Repository.create(LocalStore(root), chunk_bytes=1024, options=OPTIONS).close()

        do("create", create)
        HISTORIES[which](do, verb)
    return made


def disks(which, moments):
    """Yield (moment, the disk after so many events)."""
    disk, wanted = power.Disk(), set(moments)
    for moment, event in enumerate(history(which).events):
        if moment in wanted:
            yield moment, disk
        disk.apply(event)
    yield len(history(which).events), disk


def check(which, moment, disk, choose, about, store=None):
    """Check a disk after a power loss: all that was durable is there and whole, and a save and a gc work."""
    tally("power losses")
    verb, before, after = history(which).at(moment)
    last = history(which).events[max(0, moment - 3) : moment]
    about = f"{about}, in {verb}, after {moment} events: {last!r:.300}"
    store = MemoryStore() if store is None else store
    for name, data in disk.left(choose).items():
        if is_key(name) and not name.startswith("tmp/"):
            store.put(name, data)
    if "config" not in set(keys_of(store)):
        assert verb == "create", about
        return
    with opened(store) as repository:
        found = standing(repository)
        for name in {*found, *before, *after}:  # a verb that returned has its effect, one that had not begun has none
            assert found.get(name) in (before.get(name), after.get(name)), f"{about}: {name}"
        if verb in DAMAGED:
            repository.repair(apply=True)
            repository.gc()  # ends the session that a repair has left
            assert repository.repair(apply=True, purge=True).ok, about
    check_whole(store, about)


KINDS = {"nothing unsynced": power.nothing_unsynced, "names without bytes": power.names_without_bytes}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("which", HISTORIES)
@pytest.mark.parametrize("kind", KINDS)
def test_at_every_system_call(monkeypatch, kind, which):
    total = len(history(which).events)
    one_thread(monkeypatch, index=False)
    for moment, disk in disks(which, sampled(total, 36)):
        check(which, moment, disk, KINDS[kind], kind)


@pytest.mark.parametrize("which", HISTORIES)
def test_at_random(monkeypatch, which):
    """Any subset of the names, any length of the bytes."""
    total = len(history(which).events)
    one_thread(monkeypatch, index=False)
    for moment, disk in disks(which, sampled(total, 40)):
        for seed in range(8 if THOROUGH else 1):
            seed += 1000 * moment + SEED
            check(which, moment, disk, power.at_random(seed), f"seed {seed}")


@pytest.mark.parametrize("which", HISTORIES)
def test_with_what_is_left_of_an_index(monkeypatch, tmp_path, which):
    """LMDB syncs nothing: any page, and the seal, may be of any age. Only the objects count."""
    total = len(history(which).events)
    one_thread(monkeypatch)
    for moment, disk in disks(which, sampled(total, 90)):
        random = Random(1000 * moment + SEED)
        store = LocalStore(tmp_path / str(moment), create=True)
        sealed = [(data, seal) for number, data, seal in history(which).index if number <= moment]
        if sealed:
            data, seal = left_of_an_index(sealed, random)
            folder = tmp_path / f"index of {moment}"
            folder.mkdir()
            (folder / "data.mdb").write_bytes(data)
            (folder / "verified").write_bytes(seal)
            monkeypatch.setattr("snapstore.catalog.index.folder_for", lambda *_, folder=folder: (folder, False))
        check(which, moment, disk, power.nothing_unsynced, "with an index", store)


def left_of_an_index(sealed: list[tuple[bytes, bytes]], random: Random) -> tuple[bytes, bytes]:
    """Return pages of the last versions, mostly of the newest, or zeros; and a seal, or half of one."""
    ages = sealed[-random.choice((1, 2, 8)) :]
    pages = []
    for at in range(0, len(ages[-1][0]), PAGE_BYTES):
        data = ages[-1][0] if random.random() < 0.7 else random.choice([*(data for data, _ in ages), b""])
        pages.append(data[at : at + PAGE_BYTES].ljust(PAGE_BYTES, b"\0"))
    seal = random.choice([ages[-1][1], ages[-1][1], ages[0][1], ages[-1][1][:7], b""])
    return b"".join(pages), seal


def _check_all(moments):
    for moment, disk in disks("verbs", moments):
        check("verbs", moment, disk, power.nothing_unsynced, "no fsync of directories")


def test_a_store_that_does_not_sync_its_directories_is_caught(monkeypatch):
    """A store that does not sync its directories is caught; without this, the other tests would prove nothing."""
    monkeypatch.setattr("snapstore.storage.atomic_write.fsync_directory", lambda *_: None)
    history.cache_clear()
    try:
        total = len(history("verbs").events)
        with pytest.raises(AssertionError, match=r"in save|in fork"):
            _check_all(range(total // 3, total, 20))
    finally:
        history.cache_clear()
