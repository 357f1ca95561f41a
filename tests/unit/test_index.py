"""The index is only a cache: if its folder is lost or damaged, only time is lost."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import lmdb
import msgspec
import platformdirs
import pytest
import xxhash
from msgspec import structs

from kit.objects import clone, flip_file, keys_of
from kit.processes import environment, run_python
from kit.repositories import OPTIONS, check_restores, index_of, opened, save, snapshot_of
from kit.s3_stores import fresh_url, moto_bucket, needs_server
from kit.samples import SEED, THOROUGH
from snapstore import IntegrityError, KeepBest, KeepLast, Repository, StorageError, threads
from snapstore.catalog import index as index_module
from snapstore.catalog.lmdb_file import Environment
from snapstore.format.records import Snapshot, encode
from snapstore.protocol import gc
from snapstore.storage import cache_dir as cache_module
from snapstore.storage import local
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore
from snapstore.storage.s3.lock_files import LivenessLocks
from snapstore.storage.s3.store import S3Store

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("index") / "r"
    with Repository.create(root, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(4):
            save(repository, "a", step, step, tags=("good",) if step == 1 else ())
        repository.forget([KeepLast(2)], run="a")
        save(repository, "b", 0, 9, parent="a@3")
        repository.gc()
    return root


@pytest.fixture
def root(made, tmp_path) -> Path:
    """Return a copy of the repository, which has its own index."""
    Repository.open(shutil.copytree(made, tmp_path / "r")).close()
    return tmp_path / "r"


def check_works(root: Path) -> None:
    with opened(root) as repository:
        assert [s.ref for s in repository.snapshots()] == ["a@1", "a@2", "a@3", "b@0"]
        check_restores(repository)
        save(repository, "a", 4, 4)
        repository.forget([KeepLast(1)], run="a")
        repository.gc()
        assert repository.stats().unneeded_bytes == 0
    with opened(root) as repository:
        check_restores(repository)
        assert repository.context.index._environment is not None


def test_an_index_is_used_again(root, monkeypatch):
    with Repository.open(root) as repository:
        repository.view()  # reads the records, since the index of the copy is new
    with Repository.open(root) as repository:
        monkeypatch.setattr(type(repository.store), "get", lambda *_, **__: pytest.fail("read a record"))
        assert len(repository.snapshots()) == 4


def test_another_record_of_the_same_size_under_a_key_that_was_just_made(tmp_path, monkeypatch):
    """An older backup is put back, and another machine makes the same revision: this machine must read it."""

    @contextmanager
    def machine(name):
        monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / name))
        with Repository.open(root) as repository:
            yield repository

    root, backup = tmp_path / "repository", tmp_path / "backup"
    with Repository.create(root, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
        save(repository, "a", 1, 1)
    shutil.copytree(root, backup)
    with machine("A") as repository:
        repository.forget_snapshots(["a@0"])
        size = (root / f"{repository.context.index.some_keys(1)[0]}").stat().st_size
    shutil.rmtree(root)
    shutil.copytree(backup, root)
    with machine("B") as repository:
        (first, _) = repository.snapshots()
        tag = "t" * (size - (root / first.key).stat().st_size - 1)
        repository.tag("a@0", tag)
        (made,) = (path for path in root.glob("snapshots/a/*.1"))
        assert made.stat().st_size == size, "else the sizes alone tell them apart"
    with machine("A") as repository:
        assert [s.state for s in repository.snapshots()] == ["committed", "committed"]
        assert repository.gc().deleted_objects == 0
        assert (repository.restore("a@0"), repository.check("restore").ok)[1]


def test_a_program_may_change_the_records_that_it_gets(tmp_path):
    """Neither a policy nor a later revision sees what a program writes into them, as to make a table of metrics."""
    with Repository.create(tmp_path / "r") as repository:
        made = [repository.save({"step": s}, run="a", step=s, metrics={"loss": s}) for s in (1, 2, 3)]
        repository.tag("a@2", "t")
        shown = [repository.snapshot("a@1"), *repository.snapshots(), *repository.view().snapshots(), *made]
        for snapshot in [*shown, repository.tag("a@2", "u")]:
            snapshot.metrics["loss"] = 100.0 - snapshot.step
            for mine in (snapshot.tags, snapshot.bases, snapshot.manifests, snapshot.features):
                mine.clear()
        kept = repository.forget(KeepBest("loss"), run="a", dry_run=True).kept
        assert [s.step for s, _ in kept] == [1, 2, 3]
        repository.tag("a@1", "v")
        assert [repository.restore(f"a@{s}") for s in (1, 2, 3)] == [{"step": s} for s in (1, 2, 3)]
        assert not repository.gc().deleted_objects
        repository.rebuild_index()
        found = [(s.metrics, s.tags, len(s.manifests)) for s in repository.snapshots()]
        assert found == [({"loss": 1.0}, ["v"], 1), ({"loss": 2.0}, ["t", "u"], 1), ({"loss": 3.0}, [], 1)]


@pytest.mark.parametrize("name", ["data.mdb", "verified", "lock"])
@pytest.mark.parametrize("how", ["deleted", "empty", "cut", "garbage", "longer"])
def test_files_of_the_index(root, name, how):
    path = index_of(root) / name
    data = path.read_bytes()
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes(
            {"empty": b"", "cut": data[: len(data) // 2], "garbage": b"\xff" * 9000, "longer": data * 2}[how]
        )
    check_works(root)


def test_a_deleted_folder(root):
    shutil.rmtree(index_of(root))
    check_works(root)


@pytest.mark.parametrize("what", ["folder", "cache", "file"])
@pytest.mark.parametrize("first", ["save", "gc", "rebuild"])
def test_a_folder_that_is_deleted_while_it_is_open(root, what, first, caplog):
    """A cleaner of old files may do so, in the middle of a training. The index is built again, with one warning."""
    with opened(root) as repository:
        folder = index_of(root)
        if what == "file":
            (folder / "used").unlink()
        else:
            shutil.rmtree(folder if what == "folder" else folder.parent)
        if first == "gc":
            repository.gc()
        elif first == "rebuild":
            repository.rebuild_index()
        for step in (4, 5):
            save(repository, "a", step, step)
            repository.gc()
        check_restores(repository)
        known = repository.context.index._environment.items(b"records")
        assert {key.decode() for key, _ in known} >= set(repository.context.index._records)
    assert [line for line in caplog.messages if "index" in line] == [
        f"index {folder} was removed while it was open; it is built again"
    ]
    with opened(root) as repository:
        assert len(check_restores(repository)) == 6


def test_a_temporary_folder_that_is_deleted_is_not_trusted_by_its_name(caplog):
    """Anyone can make a folder of its name, which lies in /tmp."""
    with Repository.create(MemoryStore(), options=OPTIONS) as repository:
        folder = repository.context.index.folder
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        save(repository, "a", 0, 0)
        other = repository.context.index.folder
        assert other != folder
        assert [line for line in caplog.messages if "index" in line] == [
            f"index {folder} was removed while it was open; it is built again"
        ]
    assert not other.exists()
    assert not (folder / "data.mdb").exists()
    shutil.rmtree(folder)


def test_a_save_is_committed_though_its_index_finds_no_memory(root, monkeypatch, caplog):
    """It is reported as committed, too."""
    with opened(root) as repository:
        with monkeypatch.context() as patched:
            patched.setattr(Environment, "put", lambda *_: _fail(MemoryError()))
            save(repository, "a", 4, 4)
        assert "cannot be written (MemoryError); the next write adds what is missing" in caplog.text
        check_restores(repository)
    with opened(root) as repository:
        assert [s.step for s in repository.snapshots("a")] == [1, 2, 3, 4]


def test_a_save_is_committed_though_its_index_is_deleted_and_cannot_be_built_again(root, monkeypatch):
    """The cache is deleted right before the save writes into it, on a full disk."""
    real = index_module.Index.add

    def add(index, *given):
        shutil.rmtree(index.folder)
        monkeypatch.setattr(Environment, "put", put)
        real(index, *given)

    def put(environment, items):
        with environment._locked():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(index_module.Index, "add", add)
    with opened(root) as repository:
        save(repository, "a", 4, 4)
        check_restores(repository)


@pytest.mark.parametrize("setting", ["usable", "not absolute"])
def test_a_deleted_index_is_not_built_again_at_the_close(root, setting, monkeypatch, caplog):
    with opened(root) as repository:
        save(repository, "a", 4, 4)
        repository.view()
        shutil.rmtree(folder := index_of(root))
        if setting != "usable":
            monkeypatch.setenv("SNAPSTORE_CACHE_DIR", "relative")
    assert not folder.exists()
    assert not caplog.messages


def test_a_save_goes_on_though_the_cache_is_deleted_and_its_setting_is_wrong_now(root, monkeypatch):
    with opened(root) as repository:
        shutil.rmtree(index_of(root))
        monkeypatch.setenv("SNAPSTORE_CACHE_DIR", "relative")
        save(repository, "a", 4, 4)
        check_restores(repository)


def test_the_cache_keeps_the_record_that_was_read_last(root):
    """A record that this process made is seen in a listing, then another one takes its place (a backup)."""
    with opened(root) as repository:
        index = repository.context.index
        made = save(repository, "a", 4, 4)
        index.refresh()
        other = structs.replace(made, tags=["other"])
        (root / made.key).unlink()
        (root / made.key).write_bytes(encode(other))
        assert index.refresh().newest("a").tags == ["other"]
    with opened(root) as repository:
        assert repository.context.index.cached(made.key).tags == ["other"]


def test_a_folder_in_the_way_of_a_file(root):
    (index_of(root) / "data.mdb").unlink()
    (index_of(root) / "data.mdb").mkdir()
    with opened(root) as repository:
        check_restores(repository)
        save(repository, "a", 4, 4)
        repository.rebuild_index()
        assert repository.gc().deleted_objects == 0


def test_the_index_of_another_repository(root, tmp_path):
    with Repository.create(tmp_path / "other", chunk_bytes=1024, options=OPTIONS) as other:
        save(other, "z", 0, 0)
    shutil.rmtree(index_of(root))
    shutil.copytree(index_of(tmp_path / "other"), index_of(root))
    with Repository.open(root) as repository:
        assert repository.view().runs() == ["a", "b"]
        assert repository.view().vanished == []
    check_works(root)


FLIP = """
from pathlib import Path
from random import Random
from snapstore import Repository, SaveOptions
root, index, start, count = Path({root!r}), Path({index!r}), {start}, {count}
data = (index / "data.mdb").read_bytes()
verified = (index / "verified").read_bytes()
random = Random(start)
used = int(verified.split()[0])
pages = used // 4096
places = [p * 4096 + random.choice((0, 8, 10, 12, 14, 16, random.randrange(4096))) for p in range(pages)]
places += [random.randrange(used) for _ in range(count)]
for place in places:
    flipped = bytearray(data)
    flipped[place] ^= 1 << random.randrange(8)
    (index / "data.mdb").write_bytes(flipped)
    (index / "verified").write_bytes(verified)
    with Repository.open(root, options=SaveOptions(threads=1)) as repository:
        assert [s.ref for s in repository.snapshots()] == ["a@1", "a@2", "a@3", "b@0"], place
        assert repository.check().ok, place
