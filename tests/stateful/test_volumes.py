"""If a volume goes away or is replaced at any store operation, nothing is lost and nothing is written elsewhere.

This is done in two ways: folders are renamed, and volumes are really unmounted and mounted over. Afterwards nothing was
written into the replacement, every snapshot that was reported as committed is in the repository, and saves work again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.faults import FaultStore, one_thread
from kit.objects import flip, keys_of
from kit.repositories import OPTIONS, check_whole, opened, save
from kit.samples import sampled
from kit.tally import tally
from snapstore import KeepLast, Repository, SnapshotManager, SnapstoreError, StorageError
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.no_cover

#: The replacement: nothing, another repository, an older copy of the same one.
OTHERS = ("empty", "another", "copy")


def _tag(repository):
    repository.tag("a@3", "new")
    repository.untag("a@1", "good")


def _save_tagged(repository):
    save(repository, "a", 4, 4, tags=("good",))


def _rewrite(repository):
    repository.compact()
    repository.recode()


def _steps(repository):
    return [s.step for s in repository.snapshots()]


#: The verb, and what holds afterwards unless it raised.
VERBS: dict[str, tuple[Callable[[Repository], Any], Callable[[Repository], bool]]] = {
    "save": (lambda r: save(r, "a", 4, 4), lambda r: _steps(r) == [0, 1, 3, 4]),
    "save tagged": (_save_tagged, lambda r: _steps(r) == [0, 1, 3, 4] and r.snapshot("a@good").step == 4),
    "tag": (_tag, lambda r: r.snapshot("a@new").step == 3 and r.snapshot("a@1").tags == []),
    "forget": (lambda r: r.forget([KeepLast(1)], run="a"), lambda r: _steps(r) == [1, 3]),
    "unforget": (lambda r: r.unforget("a@2"), lambda r: _steps(r) == [0, 1, 2, 3]),
    "gc": (lambda r: r.gc(), lambda r: _steps(r) == [0, 1, 3]),
    "rewrite": (_rewrite, lambda r: _steps(r) == [0, 1, 3]),
    "repair": (lambda r: r.repair(apply=True), lambda r: _steps(r) == [0, 1, 3]),
    "policies": (lambda r: r.set_policies("a", [KeepLast(3)]), lambda r: r.policies("a") == [KeepLast(3)]),
}


class Swapping(FaultStore):
    """Calls `swap` before its k-th operation."""

    def __init__(self, inner: LocalStore, swap_at: int | None, swap: Callable[[], None]) -> None:
        super().__init__(inner)
        self.swap_at, self.swap = swap_at, swap

    def _act(self, name: str, key: str, effect: Callable[[], Any]) -> Any:
        if len(self.log) == self.swap_at:
            self.swap()
        return super()._act(name, key, effect)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Make the repository, and all that may take its place."""
    folder = tmp_path_factory.mktemp("volumes")
    places = {name: folder / name for name in ("repository", *OTHERS)}
    places["empty"].mkdir()
    with Repository.create(places["another"], chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(2):
            save(repository, "a", step, step)
    with Repository.create(places["repository"], chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(2):
            save(repository, "a", step, step, tags=("good",) if step == 1 else ())
        shutil.copytree(places["repository"], places["copy"])
        for step in range(2, 4):
            save(repository, "a", step, step)
        repository.forget_snapshots(["a@2"])  # work for a gc
    return places


class Renamed:
    """Places that are swapped by renaming their folders."""

    def __init__(self, folder: Path, made: dict[str, Path], other: str) -> None:
        self.root, self._aside, self._other = folder / "r", folder / "aside", folder / "other"
        shutil.copytree(made["repository"], self.root)
        shutil.copytree(made[other], self._other)
        self.swapped = False
        self._before = contents(self._other)

    def swap(self) -> None:
        self.root.rename(self._aside)
        self._other.rename(self.root)
        self.swapped = True

    def back(self) -> None:
        """Bring the repository back; check that its replacement has not changed."""
        assert self.swapped
        self.root.rename(self._other)
        self._aside.rename(self.root)
        assert contents(self._other) == self._before

    def close(self) -> None:
        pass


class Mounted(Renamed):
    """A volume that is unmounted lazily, as if processes use it, and perhaps replaced by another one."""

    def __init__(self, folder: Path, made: dict[str, Path], other: str) -> None:
        super().__init__(folder, made, other)
        self._volume, self._is_mounted = folder / "volume", False
        self.root.rename(self._volume)
        self.root.mkdir()
        self._mount(self._volume)

    def _mount(self, place: Path) -> None:
        done = subprocess.run(["mount", "--bind", place, self.root], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        self._is_mounted = True

    def _unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.root], check=True)

    def swap(self) -> None:
        self._unmount()
        if any(self._other.iterdir()):
            self._mount(self._other)
        self.swapped = True

    def back(self) -> None:
        assert self.swapped
        if any(self._other.iterdir()):
            self._unmount()
            assert contents(self._other) == self._before
        assert list(self.root.iterdir()) == [], "written into the empty mount point"
        self._mount(self._volume)

    def close(self) -> None:
        if self._is_mounted:
            with suppress(subprocess.CalledProcessError):
                self._unmount()


WAYS = {"renamed": Renamed, "mounted": Mounted}


def operations(made, folder: Path, verb) -> int:
    """Return how many operations of the store a verb makes."""
    root = Path(shutil.copytree(made["repository"], folder / "counted"))
    store = Swapping(LocalStore(root), None, lambda: None)
    with opened(store) as repository:
        begun = len(store.log)
        verb(repository)
    return len(store.log) - begun


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_at_every_operation(made, tmp_path, monkeypatch, verb, way):
    one_thread(monkeypatch, index=False)
    total = operations(made, tmp_path, VERBS[verb][0])
    cases = [(at, other) for at in range(total) for other in OTHERS if at or other != "copy"]
    for number in sampled(len(cases), 1 + len(cases) // (6 if way == "renamed" else 4)):
        at, other = cases[number]
        folder = tmp_path / str(number)
        folder.mkdir()
        places = WAYS[way](folder, made, other)
        try:
            check(places, verb, at, f"{verb}, {other} at {at} of {total}")
        finally:
            places.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("other", OTHERS)
def test_after_the_record_of_a_tagged_save(made, tmp_path, monkeypatch, other):
    """The session has ended when a save takes its tags from other snapshots: still nothing is written elsewhere."""
    one_thread(monkeypatch, index=False)
    total = operations(made, tmp_path, _save_tagged)
    for at in range(total - 8, total):
        (folder := tmp_path / str(at)).mkdir()
        check(Renamed(folder, made, other), "save tagged", at, f"save tagged, {other} at {at} of {total}")


def check(places: Renamed, verb: str, at: int, about: str) -> None:
    tally("swapped volumes")
    do, holds = VERBS[verb]
    store = Swapping(LocalStore(places.root), None, places.swap)
    with opened(store) as repository:
        newest_and_tagged = {s.id for s in repository.snapshots() if s.step in (1, 3)}
        before = newest_and_tagged if verb == "forget" else {s.id for s in repository.snapshots()}
        store.swap_at = len(store.log) + at
        failed = ""
        try:
            do(repository)
        except SnapstoreError as error:
            failed = str(error)
        if not places.swapped:  # it took fewer operations this time
            return
        assert not failed or str(places.root) in failed, about
        if at == 0:
            assert failed, f"{about}: began in another place"
        places.back()
        store.swap_at = None
        assert failed or holds(repository), about
        assert before <= {s.id for s in repository.snapshots()}, about
        save(repository, "a", 5, 5)  # the same process goes on
        repository.gc()
    check_whole(LocalStore(places.root), about)


SCRIPT = """
import sys, torch
from snapstore import SnapshotManager, StorageError
from snapstore.storage.local import LocalStore
url, at = sys.argv[1], int(sys.argv[2])
state = lambda step: {"w": torch.full((5000,), float(step)), "step": step}
real, count = LocalStore.put, 0

def put(self, key, data):
    global count
    count += 1
    if count == at:
        print("ready", flush=True)
        sys.stdin.readline()
    real(self, key, data)

with SnapshotManager(url, run="r", async_save=True) as snapshots:
    snapshots.save(0, state(0)).result()
    LocalStore.put = put
    handle = snapshots.save(1, state(1))
    try:
        snapshots.wait_until_finished()
        print("committed", flush=True)
    except StorageError as error:
        print("raised:", str(error).replace("\\n", " "), flush=True)
    sys.stdin.readline()
    snapshots.save(2, state(2)).result()
    print(snapshots.all_steps(), flush=True)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [1, 3])
def test_a_training_process_whose_volume_is_unmounted(made, tmp_path, at):
    """A real process and a real mount, at its first pack and at its record: the manager raises at its next call, and
    works again once the volume is back."""
    places = Mounted(tmp_path, made, "empty")
    try:
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT, places.root, str(at)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, bufsize=1,
        ) as job:  # fmt: skip
            assert job.stdout.readline() == "ready\n"
            places.swap()
            job.stdin.write("\n")
            said = job.stdout.readline()
            assert said.startswith("raised:")
            assert f"{places.root}: " in said
            assert "unmounted or replaced" in said
            places.back()
            job.stdin.write("\n")
            assert job.stdout.readline() == "[0, 2]\n"
            job.stdin.close()
        with Repository.open(places.root) as repository:
            assert [s.step for s in repository.snapshots("r")] == [0, 2]
            repository.gc()
            assert repository.check("restore").ok
    finally:
        places.close()


def test_a_remounted_volume_is_the_same_repository(made, tmp_path):
    """Another device or inode between two saves is no error if the uuid is the same."""
    places = Renamed(tmp_path, made, "empty")
    with SnapshotManager(places.root, run="r", options=OPTIONS) as snapshots:
        snapshots.save(0, {"w": torch.zeros(10)}).result()
        places.swap()
        for call in (lambda: snapshots.save(1, {"w": torch.ones(10)}).result(), lambda: snapshots.save(2, {}).result()):
            with pytest.raises(StorageError, match="it has no config; its volume was unmounted or replaced"):
                call()
        assert list(places.root.iterdir()) == []
        places.root.rmdir()
        shutil.copytree(tmp_path / "aside", places.root)
        snapshots.save(3, {"w": torch.ones(10)}).result()
        assert snapshots.all_steps() == [0, 3]


@pytest.mark.parametrize("how", ["gone", "another", "another, looked at"])
def test_a_store_that_holds_another_repository_by_now(how):
    """A store in memory has no folder to pin: only the config's uuid tells that it holds another repository."""
    store, other = MemoryStore(), MemoryStore()
    with Repository.create(other, chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
        ours, store._objects = store._objects, dict(other._objects) if how != "gone" else {}
        if "looked at" in how:  # its records are cached now, but must not count as proof
            repository.snapshots()
        before = keys_of(store)
        for verb in (
            lambda: save(repository, "a", 1, 1),
            lambda: repository.gc(),
            lambda: repository.tag("a@0", "x"),
            lambda: repository.forget_snapshots(["a@0"], force=True),
            lambda: repository.recode(),
            lambda: repository.set_policies("a", [KeepLast(1)]),
        ):
            with pytest.raises(StorageError, match=r"not the repository that was opened: .*its volume was unmounted"):
                verb()
        assert keys_of(store) == before
        store._objects = ours
        save(repository, "a", 1, 1)
    check_whole(store)


def test_a_repair_writes_no_config_into_an_empty_folder(made, tmp_path):
    """A config would make the folder a repository: running jobs would find their digest seed there, and commit."""
    places = Renamed(tmp_path, made, "empty")
    (places.root / "config").unlink()
    with opened(LocalStore(places.root), damaged=True) as repository:
        places.swap()
        with pytest.raises(StorageError, match="it holds no record and no manifest; its volume was unmounted"):
            repository.repair(apply=True)
        places.back()
        repository.repair(apply=True)
    check_whole(LocalStore(places.root))


@pytest.mark.parametrize("how", ["lost", "damaged", "repaired"])
def test_a_config_that_is_not_as_it_was_stops_no_training(how, caplog):
    """A record that the process knows also proves that the repository is the same."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
        if how == "lost":
            store.delete(["config"])
        else:
            flip(store, "config", 40)
        if how == "repaired":
            with opened(store, damaged=True) as found:
                found.repair(apply=True)
        save(repository, "a", 1, 1)
        repository.gc()
        assert {"lost": "has no config", "damaged": "is damaged", "repaired": "another uuid"}[how] in caplog.text
        with opened(store, damaged=True) as found:
            found.repair(apply=True)
    check_whole(store)
