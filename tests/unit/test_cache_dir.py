"""The cache stays within its limit: it removes the least recently used indexes, never one in use, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kit.processes import run_python
from kit.repositories import OPTIONS, check_restores, opened, save
from snapstore import Repository
from snapstore.storage import cache_dir
from snapstore.storage.cache_dir import begin_use, end_use, shrink
from snapstore.storage.memory import MemoryStore

KiB = 1024


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def index_of(folder: Path, number: int, used_s: float | None = None, size_bytes: int = 64 * KiB) -> Path:
    """Make a closed index of `size_bytes`, last used at `used_s`."""
    path = folder / f"{number:032x}-{number:032x}"
    end_use(begin_use(path, 60))
    (path / "data.mdb").write_bytes(os.urandom(size_bytes))
    if used_s is not None:
        os.utime(path / "used", (used_s, used_s))
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_longest_unused_goes_first(folder):
    paths = [index_of(folder, n, used_s=1000 + (n * 7) % 5) for n in range(5)]
    by_use = sorted(paths, key=lambda path: (path / "used").stat().st_mtime)
    shrink(5 * 64 * KiB + 64 * KiB)
    assert names(folder) == {path.name for path in paths}
    shrink(2 * 64 * KiB + 32 * KiB)
    assert names(folder) == {path.name for path in by_use[-2:]}
    end_use(begin_use(by_use[-2], 60))  # this use is the latest
    shrink(64 * KiB + 32 * KiB)
    assert names(folder) == {by_use[-2].name}
    shrink(0)
    assert names(folder) == set()
    shrink(0)


def test_a_sparse_map_counts_by_what_it_takes(folder):
    path = index_of(folder, 1)
    with (path / "data.mdb").open("ab") as file:
        file.truncate(2**40)
    shrink(256 * KiB)
    assert names(folder) == {path.name}


def test_a_folder_that_is_no_index_of_ours_is_left_alone(folder):
    path = index_of(folder, 1)
    others = ["held", "0" * 32, f"{'0' * 32}-{'0' * 31}", f"{'0' * 32}-{'0' * 32}.bak", "photos", f"x{path.name}"]
    for name in others:
        (folder / name).mkdir()
        (folder / name / "file").write_bytes(bytes(8 * KiB))
    (folder / "evicted-0123456789abcdef").mkdir()  # left by a process that was killed while it removed an index
    (folder / "evicted-0123456789abcdef" / "data.mdb").write_bytes(b"x")
    shrink(0)
    assert names(folder) == set(others)
    assert all((folder / name / "file").exists() for name in others)


USER = """
import sys
import tempfile
from pathlib import Path
from snapstore.storage.cache_dir import begin_use
from snapstore.storage.memory import MemoryStore
begin_use(Path(sys.argv[1]), 60)
print("in use", flush=True)
sys.stdin.read()
"""


def test_an_index_in_use_stays_however_old_it_is(folder):
    mine, theirs, nobodys = (index_of(folder, n, used_s=1000 + n) for n in range(3))
    use = begin_use(mine, 60)
    os.utime(mine / "used", (1, 1))
    with subprocess.Popen([sys.executable, "-c", USER, theirs], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout.readline() == b"in use\n"
        os.utime(theirs / "used", (2, 2))
        shrink(0)
        assert names(folder) == {mine.name, theirs.name}
        assert not nobodys.exists()
        user.kill()
        user.wait()
    shrink(0)
    assert names(folder) == {mine.name}
    end_use(use)
    shrink(0)
    assert names(folder) == set()


EVICTOR = """
import os, signal
from pathlib import Path
from snapstore.storage.cache_dir import shrink
rename = Path.rename
def stopped(*names):
    print("stopped", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return rename(*names)
Path.rename = stopped
shrink(0)
"""


def test_a_process_that_is_stopped_while_it_removes_an_index(folder, tmp_path, monkeypatch, caplog):
    """Another process waits briefly, and opens its repository without the index; later opens use the index again."""
    monkeypatch.setattr("snapstore.catalog.lmdb_file.PATIENCE_S", 0.5)
    with Repository.create(tmp_path / "r", chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
        path = repository.context.index.folder
    with subprocess.Popen([sys.executable, "-c", EVICTOR], stdout=subprocess.PIPE) as evictor:
        try:
            assert evictor.stdout.readline() == b"stopped\n"
            began = time.monotonic()
            with opened(tmp_path / "r") as repository:
                assert time.monotonic() - began >= 0.5
                assert repository.context.index._environment is None
                save(repository, "a", 1, 1)
                assert len(check_restores(repository)) == 2
            assert "another process keeps it locked" in caplog.text
        finally:
            evictor.send_signal(signal.SIGCONT)
        assert evictor.wait(60) == 0
    assert not path.exists()
    with opened(tmp_path / "r") as repository:
        assert repository.context.index._environment is not None
        assert len(check_restores(repository)) == 2


def test_users_beside_removers(folder):
    """A folder in use exists and is whole, although other threads try to remove it again and again.

    Each of the six threads opens its own descriptors, so their locks exclude each other as those of processes do.
    """
    path = folder / f"{'a' * 32}-{'b' * 32}"
    begun_s, failures, removed = time.monotonic(), [], []

    def goes_on() -> bool:
        """Return True for two seconds, and on a busy machine until the folder was removed more than five times."""
        passed_s = time.monotonic() - begun_s
        return passed_s < 2 or (sum(removed) <= 5 and passed_s < 300)

    def use(me: int) -> None:
        while goes_on():
            try:
                fd = begin_use(path, 60)
                mark = path / f"mark{me}"
                mark.write_bytes(os.urandom(10))
                data = mark.read_bytes()
                time.sleep(0.001)
                assert mark.read_bytes() == data
                end_use(fd)
                time.sleep(0.001)  # gives the other threads time to remove it
            except BaseException as error:
                failures.append(error)
                raise

    def remove() -> None:
        while goes_on():
            there = path.exists()
            shrink(0)
            removed.append(there and not path.exists())

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    threads += [threading.Thread(target=remove) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert failures == []
    assert sum(removed) > 5, "the folder was removed too rarely: this test has shown nothing"


@pytest.mark.parametrize("broken", ["iterdir", "rename"])
def test_a_cache_that_cannot_be_tidied(folder, monkeypatch, broken):
    path = index_of(folder, 1)

    def fail(*_):
        raise PermissionError(13, "no")

    monkeypatch.setattr(Path, broken, fail)
    shrink(0)
    monkeypatch.undo()
    assert (path / "data.mdb").exists()


def test_repositories_whose_indexes_are_removed(folder, tmp_path, monkeypatch):
    """Opening a repository removes the indexes of closed repositories; then all repositories still work."""
    roots = [tmp_path / f"r{n}" for n in range(3)]
    for n, root in enumerate(roots):
        with Repository.create(root, chunk_bytes=1024, options=OPTIONS) as repository:
            for step in range(2):
                save(repository, "a", step, n + step)
    monkeypatch.setattr("snapstore.catalog.index.shrink", lambda: shrink(0))
    with opened(roots[0]) as first:
        with Repository.open(roots[1]) as second:
            assert names(folder) == {first.context.index.folder.name, second.context.index.folder.name}
            assert len(check_restores(second)) == 2
        with Repository.open(roots[2]) as third, Repository.open(roots[0]) as again:
            assert names(folder) == {first.context.index.folder.name, third.context.index.folder.name}
            assert len(check_restores(third)) == len(check_restores(again)) == 2
        assert len(check_restores(first)) == 2
    with Repository.open(roots[1]) as second:
        assert names(folder) == {second.context.index.folder.name}
        assert len(check_restores(second)) == 2


def test_the_bound_is_kept_by_opening(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_dir.shrink, "__defaults__", (100 * KiB,))
    old = [index_of(folder, n, used_s=n + 1.0) for n in range(4)]
    Repository.create(tmp_path / "r").close()
    assert not old[0].exists()
    Repository.open(tmp_path / "r").close()
    assert sum(cache_dir._use_of(path)[1] for path in folder.iterdir()) <= 200 * KiB, "an index in use may exceed it"


def test_a_folder_that_goes_while_it_is_made(tmp_path, monkeypatch):
    """If mkdir finds the folder and another process then removes it, it is made again."""
    real, calls = os.mkdir, []

    def mkdir(path, *rest):
        calls.append(path)
        if len(calls) == 1:
            raise FileExistsError(17, "File exists", str(path))
        real(path, *rest)

    monkeypatch.setattr(os, "mkdir", mkdir)
    end_use(begin_use(tmp_path / "folder", 60))
    assert len(calls) == 2


def a_file(path):
    path.write_text("")


def a_pipe(path):
    os.mkfifo(path)


def a_link_that_leads_nowhere(path):
    path.symlink_to(path.parent / "unmounted" / "folder")


@pytest.mark.parametrize("made", [a_file, a_pipe, a_link_that_leads_nowhere])
def test_another_thing_in_the_place_of_a_folder(tmp_path, made):
    made(tmp_path / "folder")
    with pytest.raises(FileExistsError):
        begin_use(tmp_path / "folder", 60)


@pytest.mark.parametrize("made", [a_file, a_pipe, a_link_that_leads_nowhere])
def test_another_thing_in_the_place_of_the_cache(tmp_path, made, monkeypatch, caplog):
    made(tmp_path / "cache")
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    with Repository.create(tmp_path / "repository") as repository:
        repository.save({"x": np.arange(9)}, run="a", step=1)
        assert repository.restore("a@1")["x"].tolist() == list(range(9))
    assert "has a temporary index" in caplog.text


# --- temporary indexes -----------------------------------------------------------------------------------------------

KILLED = """
import os, signal
from snapstore import Repository
from snapstore.storage.memory import MemoryStore
repository = Repository.create(MemoryStore())
print(repository.context.index.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (place := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(cache_dir, "NEW_S", 0.0)
    cache_dir.remove_left_behind.cache_clear()
    return place


def killed_in(place: Path) -> Path:
    """Return the index that a killed process has left."""
    out = run_python("-c", KILLED).stdout
    folder = Path(out.strip())
    assert folder.parent == place
    assert (folder / "data.mdb").exists()
    return folder


def test_a_temporary_index_that_a_killed_process_has_left_is_removed(place):
    left = killed_in(place)
    with Repository.create(MemoryStore(), options=OPTIONS) as repository:
        assert [*place.iterdir()] == [repository.context.index.folder]
        cache_dir.remove_left_behind.cache_clear()
        with Repository.create(MemoryStore(), options=OPTIONS) as other:
            assert {*place.iterdir()} == {index.context.index.folder for index in (repository, other)}
        save(repository, "a", 0, 0)
    assert not left.exists()


def test_only_temporary_indexes_of_this_user_are_removed(place, tmp_path, monkeypatch):
    target, others = tmp_path / "target", place / "snapstore-index-others"
    target.mkdir(mode=0o700)
    (target / "precious").touch()
    (place / "snapstore-index-link").symlink_to(target)
    (place / "snapstore-index-file").touch()
    (place / "snapstore-other").mkdir(mode=0o700)
    (place / "snapstore-index-open").mkdir()
    (place / "snapstore-index-open").chmod(0o777)
    others.mkdir(mode=0o700)
    (place / "snapstore-index-ours").mkdir(mode=0o700)
    (place / "snapstore-index-ours" / "link").symlink_to(target)
    lstat = Path.lstat

    def of_another(self):
        status = lstat(self)
        return os.stat_result((*status[:4], status.st_uid + 1, *status[5:])) if self == others else status

    monkeypatch.setattr(Path, "lstat", of_another)
    before = names(place)
    cache_dir.remove_left_behind(place, "snapstore-index-")
    assert before - names(place) == {"snapstore-index-ours"}
    assert names(target) == {"precious"}


def test_a_new_temporary_index_is_not_removed(place, monkeypatch):
    """The process that made it may not have locked it yet."""
    monkeypatch.setattr(cache_dir, "NEW_S", 60.0)
    (place / "snapstore-index-new").mkdir(mode=0o700)
    cache_dir.remove_left_behind(place, "snapstore-index-")
    assert names(place) == {"snapstore-index-new"}