print("flipped", len(places))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", range(3))
def test_any_flipped_byte(root, start):
    """A flipped bit in the data file of an index changes no answer.

    Each page gets one, often in its header, and random places get more. A child process does this: LMDB may kill it.
    """
    Repository.open(root).view()
    script = FLIP.format(root=str(root), index=str(index_of(root)), start=SEED + start, count=150 if THOROUGH else 60)
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("flipped ")


def test_a_write_that_was_not_sealed(root):
    """After a crash between LMDB's commit and the seal, the repository works and uses its index."""
    environment = lmdb.open(str(index_of(root)), map_size=2**30, max_dbs=3)
    with environment.begin(write=True) as transaction:
        transaction.put(b"snapshots/x", b"not a record", db=environment.open_db(b"records", txn=transaction))
    environment.close()
    check_works(root)


@pytest.mark.parametrize("error", [lmdb.MapFullError("full"), OSError(errno.ENOSPC, "no space"), lmdb.DiskError("io")])
def test_an_index_that_cannot_be_written(root, monkeypatch, error, caplog):
    shutil.rmtree(index_of(root))

    def put(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Environment, "put", put)
        with opened(root) as repository:
            save(repository, "a", 4, 4)
            check_restores(repository)
            repository.gc()
            assert "cannot be written" in caplog.text
    with opened(root) as repository:
        assert len(check_restores(repository)) == 5


