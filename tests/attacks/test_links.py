"""No verb follows a symbolic link, a hard link, a pipe or a device out of the repository.

An unpacked archive may contain them. Files outside keep their bytes and modification times, nothing is created there,
and every verb ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from kit.repositories import OPTIONS, opened, save
from kit.samples import sampled
from kit.shell import invoke
from kit.tally import tally
from snapstore import KeepLast, NotFoundError, Repository, SnapshotManager, SnapstoreError, StorageError
from snapstore.format import records
from snapstore.format.records import Session
from snapstore.storage.local import LocalStore

TEMP = "tmp/" + "0" * 32
HANGS_S = 120  # even on a busy machine

VERBS = (
    "log", "log --all", "show a@3", "diff a@2 a@3", "blame a", "stats", "du", "check", "check --read-data",
    "check --restore", "restore a@3 --output {out}", "save {state} --run a --step 9", "tag a@3 x", "untag a@1 good",
    "gc -n", "forget --run a --keep-last 2", "unforget a@2", "gc", "recode --all", "compact", "index rebuild",
    "repair", "repair --apply", "gc --fence-after 0s", "init", "doctor",
)  # fmt: skip


@contextmanager
def time_limit():
    """Stop a verb that hangs."""

    def stop(*_):
        raise AssertionError(f"still running after {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Make a repository with an object of every kind, and a file to save."""
    folder = tmp_path_factory.mktemp("links")
    with Repository.create(folder / "r", chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(4):
            save(repository, "a", step, step, tags=("good",) if step == 1 else ())
        repository.set_policies("a", [KeepLast(2)])
        repository.forget_snapshots(["a@0"])
        repository.gc()
        repository.forget_snapshots(["a@2"])
        store = repository.store
        store.put(
            f"sessions/{'5' * 32}",
            records.encode(Session(id="5" * 32, key="s", host="elsewhere", boot_id="", pid=1, started=0.0)),
        )
        store.put(
            f"gc/{'6' * 32}.mark", records.encode(records.Mark(id="6" * 32, started=0.0, packs=b"", manifests=b""))
        )
    (folder / "r" / TEMP).write_bytes(b"half an object")
    (folder / "r" / "index").mkdir()
    for name in ("data.mdb", "lock.mdb", "verified", "lock", "used"):
        (folder / "r" / "index" / name).write_bytes(b"from an archive")
    torch.save({"w": torch.arange(3000.0)}, folder / "state.pt")
    return folder


def names(root: Path) -> list[str]:
    """Return the name of every folder and file, and one name of each kind that is not there yet."""
    found = [str(path.relative_to(root)) for path in sorted(root.rglob("*"))]
    return [*found, "packs/zz", "snapshots/zz", "tmp/" + "1" * 32, "policies/b.0", "gc/x.mark", "sessions/x"]


def outside(folder: Path, original: Path) -> Path:
    """Make files and folders of the user, among them a copy of the original, as the target of a link that fits."""
    folder.mkdir()
    (folder / "folder").mkdir()
    for name in ("0" * 32, "data.mdb", "lock.mdb", "verified", "used", "thesis.tex"):
        (folder / "folder" / name).write_bytes(b"months of work")
    (folder / "file").write_bytes(b"months of work")
    if original.is_dir():
        shutil.copytree(original, folder / "same")
    elif original.exists():
        shutil.copy2(original, folder / "same")
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return folder


def state_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return all that can be seen of a folder but access times."""
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in (folder, *folder.rglob("*"))
    }


def plant(path: Path, kind: str, canaries: Path) -> None:
    """Replace a path by one of `KINDS`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "hard link":
        os.link(canaries / "file", path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except OSError as error:
            pytest.skip(f"cannot make a device here: {error}")
    elif kind == "folder":
        path.mkdir()
    elif kind == "bomb":
        for level in range(34):
            (canaries / f"bomb{level}").mkdir()
            for name in ("aa", "bb"):
                (canaries / f"bomb{level}" / name).symlink_to(canaries / f"bomb{level + 1}")
        path.symlink_to(canaries / "bomb0")
    else:
        path.symlink_to(
            {
                "to a folder": canaries / "folder",
                "to a file": canaries / "file",
                "to what was there": canaries / "same",
                "to nothing": canaries / "nothing",
                "to itself": path,
            }[kind]
        )


KINDS = (
    "to a folder", "to a file", "to what was there", "to nothing", "to itself", "hard link", "pipe", "device",
    "folder", "bomb",
)  # fmt: skip


def run_all(folder: Path) -> None:
    """Run every verb of the shell, then a manager with policies."""
    env = {"SNAPSTORE_REPO": str(folder / "r")}
    for verb in VERBS:
        args = [part.format(out=folder / "out.pt", state=folder / "state.pt") for part in verb.split()]
        with time_limit():
            result = invoke(args, env=env)
        assert result.exit_code in (0, 1, 2, 3, 10, 11, 20), (verb, result.exit_code, result.exception)
        assert "Traceback" not in result.stderr, (verb, result.stderr)
        assert "this is a bug" not in result.stderr, (verb, result.stderr)
    with (
        time_limit(),
        suppress(SnapstoreError),
        SnapshotManager(folder / "r", run="a", keep=[KeepLast(1)], options=OPTIONS) as snapshots,
    ):
        for step in (20, 21):
            snapshots.save(step, {"w": torch.arange(3000.0) + step}).result()


def cases(root: Path) -> list[tuple[str, str]]:
    return [(name, kind) for name in names(root) for kind in KINDS]


def test_at_every_name(made, tmp_path):
    every = cases(made / "r")
    for number in sampled(len(every), 1 + len(every) // 4):
        name, kind = every[number]
        tally("planted links")
        folder = tmp_path / str(number)
        shutil.copytree(made, folder)
        canaries = outside(tmp_path / f"user{number}", folder / "r" / name)
        plant(folder / "r" / name, kind, canaries)
        before = state_of(canaries)
        run_all(folder)
        assert state_of(canaries) == before, (name, kind)
        shutil.rmtree(folder)


TOP = ("packs", "manifests", "snapshots", "snapshots/a", "sessions", "gc", "policies", "tmp", TEMP, "config", "index",
       "index/lock.mdb")  # fmt: skip


@pytest.mark.parametrize("name", TOP)
def test_links_to_folders_and_files_that_fit(made, tmp_path, name):
    """The likeliest attack, at one name of each kind, on the verbs that write and delete; this is no sample."""
    folder = tmp_path / "f"
    shutil.copytree(made, folder)
    canaries = outside(tmp_path / "user", folder / "r" / name)
    plant(folder / "r" / name, "to what was there", canaries)
    before = state_of(canaries)
    said = []
    with time_limit():
        for call in (
            lambda r: r.view(),
            lambda r: save(r, "a", 9, 9),
            lambda r: r.forget_snapshots(["a@1"], force=True),
            lambda r: r.gc(fence_after_s=0),
            lambda r: r.repair(apply=True),
        ):
            try:
                with opened(folder / "r") as repository:
                    call(repository)
            except SnapstoreError as error:
                said.append(str(error))
    assert state_of(canaries) == before
    if not name.startswith("index"):
        assert any(f"{name} in {folder / 'r'}: is a symbolic link" in text for text in said), said


# --- the store itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path) -> LocalStore:
    store = LocalStore(tmp_path / "r", create=True)
    store.put("p/q/object", b"x")
    return store


OPERATIONS = {
    "put": lambda store, key: store.put(key, b"y"),
    "lock": lambda store, key: store.lock(key, b"y"),
    "get": lambda store, key: store.get(key),
    "get_range": lambda store, key: store.get_range(key, 0, 1),
    "stat": lambda store, key: store.stat(key),
    "sizes": lambda store, key: store.sizes([key]),
    "list": lambda store, key: list(store.list("")),
    "list below": lambda store, key: list(store.list("p/")),
    "touch": lambda store, key: store.touch(key),
    "delete": lambda store, key: store.delete([key]),
    "release": lambda store, key: store.release(key),
    "is_locked": lambda store, key: store.is_locked(key),
    "sync": lambda store, key: store.sync("p/"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("where", ["p", "p/q", "p/q/object"])
@pytest.mark.parametrize("kind", ["to what was there", "to nothing", "to itself"])
def test_every_operation_names_the_link(store, tmp_path, operation, where, kind):
    canaries = outside(tmp_path / "user", store.root / where)
    plant(store.root / where, kind, canaries)
    before = state_of(canaries)
    removes = operation in ("delete", "release") and where == "p/q/object"
    if removes:  # the link itself is removed
        OPERATIONS[operation](store, "p/q/object")
        assert not (store.root / where).is_symlink()
    else:
        with pytest.raises(StorageError, match=f"^{where} in {store.root}: is a symbolic link.*or remove it$"):
            OPERATIONS[operation](store, "p/q/object")
    assert state_of(canaries) == before


@pytest.mark.parametrize("call", [lambda s: s.put("a", b""), lambda s: s.clean(), lambda s: s.lock("a", b"")])
def test_temporary_files_are_not_made_or_cleaned_through_a_link(store, tmp_path, call):
    canaries = outside(tmp_path / "user", store.root / "tmp")
    plant(store.root / "tmp", "to a folder", canaries)
    before = state_of(canaries)
    with pytest.raises(StorageError, match=f"^tmp in {store.root}: is a symbolic link"):
        call(store)
    assert abs(store.now_s() - time.time()) < 10
    assert state_of(canaries) == before


def test_only_temporary_files_of_ours_are_cleaned(store, tmp_path):
    tmp = store.root / "tmp"
    others = [tmp / name for name in ("notes.txt", "0" * 31, "0" * 33, "G" * 32)]
    for path in others:
        path.write_bytes(b"x")
    (tmp / ("1" * 32)).mkdir()
    os.mkfifo(tmp / ("2" * 32))
    (tmp / ("3" * 32)).write_bytes(b"xxx")
    assert store.clean() == 3
    assert sorted(tmp.iterdir()) == sorted([*others, tmp / ("1" * 32), tmp / ("2" * 32)])
    (tmp / ("4" * 32)).symlink_to(tmp_path)
    with pytest.raises(StorageError, match=f"^tmp/{'4' * 32} in .*is a symbolic link"):
        store.clean()


def test_an_entry_that_is_no_file_takes_no_objects_name(store):
    os.mkfifo(store.root / "p" / "pipe")
    (store.root / "p" / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(StorageError, match=f"^p/{name} in .*something that is not a file"):
            store.put(f"p/{name}", b"x")
        for call in (store.get, store.stat, store.touch):
            with pytest.raises(NotFoundError):
                call(f"p/{name}")


def test_the_root_may_be_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with Repository.create(tmp_path / "link", chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        repository.forget([KeepLast(1)], run="a")
        assert repository.gc().deleted_objects
        assert repository.check("restore").ok
    assert Repository.open(tmp_path / "there").snapshot("a@2")


def test_no_descriptor_of_the_root_stays_open(store):
    """Otherwise the volume could not be unmounted between saves."""
    store.put("p/x", b"x")
    store.get("p/x")
    list(store.list(""))
    store.sync("")
    store.clean()
    opened = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this very listing
            opened.append(fd.readlink())
    assert not [path for path in opened if path.is_relative_to(store.root)]


def test_evicted_indexes_and_trials_follow_no_links(store, tmp_path):
    from snapstore.storage.cache_dir import cache_folder, shrink

    canaries = outside(tmp_path / "user", tmp_path / "none")
    before = state_of(canaries)
    cache_folder().mkdir(parents=True)
    for name in (f"{'0' * 32}-{'0' * 32}", "evicted-0123456789abcdef"):
        (cache_folder() / name).symlink_to(canaries / "folder")
    (cache_folder() / f"{'1' * 32}-{'0' * 32}").mkdir()
    (cache_folder() / f"{'1' * 32}-{'0' * 32}" / "link").symlink_to(canaries / "folder")
    (cache_folder() / f"{'1' * 32}-{'0' * 32}" / "data.mdb").write_bytes(bytes(5000))
    shrink(0)
    with store.sandbox() as trial:
        (trial.root / "link").symlink_to(canaries / "folder")
    assert state_of(canaries) == before
    assert not (cache_folder() / f"{'1' * 32}-{'0' * 32}").exists()
