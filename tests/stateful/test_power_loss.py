"""Power lost after every system call of every verb on a local disk: what a save had returned is there, bit by bit."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import faults
import power
import pytest
from faults import OPTIONS, check_whole, one_thread, opened, sampled, save
from tally import tally

from snapstore import KeepLast, Repository
from snapstore.storage import is_key
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.no_cover


@dataclass
class History:
    """What was done to files, and what a user could rely on.

    Attributes:
        begins: of every verb, its first event.
        kept: ids of the snapshots that are committed before and after it.
    """

    events: list[power.Event] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    kept: list[set[str]] = field(default_factory=list)

    def at(self, moment: int) -> tuple[str, set[str]]:
        verb = bisect_right(self.begins, moment) - 1
        return self.names[verb], self.kept[verb]


@cache
def history() -> History:
    made = History()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        one_thread(patch, index=False)
        root = Path(folder) / "repository"
        root.mkdir()
        recorder = power.Recorder(root)
        made.events = recorder.events
        before: set[str] = set()

        def do(name, verb):
            nonlocal before
            made.begins.append(len(recorder.events))
            made.names.append(name)
            with recorder.recording():
                verb()
            with opened(LocalStore(root)) as repository:
                after = {snapshot.id for snapshot in repository.snapshots()}
            made.kept.append(before & after)
            before = after

        def verb(function):
            def run():
                with opened(LocalStore(root)) as repository:  # a process of its own: it trusts no directory yet
                    function(repository)

            return run

        def create():
            Repository.create(LocalStore(root), chunk_bytes=1024, options=OPTIONS).close()

        do("create", create)
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
    return made


def disks(moments):
    """(moment, disk after so many events)."""
    disk, wanted = power.Disk(), set(moments)
    for moment, event in enumerate(history().events):
        if moment in wanted:
            yield moment, disk
        disk.apply(event)
    yield len(history().events), disk


def check(moment, disk, choose, about):
    """After the power loss: what was promised is there, all that is there is whole, and life goes on."""
    tally("power losses")
    verb, kept = history().at(moment)
    about = f"{about}, in {verb}, after {moment} events: {history().events[max(0, moment - 3) : moment]!r:.300}"
    store = MemoryStore()
    for name, data in disk.left(choose).items():
        if is_key(name) and not name.startswith("tmp/"):
            store.put(name, data)
    if "config" not in set(faults.keys_of(store)):
        assert verb == "create", about
        return
    with opened(store) as repository:
        found = {snapshot.id for snapshot in repository.snapshots()}
        assert kept <= found, about
    check_whole(store, about)


KINDS = {"nothing unsynced": power.nothing_unsynced, "names without bytes": power.names_without_bytes}


@pytest.mark.parametrize("kind", KINDS)
def test_at_every_system_call(monkeypatch, kind):
    total = len(history().events)
    one_thread(monkeypatch, index=False)
    for moment, disk in disks(sampled(total, 12)):
        check(moment, disk, KINDS[kind], kind)


def test_at_random(monkeypatch):
    """Any subset of the names, any length of the bytes."""
    total = len(history().events)
    one_thread(monkeypatch, index=False)
    for moment, disk in disks(sampled(total, 12)):
        for seed in range(8 if faults.THOROUGH else 1):
            seed += 1000 * moment + faults.SEED
            check(moment, disk, power.at_random(seed), f"seed {seed}")


def _check_all(moments):
    for moment, disk in disks(moments):
        check(moment, disk, power.nothing_unsynced, "no fsync of directories")


def test_the_model_finds_a_put_without_fsync(monkeypatch):
    """Or else none of this says anything: a store that does not sync its files, or its directories, is caught."""
    monkeypatch.setattr("snapstore.storage.local._fsync_directory", lambda directory: None)
    history.cache_clear()
    try:
        total = len(history().events)
        with pytest.raises(AssertionError, match=r"in save|in fork"):
            _check_all(range(total // 3, total, 20))
    finally:
        history.cache_clear()