def test_a_small_map(root, monkeypatch):
    monkeypatch.setattr(index_module, "MAP_BYTES", 64 * 1024)
    shutil.rmtree(index_of(root))
    with opened(root) as repository:
        for step in range(10, 30):
            save(repository, "a", step, step % 5)
        assert len(check_restores(repository)) == 24


READ, OPEN = (Environment, "get_all"), (index_module.lmdb, "open")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (READ, lmdb.ReadersFullError("readers")),
        (READ, lmdb.BadRslotError("slot")),
        (OPEN, lmdb.Error("no")),
        (OPEN, PermissionError(13, "read-only")),
        (OPEN, lmdb.InvalidError("no lmdb")),
    ],
)
def test_an_index_that_cannot_be_read_or_opened(root, monkeypatch, call, error, caplog):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(*call, fail)
    with opened(root) as repository:
        assert ("cannot be used" in caplog.text) == (call is OPEN)
        save(repository, "a", 4, 4)
        check_restores(repository)
        repository.rebuild_index()
        repository.gc()


def test_a_repository_keeps_no_index(root, tmp_path):
    """A folder `index` in a repository, such as from an archive, is neither read nor changed.

    A copy of a repository has its own index, which is not in the repository either.
    """
    shutil.copytree(index_of(root), root / "index")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (root / "index").iterdir()}
    check_works(root)
    with Repository.open(shutil.copytree(root, tmp_path / "copy")) as copy, Repository.open(root) as repository:
        assert copy.context.index.folder != repository.context.index.folder
        copy.rebuild_index()
        assert copy.check().ok
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (root / "index").iterdir()} == before
    shutil.rmtree(root / "index")
    check_restores(Repository.open(root))
    assert not (root / "index").exists()


def test_a_repository_has_one_index_by_whatever_path(root, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("r")
    (tmp_path / "above").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    paths = [root, "r", "./r/", "link", tmp_path / "above" / "link", f"file://{root}", f"{tmp_path}/x/../r"]
    (tmp_path / "x").mkdir()
    folders = set()
    for path in paths:
        with Repository.open(path) as repository:
            folders.add(repository.context.index.folder)
            assert repository.store.list("snapshots/")
    assert folders == {index_of(root)}


def test_the_index_lies_in_a_private_folder(root, cache):
    with Repository.open(root) as repository:
        for folder in (cache, repository.context.index.folder):
            assert folder.stat().st_mode & 0o777 == 0o700
        assert repository.context.index.folder.parent == cache


@pytest.mark.parametrize("harm", ["group", "others", "owner", "file", "network", "read-only"])
def test_a_cache_that_is_unsafe_or_unusable_is_not_used(root, cache, harm, monkeypatch, caplog):
    """The index is then temporary, and nothing is written to the cache."""
    shutil.rmtree(cache)
    if harm == "file":
        cache.write_bytes(b"x")
    else:
        cache.mkdir()
        cache.chmod({"group": 0o770, "others": 0o707}.get(harm, 0o700))
    if harm == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif harm == "network":  # home folders often are on one, and LMDB fails there
        monkeypatch.setattr(cache_module, "on_network", lambda _: True)
    elif harm == "read-only":
        real = Path.mkdir

        def mkdir(path, *args, **options):
            if path == cache:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            real(path, *args, **options)

        monkeypatch.setattr(Path, "mkdir", mkdir)
    with opened(root) as repository:
        assert cache not in repository.context.index.folder.parents
        assert repository.context.index.folder.stat().st_mode & 0o777 == 0o700
        assert f"the cache {cache}" in caplog.text
        check_restores(repository)
        save(repository, "a", 4, 4)
    assert not repository.context.index.folder.exists()
    assert harm == "file" or list(cache.iterdir()) == []


@pytest.fixture
def nobody(monkeypatch):
    """Run as a user who has no HOME and no entry in passwd, as in many containers."""
    monkeypatch.delenv("SNAPSTORE_CACHE_DIR")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: _fail(RuntimeError("no home directory")))


def _fail(error: Exception) -> str:
    raise error


@pytest.mark.parametrize("found", ["an error", "a relative path"])
def test_a_user_without_a_home_folder_gets_a_temporary_index(root, nobody, found, monkeypatch, caplog):
    if found == "a relative path":
        monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: "~/.cache/snapstore")
    with opened(root) as repository:
        assert repository.context.index.temporary
        save(repository, "a", 4, 4)
        check_restores(repository)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "home folder of this user is not known (set SNAPSTORE_CACHE_DIR)" in warning
    assert "has a temporary index" in warning
    locks = LivenessLocks("s3://bucket")
    assert not locks.begin("sessions/x")
    assert locks.is_alive("sessions/x") is None
    with repository_of(MemoryStore(), create=True) as repository:
        save(repository, "a", 0, 0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["local", "memory", "config lost"])
def test_without_a_cache_and_a_temporary_folder_there_is_no_index(root, nobody, kind, monkeypatch, caplog):
    """Then all verbs work, with one warning and no LMDB file."""
    no_place = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    if kind == "config lost":
        (root / "config").unlink()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: _fail(no_place))
    monkeypatch.setattr(index_module.Environment, "open", lambda *_: pytest.fail("opened an index"))
    of_memory = repository_of(MemoryStore(), create=True) if kind == "memory" else None
    with of_memory or opened(root, damaged=kind == "config lost") as repository:
        if kind == "config lost":
            assert len(repository.snapshots()) == 4
        else:
            save(repository, "a", 4, 4)
            repository.forget([KeepLast(1)], run="a")
            repository.gc()
            repository.rebuild_index()
            assert repository.snapshot("a@latest").step == 4
            check_restores(repository)
        assert repository.context.index.folder is None
    (warning,) = [record.getMessage() for record in caplog.records if "index" in record.getMessage()]
    assert "No usable temporary directory" in warning
    assert ("home folder" in warning) is (kind != "memory")
    assert "has no index: every start reads all records" in warning


def test_a_network_file_system_is_known(root, monkeypatch):
    mounts = f"/dev/x / ext4 rw 0 0\nserver:/x {root.parent} nfs4 rw 0 0\n"
    monkeypatch.setattr(Path, "read_bytes", lambda self: mounts.encode() if str(self) == "/proc/mounts" else b"")
    assert cache_module.on_network(root)
    assert not cache_module.on_network(Path("/usr"))
    mounts += "server:/y /mnt/my\\040disks nfs4 rw 0 0\n"
    assert cache_module.on_network(Path("/mnt/my disks/r"))
    mounts += "server:/z /mnt/a\x0bb\x85c nfs4 rw 0 0\n"  # only spaces, tabs, line feeds and backslashes are escaped
    assert cache_module.on_network(Path("/mnt/a\x0bb\x85c"))
    mounts += "systemd-1 /home autofs rw 0 0\nserver:/home /home nfs4 rw 0 0\n"  # automounted: the last one counts
    assert cache_module.on_network(Path("/home/me/.cache"))
    mounts += "/dev/y /home ext4 rw 0 0\n"
    assert not cache_module.on_network(Path("/home/me/.cache"))
    monkeypatch.undo()
    assert not cache_module.on_network(root)


def test_a_new_repository_in_the_place_of_an_open_one(root):
    """The new repository does not miss records of the old one, and the old one, which is still open, refuses to save.

    This happens when a cell of a notebook removes the repository, creates it, and runs again.
    """
    with opened(root) as old:
        old.view()
        shutil.rmtree(root)
        with Repository.create(root, chunk_bytes=1024, options=OPTIONS) as new:
            assert (new.view().vanished, new.view().missing) == ([], [])
            save(new, "a", 0, 0)
            with pytest.raises(
                StorageError, match="this is not the repository that was opened: its config has another uuid"
            ):
                save(old, "a", 1, 1)
            assert new.context.index._environment._file == new.context.index._environment._file_now()
            assert len(new.snapshots("a")) == 1
            new.gc()
        with opened(root) as new:
            assert new.view().vanished == []
            check_restores(new)


def test_a_link_that_leads_elsewhere_when_a_repository_is_closed(root, tmp_path):
    with Repository.create(tmp_path / "other", chunk_bytes=1024, options=OPTIONS) as other:
        (tmp_path / "link").symlink_to("r")
        repository = Repository.open(tmp_path / "link", options=OPTIONS)
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("other")
        repository.close()
        with (root / "config").open("rb") as file:  # its descriptor likely has the number that the index's had
            check_works(root)
            os.fstat(file.fileno())
        with opened(tmp_path / "other") as again:
            assert again.context.index._environment is other.context.index._environment
        save(other, "z", 0, 0)


def test_an_index_that_a_stopped_process_keeps_locked(root, monkeypatch, caplog):
    """If a stopped process, such as a suspended job, holds the lock of the index, one save waits briefly.

    Later saves do not wait, and do not use the index until the lock is free. Then they use it again.
    """
    script = f"""
import os, signal
from pathlib import Path
from snapstore.storage.locks import locked
with locked(Path({str(index_of(root) / "lock")!r}), 9):
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    monkeypatch.setattr("snapstore.catalog.lmdb_file.PATIENCE_S", 0.5)
    with opened(root) as repository:
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
            try:
                assert other.stdout.readline() == "held\n"
                repository.context.index._environment._patience_s = 0.5
                began = time.monotonic()
                save(repository, "a", 4, 4)
                save(repository, "a", 5, 5)
                assert 0.5 < time.monotonic() - began < 5
                assert "another process keeps it locked" in caplog.text
            finally:
                other.kill()
        caplog.clear()
        save(repository, "a", 6, 6)
        assert not caplog.text
        check_restores(repository)
    with opened(root) as repository:
        assert [s.step for s in repository.snapshots("a")] == [1, 2, 3, 4, 5, 6]


# --- records that the index knows and the store does not show --------------------------------------------------------


def record_of(root: Path, ref: str) -> Path:
    with Repository.open(root) as repository:
        return root / repository.snapshot(ref).key


def test_a_vanished_record_stops_gc_until_the_index_is_rebuilt(root):
    path = record_of(root, "a@2")
    data = path.read_bytes()
    packs = keys_of(LocalStore(root), "packs/")
    path.unlink()
    with opened(root) as repository:
        (key,) = repository.view().vanished
        assert key.startswith("snapshots/a/000000000002-")
        assert [p.kind for p in repository.check().problems] == ["index"]
        for verb in (repository.gc, repository.compact):
            with pytest.raises(IntegrityError, match=r"1 known record, .*repair --apply.*index rebuild --forget-"):
                verb()
        assert keys_of(LocalStore(root), "packs/") == packs
        with pytest.raises(IntegrityError, match="is gone"):
            repository.restore("a@2")
        path.write_bytes(data)  # as if the listing had been stale: the record is back
        assert repository.view().vanished == []
        repository.gc()
        path.unlink()
        repository.rebuild_index()
        with pytest.raises(IntegrityError, match=r"that no record explains.*nothing was deleted.*gc --unexplained"):
            repository.gc()
        assert keys_of(LocalStore(root), "packs/") == packs
        repository.gc(unexplained=True)
        assert repository.check("restore").ok
        assert repository.stats().unneeded_bytes == 0


@pytest.mark.parametrize("first", ["original", "copy"])
def test_a_copy_by_hard_links_has_an_index_of_its_own(root, tmp_path, first):
    """A copy made with `cp -al` has its own index, although the objects of both repositories are the same files."""
    with opened(root) as original:
        before = [s.ref for s in original.snapshots()]
        shutil.copytree(root, tmp_path / "copy", copy_function=os.link)
        original.forget_snapshots(["a@2"])
        assert original.gc().deleted_objects
    for place in [root, tmp_path / "copy"][:: 1 if first == "original" else -1]:
        with opened(place) as repository:
            assert repository.view().vanished == []
            assert [s.ref for s in repository.snapshots()] == [r for r in before if r != "a@2" or place != root]
            assert repository.check("restore").ok
            repository.gc()
            assert repository.check("restore").ok
    with opened(root) as original:
        assert original.check("restore").ok


def test_a_record_damaged_after_it_was_cached_is_found_by_check(root, monkeypatch):
    path = record_of(root, "a@2")
    info = LocalStore(root).stat(str(path.relative_to(root)))
    flip_file(path, 80)
    real = local._info  # a bit that flips on the disk changes neither time nor tag
    monkeypatch.setattr(local, "_info", lambda key, status: info if key == info.key else real(key, status))
    with opened(root) as repository:
        repository.restore("a@2")  # by the cached record; the data of the snapshot is whole
        (problem,) = repository.check().problems
        assert (problem.kind, problem.key) == ("record", str(path.relative_to(root)))


def test_a_record_that_has_changed_is_read_again(root):
    """A record is read again if the listing shows another size or time than those in the cache.

    Here the record is damaged, and then whole again.
    """
    path = record_of(root, "a@2")
    data, status = path.read_bytes(), path.stat()
    with opened(root) as repository:
        for damaged, later_s in ((data[:50], 0), (data[:60] + bytes([data[60] ^ 4]) + data[61:], 1)):
            path.write_bytes(damaged)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later_s * 10**9))
            for _ in range(2):
                assert list(repository.view().damaged) == [str(path.relative_to(root))]
                assert repository.view().vanished == []
            with pytest.raises(IntegrityError, match="nothing was deleted"):
                repository.gc()
        path.write_bytes(data)
        assert repository.view().damaged == {}
        assert len(check_restores(repository)) == 4


@pytest.mark.parametrize("forgotten_by", ["here", "another host"])
def test_a_bucket_restored_from_a_backup(tmp_path, monkeypatch, forgotten_by):
    """After a backup is restored, gc does not use a cached record if the bucket holds another one under its key.

    The URL, the uuid and the size of the record are the same as before.
    """
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path))
    now = itertools.count(1000)
    store = MemoryStore()
    store.clock = lambda: float(next(now))
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        first, uuid = repository.snapshot("a@0"), repository.config.uuid
    backup = clone(store)
    there, here = first.revised(state="forgotten"), first.revised(state="committed")
    assert (there.key, len(encode(there))) == (here.key, len(encode(here)))
    index = index_module.Index(store, uuid, tmp_path / "i")
    index.refresh()
    store.put(there.key, encode(there))
    if forgotten_by == "here":
        index.add(there)
    else:
        index.refresh()
    assert [s.step for s in index.refresh().snapshots()] == [1, 2]
    index.close()

    backup.clock = store.clock
    backup.put(here.key, encode(here))
    index = index_module.Index(backup, uuid, tmp_path / "i")
    packs = keys_of(backup, "packs/")
    gc.collect(SimpleNamespace(store=backup, index=index))
    assert [s.step for s in index.refresh().snapshots()] == [0, 1, 2]
    index.close()
    assert keys_of(backup, "packs/") == packs
    with repository_of(backup) as repository:
        assert len(check_restores(repository)) == 3


@contextmanager
def within_one_second(kind, tmp_path, monkeypatch):
    """Yield a store in which two objects can get the same `modified_s`."""
    if kind == "memory":
        store = MemoryStore()
        store.clock = lambda: 1000.0
        yield store
    elif kind == "local":
        yield LocalStore(tmp_path / "r", create=True)
        # the caller sets the times of its files
    elif kind == "moto":
        with moto_bucket(monkeypatch) as url:
            yield S3Store(url)
    else:
        yield S3Store(fresh_url())


@pytest.mark.parametrize("kind", ["memory", "local", "moto", pytest.param("server", marks=needs_server)])
def test_another_record_of_the_same_second_and_size(kind, tmp_path, monkeypatch):
    """If another record takes the place of a cached one, with its size and time, every cache shows the new record."""
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    with within_one_second(kind, tmp_path, monkeypatch) as store:
        first = Snapshot(id="0" * 32, run="a", step=0, seq=0, state="committed", write_id="1" * 32)
        second = msgspec.structs.replace(first, write_id="2" * 32)
        caches = [index_module.Index(store, "0" * 32, tmp_path / str(n)) for n in range(2)]
        for _ in range(20):  # until both puts fall into one second
            store.put(first.key, encode(first))
            before = store.stat(first.key)
            assert [cache.refresh().get(first.id) for cache in caches] == [first, first]
            store.delete([first.key])
            store.put(second.key, encode(second))
            if kind == "local":
                os.utime(store.root / second.key, (before.modified_s, before.modified_s))
            after = store.stat(second.key)
            if (before.size_bytes, before.modified_s) == (after.size_bytes, after.modified_s):
                break
            store.delete([first.key])
            time.sleep(1.05 - time.time() % 1)
        else:
            pytest.fail("never within one second")
        assert [cache.refresh().get(first.id) for cache in caches] == [second, second]
        for n, cache in enumerate(caches):
            cache.close()
            again = index_module.Index(store, "0" * 32, tmp_path / str(n))
            monkeypatch.setattr(again, "_get_record", lambda key: pytest.fail(f"read {key} again"))
            assert again.refresh().get(first.id) == second
            again.close()
        store.delete([first.key])


def test_a_record_made_here_is_dated_by_the_first_listing(root, monkeypatch):
    """The first listing after a commit shows the time and tag of the new record; from then on a change is noticed."""
    with opened(root) as repository:
        made = save(repository, "a", 4, 4)
        assert len(repository.snapshots()) == 5
        path = root / made.key
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 2 * 10**9))
        read, real = [], LocalStore.get
        monkeypatch.setattr(
            LocalStore, "get", lambda *args, **options: (read.append(args[1]), real(*args, **options))[1]
        )
        for _ in range(2):
            assert len(repository.snapshots()) == 5
        assert read == [made.key]


def test_a_known_repository_reads_no_record(root, monkeypatch):
    """A repository reads no record that this machine has read, committed or revised before."""
    read = []
    with opened(root) as repository:
        save(repository, "a", 4, 4)
        repository.tag("a@4", "mine")
        real = LocalStore.get
        monkeypatch.setattr(
            LocalStore, "get", lambda *args, **options: (read.append(args[1]), real(*args, **options))[1]
        )
        assert repository.snapshot("a@mine").step == 4
    assert snapshot_of(root, "a@mine").step == 4
    assert [key for key in read if key.startswith("snapshots/")] == []


def test_a_cached_header_of_another_manifest_is_not_believed(root):
    """A cached header that does not match its manifest is ignored, since a gc decides by headers what to delete."""
    with opened(root) as repository:
        index, (ref, other) = repository.context.index, [repository.snapshot(of).manifests[0] for of in ("a@1", "a@2")]
        right = index.header(ref)
        index.header(other)
        wrong = index._cached_headers([other])[other.sha256]
        index._environment.put({b"manifests": {ref.sha256: wrong}})
        assert index._cached_headers([ref, other]) == {other.sha256: wrong}
        assert index.header(ref) == right


def test_many_headers_are_looked_up_under_one_lock(many, monkeypatch, tmp_path):
    """Else a gc takes the lock of the index once for each manifest in the repository."""
    store = counting(many)
    index = index_module.Index(store, "0" * 32, tmp_path)
    refs = [ref for snapshot in index.refresh().snapshots(states=None) for ref in snapshot.manifests]
    headers = list(index.headers(refs))
    lookups, get_all, store.read = [], Environment.get_all, []
    monkeypatch.setattr(Environment, "get_all", lambda *args: (lookups.append(args), get_all(*args))[1])
    assert list(index.headers(refs)) == headers
    assert (len(lookups), store.read) == (-(-len(refs) // index_module.HEADERS_IN_MEMORY), [])
    assert len(refs) == 3 * 40
    index.close()


def test_a_cache_of_the_schema_before_is_dropped(root):
    environment = lmdb.open(str(index_of(root)), map_size=2**30, max_dbs=3)
    with environment.begin(write=True) as transaction:
        meta, held = (environment.open_db(name, txn=transaction) for name in (b"meta", b"records"))
        identity = transaction.get(b"identity", db=meta)
        assert identity.startswith(b"5 ")
        transaction.put(b"identity", b"4" + identity[1:], db=meta)
        for key, data in list(transaction.cursor(db=held)):
            transaction.put(key, data[8:], db=held)  # schema 4 had no checksums of values
    environment.close()
    used = (index_of(root) / "data.mdb").stat().st_size
    digest = xxhash.xxh3_64_hexdigest((index_of(root) / "data.mdb").read_bytes()[:used])
    (index_of(root) / "verified").write_text(f"{used} {digest}")
    check_works(root)


# --- many at a time --------------------------------------------------------------------------------------------------


class CountingStore(MemoryStore):
    """Records the reads, counts how many run at once, and refuses all after the first `refused_from`."""

    def __init__(self) -> None:
        super().__init__()
        self.refused_from = 10**9
        self.read: list[str] = []
        # A read in a thread other than the main one waits until `wanted` reads have run at once.
        self.at_once = self.highest = self.wanted = 0
        self.counting = threading.Condition()

    def _count(self, key, read):
        with self.counting:
            if len(self.read) >= self.refused_from:
                raise StorageError("503")
            self.read.append(key)
            self.at_once += 1
            self.highest = max(self.highest, self.at_once)
            self.counting.notify_all()
            if threading.current_thread() is not threading.main_thread():
                self.counting.wait_for(lambda: self.highest >= self.wanted, 600)
            self.at_once -= 1
        return read()

    def get(self, key, **options):
        return self._count(key, lambda: super(CountingStore, self).get(key, **options))

    def get_range(self, key, *args):
        return self._count(key, lambda: super(CountingStore, self).get_range(key, *args))


@pytest.fixture(scope="module")
def many() -> MemoryStore:
    """Return a store with 40 snapshots in two runs; 9 of run b are forgotten."""
    store = MemoryStore()
    with repository_of(store, create=True) as repository:
        for step in range(30):
            save(repository, "a", step, step)
        for step in range(10):
            save(repository, "b", step, step)
        repository.forget([KeepLast(1)], run="b")
    return store


def counting(many: MemoryStore) -> CountingStore:
    store = CountingStore()
    store._objects = dict(many._objects)
    return store


def repository_of(store, *, create: bool = False) -> Repository:
    return Repository.create(store, chunk_bytes=1024, options=OPTIONS) if create else Repository.open(store)


def test_a_cold_index_keeps_what_it_has_read(many, monkeypatch, tmp_path):
    """Records are cached in groups: after a failure, records of complete groups are not read again."""
    monkeypatch.setattr(index_module, "RECORDS_IN_MEMORY", 8)
    store = counting(many)
    store.refused_from = 20
    index = index_module.Index(store, "0" * 32, tmp_path)
    with pytest.raises(StorageError, match="503"):
        index.refresh()
    index.close()
    before, store.refused_from, store.read = set(store.read[:16]), 10**9, []
    index = index_module.Index(store, "0" * 32, tmp_path)
    assert len(index.refresh().snapshots(states=None)) == 40
    assert len(store.read) == 40 - 16
    assert before.isdisjoint(store.read)
    index.close()


def test_a_cold_gc_reads_headers_several_at_a_time(many, monkeypatch, tmp_path):
    """A first gc reads each header once, also of forgotten snapshots, several at a time; a second gc reads none."""
    monkeypatch.setattr(index_module, "HEADERS_IN_MEMORY", 16)
    monkeypatch.setattr(threads, "SLOW_S", 0.0)  # as if the store were far away
    store = counting(many)
    index = index_module.Index(store, "0" * 32, tmp_path)
    index.refresh()
    store.read, store.highest, store.wanted = [], 0, 4
    result = gc.collect(SimpleNamespace(store=store, index=index))
    headers = [key for key in store.read if key.startswith("manifests/")]
    assert len(headers) == len(set(headers)) == 3 * 40
    assert store.wanted <= store.highest <= threads.READ_THREADS
    assert result.deleted_objects > 0
    store.read = []
    gc.collect(SimpleNamespace(store=store, index=index))
    assert [key for key in store.read if key.startswith("manifests/")] == []
    index.close()


@pytest.mark.parametrize("how", ["deleted", "cut"])
def test_a_cold_gc_names_the_snapshot_whose_manifest_is_missing(many, tmp_path, how):
    store = counting(many)
    index = index_module.Index(store, "0" * 32, tmp_path)
    snapshot = next(s for s in index.refresh().snapshots("a") if s.step == 17)
    ref = snapshot.manifests[1]
    data, info = store._objects.pop(ref.key)
    if how == "cut":
        store._objects[ref.key] = data[:40], structs.replace(info, size_bytes=40)
    before = dict(store._objects)
    expected = rf"gc: a@17: {ref.key}.*nothing was deleted" if how == "deleted" else ref.key
    with pytest.raises(IntegrityError, match=expected):
        gc.collect(SimpleNamespace(store=store, index=index))
    assert before.items() <= store._objects.items()
    store._objects[ref.key] = data, info  # repaired; the damaged header was not cached
    assert gc.collect(SimpleNamespace(store=store, index=index)).deleted_objects > 0
    index.close()


def test_a_record_under_another_name(root):
    path = record_of(root, "a@2")
    shutil.rmtree(index_of(root))
    path.rename(path.with_name(path.name.replace("000000000002", "000000000007")))
    with opened(root) as repository:
        assert len(repository.view().damaged) == 1
        with pytest.raises(IntegrityError, match="moved or altered"):
            repository.gc()


def test_rebuild_reads_everything_again(root):
    with opened(root) as repository:
        before = repository.view().snapshots(states=None)
        assert repository.rebuild_index() == len(before)
        assert [s.key for s in repository.view().snapshots(states=None)] == [s.key for s in before]
    check_works(root)


def test_rebuild_beside_another_open_repository(root):
    with opened(root) as one, opened(root) as two:
        one.rebuild_index()
        save(two, "a", 4, 4)
        assert len(check_restores(one)) == len(check_restores(two)) == 5


def test_lineage(root):
    with opened(root) as repository:
        assert [s.ref for s in repository.children("a@3")] == ["b@0"]
        assert [s.ref for s in repository.children("a@2")] == ["a@3"]
        before = {s.id: (s.parent, s.state, s.tags) for s in repository.view().snapshots(states=None)}
        repository.rebuild_index()
        assert {s.id: (s.parent, s.state, s.tags) for s in repository.view().snapshots(states=None)} == before


def test_an_index_that_does_not_fit_is_rebuilt(tmp_path, caplog):
    """The rebuilt index keeps the ruling records. If even these do not fit, only time is lost."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(60):
            save(repository, "a", step, step)
        for limit_bytes, fits in ((192 * 1024, True), (40 * 1024, False)):
            caplog.clear()
            folder = tmp_path / str(limit_bytes)
            index = index_module.Index(store, repository.config.uuid, folder, limit_bytes=limit_bytes)
            view = index.refresh()
            refs = [ref for snapshot in view.snapshots() for ref in snapshot.manifests]
            for ref in refs:
                index.header(ref)
            index.close()
            assert "does not fit" in caplog.text
            assert ("cannot be written" in caplog.text) is not fits
            assert (folder / "data.mdb").stat().st_size <= limit_bytes
            again = index_module.Index(store, repository.config.uuid, folder, limit_bytes=limit_bytes)
            assert [s.step for s in again.refresh().snapshots()] == list(range(60))
            again.close()


@pytest.mark.parametrize("what", ["get_all", "put"])
def test_an_index_that_another_thread_closes_is_not_called_damaged(made, monkeypatch, caplog, what):
    """No warning says that its folder was removed: the objects are read from the store."""
    with Repository.open(made) as repository:
        index, method = repository.context.index, getattr(Environment, what)
        refs = [ref for snapshot in repository.snapshots() for ref in snapshot.manifests]
        if what == "put":
            monkeypatch.setattr(Environment, "get_all", lambda *args: {})

        def closed_first(environment, *args):
            index.close()
            return method(environment, *args)

        monkeypatch.setattr(Environment, what, closed_first)
        assert [header.part for header in index.headers(refs)] == [ref.part for ref in refs]
    assert caplog.text == ""


def test_only_records_that_rule_are_read(tmp_path):
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        first = save(repository, "a", 0, 0)
        save(repository, "a", 1, 1)
        repository.tag("a@0", "good")
        with store._mutex:
            data, info = store._objects[first.key]
            store._objects[first.key] = b"rubbish" + data[7:], info  # an older revision
        index = index_module.Index(store, repository.config.uuid, tmp_path)
        view = index.refresh()
        assert [(s.step, s.tags) for s in view.snapshots()] == [(0, ["good"]), (1, [])]
        assert view.damaged == {}
        index.close()


@pytest.mark.parametrize(
    ("url", "place"),
    [("s3://b/p", "cache"), ("gs://b", "cache"), ("memory://m", "temporary"), ("/wrapped", "temporary")],
)
def test_where_an_index_lies(monkeypatch, tmp_path, url, place):
    """The index of a store that outlives the process lies in the cache, if that is usable; else it is temporary.

    A copy of the store at another place has another index.
    """
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    store = SimpleNamespace(url=url, place=url)
    folder, temporary = index_module.folder_for(store, "0" * 32)
    assert temporary is (place != "cache")
    assert (tmp_path / "cache" in folder.parents) is (place == "cache")
    if not temporary:
        assert folder.name.startswith("0" * 32)
        assert index_module.folder_for(SimpleNamespace(url=url, place=url + " mirror"), "0" * 32)[0] != folder
        monkeypatch.setattr(cache_module, "refusal", lambda _: "lies elsewhere")
        assert index_module.folder_for(store, "0" * 32)[1]
    else:
        folder.rmdir()


def test_an_index_that_another_thread_closes_is_no_failure(root, monkeypatch):
    """A save or a restore goes on without the index if another thread closes it in the middle of a lookup."""
    with opened(root) as repository:
        index, ref = repository.context.index, repository.snapshot("a@2").manifests[0]
        index.header(ref)
        environment, looks = index._environment, iter(range(10))
        gone = property(lambda _: environment if next(looks) == 0 else None)
        with monkeypatch.context() as patch:
            patch.setattr(type(index), "_environment", gone, raising=False)
            assert index._cached_headers([ref])
        looks = iter(range(10))
        with monkeypatch.context() as patch:
            patch.setattr(type(index), "_environment", gone, raising=False)
            index._store_all({b"manifests": {"a": b"b"}})


@pytest.mark.slow
def test_an_index_that_another_process_rebuilds_stays_usable(root, caplog):
    """A process that has the index open changes to the new file when another process rebuilds the index.

    Otherwise it would write the seal of its old file. The new file would not match this seal, and would be deleted.
    """
    with another_process(root) as saves:
        for step in range(2):
            with opened(root) as repository:
                repository.rebuild_index()
            for number in range(2):
                with opened(root) as repository:
                    assert len(repository.snapshots("other")) == 2 * step + number
                saves(2 * step + number)
    with opened(root) as repository:
        assert len(repository.snapshots("other")) == 4
    assert "damaged or unfinished" not in caplog.text


@contextmanager
def another_process(root: Path, log: Path | None = None):
    """Open the repository in another process; yield a function that saves a step there and reads its header again.

    Args:
        log: file for the warnings of that process.
    """
    script = f"""
import sys
from kit.repositories import OPTIONS, save
from snapstore import Repository
with Repository.open({str(root)!r}, options=OPTIONS) as repository:
    repository.view()
    print("opened", flush=True)
    for line in sys.stdin:
        what, step = line.split()
        if what == "save":
            save(repository, "other", int(step), 0)
        repository.context.index.header(repository.snapshot("a@2").manifests[0])
        print("done", flush=True)
"""
    with (
        (log or Path(os.devnull)).open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            env=environment(),
        ) as other,
    ):
        assert other.stdout.readline() == "opened\n"

        def call(step: int, what: str = "save") -> None:
            other.stdin.write(f"{what} {step}\n")
            assert other.stdout.readline() == "done\n", f"it ended with {other.wait(60)}"

        yield call
        other.stdin.close()
        assert other.wait(60) == 0


def cut_off(data: Path) -> None:
    os.truncate(data, 0)


def cut_short(data: Path) -> None:
    os.truncate(data, 8192)


def overwrite(data: Path) -> None:
    with data.open("r+b") as file:
        file.write(b"\xa5" * data.stat().st_size)


def flip_a_byte(data: Path) -> None:
    status = data.stat()
    flip_file(data, 2 * 4096 + 20)
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))  # as rsync --times does


def remove(data: Path) -> None:
    data.unlink()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("use", ["save", "read"])
@pytest.mark.parametrize("harm", [cut_off, cut_short, overwrite, flip_a_byte, remove])
def test_an_index_that_is_damaged_while_it_is_open(root, tmp_path, harm, use):
    """If another program cuts, overwrites or removes the open file, LMDB does not read it: it would end the process."""
    log = tmp_path / "log"
    with another_process(root, log) as call:
        call(0)
        harm(index_of(root) / "data.mdb")
        call(1, use)
        warned = "damaged or unfinished" in log.read_text()
        assert warned is (harm is not remove)
        call(2)
        with opened(root) as repository:
            assert [s.step for s in repository.snapshots("other")] == ([0, 1, 2] if use == "save" else [0, 2])
            check_restores(repository)
        call(3)
    assert log.read_text().count("damaged or unfinished") == warned


@pytest.mark.slow
def test_processes_that_use_one_index_in_turns_keep_its_file(root, tmp_path):
    """A change of the file by another process is not taken for damage."""
    log, data = tmp_path / "log", index_of(root) / "data.mdb"
    file = data.stat().st_ino
    with opened(root) as repository, another_process(root, log) as call:
        for step in range(4):
            call(step)
            save(repository, "here", step, 0)
            call(step, "read")
            repository.context.index.header(repository.snapshot("a@2").manifests[0])
        assert len(repository.context.index._environment.items(b"records")) >= 4 + 2 * 4
    assert data.stat().st_ino == file
    assert log.read_text() == ""


@pytest.mark.parametrize("how", ["a link", "writable by others"])
def test_an_index_folder_that_is_not_ours_alone_is_not_used(root, tmp_path, how, caplog):
    """A folder in the cache is not used if others can write to it or it is a link, since LMDB trusts its file."""
    Repository.open(root).close()
    folder, out = index_of(root), tmp_path / "elsewhere"
    shutil.rmtree(folder)
    out.mkdir()
    (out / "data.mdb").write_text("mine")
    if how == "a link":
        folder.symlink_to(out)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with Repository.open(root) as repository:
        assert repository.snapshots()
    assert "only you can write to" in caplog.text
    assert {p.name: p.read_text() for p in out.iterdir()} == {"data.mdb": "mine"}
    assert how == "a link" or list(folder.iterdir()) == []
