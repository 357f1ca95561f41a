"""A local store loses nothing when the disk, the kernel or other processes misbehave."""

import errno
import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kit import power
from kit.objects import keys_of
from kit.ranks import together
from kit.waits import until
from snapstore import Repository
from snapstore.arrays import empty_pages
from snapstore.errors import (
    AlreadyExistsError,
    CapabilityError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    StorageFullError,
)
from snapstore.storage import atomic_write, kept_open, local, locks
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore
from snapstore.storage.urls import open_store


@pytest.fixture
def root(tmp_path):
    return tmp_path / "repo"


@pytest.fixture
def store(root):
    return LocalStore(root, create=True)


@pytest.fixture
def mount(tmp_path):
    """Yield mount(options), which mounts a new tmpfs and returns its path; mount("remount,...", path) changes it.

    The test is skipped where mounting is not allowed.
    """
    mounted = []

    def do(options, path=None):
        point = path or tmp_path / f"mount{len(mounted)}"
        point.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], capture_output=True)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
        if path is None:
            mounted.append(point)
        return point

    yield do
    for point in mounted:
        subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def no_leak():
    """Check that the test closes every locked descriptor that it opens."""
    before = set(locks._LOCKED_FDS)
    yield
    assert before == locks._LOCKED_FDS


def temps_of(store):
    folder = Path(store.url) / "tmp"
    return sorted(folder.iterdir()) if folder.exists() else []


def failing(monkeypatch, name, code, when=lambda *args: True, times=1):
    """Let os.<name> raise OSError(code) in the first `times` calls for which `when` is true; return the list of them.

    A name in an open folder is passed to `when` as its path.
    """
    real, calls = getattr(os, name), []

    def fake(*args, dir_fd=None, **kwargs):
        shown = (path_at(dir_fd, args[0]), *args[1:]) if dir_fd is not None else args
        if len(calls) < times and when(*shown):
            calls.append(args)
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs) if dir_fd is None else real(*args, dir_fd=dir_fd, **kwargs)

    monkeypatch.setattr(os, name, fake)
    return calls


def path_of(fd):
    return Path(f"/proc/self/fd/{fd}").readlink()


def path_at(folder, name):
    """Return the path of a name in an open folder; for "." the path of the folder."""
    return (path_of(folder) if folder is not None else Path()) / name


def is_file(fd, *_):
    return path_of(fd).is_file()


def is_directory(fd, *_):
    return path_of(fd).is_dir()


# --- the order that survives a power loss ---


@pytest.fixture
def calls(monkeypatch, root):
    """Return the list of (call, path) of the calls that matter for durability.

    Each path is relative to the parent of the root, or "TEMP" for a temporary file.
    """
    record = []

    def spy(name, describe):
        real = getattr(os, name)

        def call(*args, **kwargs):
            what = Path(describe(*args, **kwargs))
            result = real(*args, **kwargs)
            if what.is_relative_to(root.parent):
                record.append((name, "TEMP" if what.parent.name == "tmp" else str(what.relative_to(root.parent))))
            return result

        monkeypatch.setattr(os, name, call)

    spy("fsync", path_of)
    spy("link", lambda source, target, dst_dir_fd, **_: path_at(dst_dir_fd, target))
    spy("mkdir", lambda path, *_, dir_fd=None: path_at(dir_fd, path))
    spy("write", lambda fd, *_: path_of(fd))
    return record


@pytest.mark.parametrize("create", ["put", "lock"])
def test_order_of_a_put(calls, root, create):
    store = LocalStore(root, create=True)
    assert calls == [("mkdir", "repo"), ("fsync", ".")]
    calls.clear()
    getattr(store, create)("packs/7f/7fab", b"x")
    assert [call for call in calls if call != ("mkdir", "repo/tmp")] == [
        ("mkdir", "repo/packs"),
        ("fsync", "repo"),
        ("mkdir", "repo/packs/7f"),
        ("fsync", "repo/packs"),
        ("write", "TEMP"),
        ("fsync", "TEMP"),
        ("link", "repo/packs/7f/7fab"),
        ("fsync", "repo/packs/7f"),
    ]
    calls.clear()
    store.put("packs/7f/7fcd", b"x")
    assert calls == [
        ("write", "TEMP"),
        ("fsync", "TEMP"),
        ("link", "repo/packs/7f/7fcd"),
        ("fsync", "repo/packs/7f"),
    ]


def test_levels_made_by_another_process_are_not_trusted(calls, store, root):
    """A put fsyncs the folders above its object even if another process made them, which may not have fsynced them."""
    (root / "packs" / "7f").mkdir(parents=True)
    calls.clear()
    store.put("packs/7f/7fab", b"x")
    link = calls.index(("link", "repo/packs/7f/7fab"))
    assert calls.index(("fsync", "repo")) < calls.index(("fsync", "repo/packs")) < link


def test_a_level_that_a_delete_has_removed_is_made_again(calls, store):
    store.put("a/b/c", b"x")
    store.delete(["a/b/c"])
    calls.clear()
    store.put("a/b/c", b"x")
    assert calls[:2] == [("mkdir", "repo/a/b"), ("fsync", "repo/a")]


def test_an_existing_object_is_durable_before_put_raises(calls, store):
    store.put("a/b", b"x")
    calls.clear()
    with pytest.raises(AlreadyExistsError):
        store.put("a/b", b"y")
    assert calls[-1] == ("fsync", "repo/a")


def test_sync_fsyncs_the_folders_above_and_below_the_prefix(calls, store, root):
    (root / "snapshots" / "run").mkdir(parents=True)
    calls.clear()
    store.sync("snapshots/")
    assert {("fsync", "repo"), ("fsync", "repo/snapshots"), ("fsync", "repo/snapshots/run")} <= set(calls)
    calls.clear()
    store.sync("missing/")
    assert calls == []


# --- full disk ---


def fill(store, data):
    for i in range(100):
        try:
            store.put(f"fill/{i}", data)
        except StorageFullError as error:
            return str(error)
    raise AssertionError("the disk never filled up")


def test_a_really_full_disk(mount):
    store = LocalStore(mount("size=256k"))
    store.put("packs/a", b"a" * 64 * 1024)
    store.lock("sessions/s", b"x")
    with pytest.raises(StorageFullError, match=r"^packs/b .*no space"):
        store.put("packs/b", b"b" * 1024 * 1024)
    assert keys_of(store) == ["packs/a", "sessions/s"]
    assert temps_of(store) == []
    fill(store, b"x" * 4096)
    assert abs(store.now_s() - time.time()) < 300
    store.touch("sessions/s")
    store.release("sessions/s")
    store.delete(["packs/a"])
    store.put("packs/c", b"c" * 32 * 1024)
    assert store.get("packs/c") == b"c" * 32 * 1024


def test_no_inodes_left(mount):
    store = LocalStore(mount("nr_inodes=6"))
    fill(store, b"")
    assert abs(store.now_s() - time.time()) < 300
    store.delete(keys_of(store))
    store.put("a/again", b"x")


class Flags:
    """Counts the writes of files by whether they are direct, and may refuse the flag, or the writes."""

    def __init__(self, monkeypatch, *, refuse=None, most=1 << 40):
        self.bytes = {True: 0, False: 0}
        real = {"fcntl": fcntl.fcntl, "write": os.write}

        def set_flags(fd, command, *flags):
            if refuse == "flag" and command == fcntl.F_SETFL and flags[0] & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O")
            return real["fcntl"](fd, command, *flags)

        def write(fd, data):
            is_direct = bool(real["fcntl"](fd, fcntl.F_GETFL) & os.O_DIRECT)
            if is_direct and refuse is not None:
                raise OSError(*refuse)
            written = real["write"](fd, data[:most])
            self.bytes[is_direct] += written
            return written

        monkeypatch.setattr(fcntl, "fcntl", set_flags)
        monkeypatch.setattr(os, "write", write)


@pytest.fixture
def disk():
    """A folder on a disk, if /var/tmp is on one: the other tests use memory."""
    with tempfile.TemporaryDirectory(prefix="snapstore-direct-", dir="/var/tmp") as folder:
        yield Path(folder)


def takes_direct(folder):
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
            return os.write(file.fileno(), empty_pages(4096)) == 4096
        except OSError:
            return False


@pytest.mark.parametrize("extra", [0, 1, 4095, 4096])
def test_large_objects_in_pages_are_written_directly(monkeypatch, disk, extra):
    if not takes_direct(disk):
        pytest.skip("this file system takes no direct I/O")
    flags = Flags(monkeypatch)
    data = empty_pages((3 << 20) + extra)
    data[:] = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
    store = LocalStore(disk / "r", create=True)
    store.put("packs/a", data.data)
    assert flags.bytes == {True: data.size // 4096 * 4096, False: data.size % 4096}
    assert store.get("packs/a") == data.tobytes()
    flags.bytes = {True: 0, False: 0}
    store.put("packs/b", data[1:].data)  # not aligned
    store.put("packs/c", data[: 1 << 19].data)  # small
    assert flags.bytes == {True: 0, False: data.size - 1 + (1 << 19)}


@pytest.mark.parametrize("refuse", ["flag", (errno.EINVAL, "no direct I/O"), (errno.EOPNOTSUPP, "no direct I/O")])
def test_a_file_system_that_takes_no_direct_writes(monkeypatch, disk, refuse):
    """An older tmpfs refuses the flag; some FUSE file systems take it, and refuse the writes."""
    flags = Flags(monkeypatch, refuse=refuse)
    data = empty_pages(2 << 20)
    data[:] = 7
    store = LocalStore(disk / "r", create=True)
    store.put("packs/a", data.data)
    assert flags.bytes == {True: 0, False: data.size}
    assert store.get("packs/a") == data.tobytes()


@pytest.mark.parametrize("most", [1 << 20, 1000, (1 << 20) + 512])
def test_direct_writes_may_be_short(monkeypatch, disk, most):
    if not takes_direct(disk):
        pytest.skip("this file system takes no direct I/O")
    real = os.write

    def write(fd, data):
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and most % 4096:  # as if the kernel had written a part of a block
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            written = real(fd, data[:most])
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            return written
        return real(fd, data[:most])

    monkeypatch.setattr(os, "write", write)
    data = empty_pages((3 << 20) + 77)
    data[:] = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
    store = LocalStore(disk / "r", create=True)
    store.put("packs/a", data.data)
    assert store.get("packs/a") == data.tobytes()


def test_an_error_of_a_direct_write_is_not_tried_again(monkeypatch, disk):
    if not takes_direct(disk):
        pytest.skip("this file system takes no direct I/O")
    Flags(monkeypatch, refuse=(errno.EIO, "a bad sector"))
    store = LocalStore(disk / "r", create=True)
    with pytest.raises(StorageError, match="a bad sector"):
        store.put("packs/a", empty_pages(2 << 20).data)
    assert keys_of(store, "packs/") == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("name", "when"), [("write", is_file), ("fsync", is_file), ("fsync", is_directory), ("link", None), ("mkdir", None)]
)
@pytest.mark.usefixtures("no_leak")
def test_full_at_every_call(store, monkeypatch, name, when, code):
    calls = failing(monkeypatch, name, code, when or (lambda *_: True))
    with pytest.raises(StorageFullError, match=rf"^a/b in .*{errno.errorcode[code]}"):
        store.put("a/b", b"x")
    assert len(calls) == 1
    assert temps_of(store) == []
    store.put("a/b", b"x")


def test_short_writes_are_continued(store, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: real(fd, view[:1000]))
    data = os.urandom(12_345)
    store.put("a", data)
    assert store.get("a") == data


def test_short_reads_are_continued(store, monkeypatch):
    monkeypatch.setattr(local, "_READ_PIECE_BYTES", 1000)
    data = os.urandom(12_345)
    store.put("a", data)
    assert store.get("a") == data
    assert store.get_range("a", 17, 12_000) == data[17:12_017]


# --- fsync and other errors ---


def test_fsync_fails_once(store, monkeypatch):
    """The put raises and does not fsync the same descriptor again. It leaves no object and no temporary file."""
    synced = []
    failing(monkeypatch, "fsync", errno.EIO, is_file)
    fails = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (is_file(fd) and synced.append(os.fstat(fd).st_ino), fails(fd)))
    with pytest.raises(StorageError, match=r"^a in .*EIO") as caught:
        store.put("a", b"x")
    assert isinstance(caught.value.__cause__, OSError)
    assert len(synced) == 1
    assert (keys_of(store), temps_of(store)) == ([], [])
    store.put("a", b"x")


@pytest.mark.parametrize("create", ["put", "lock"])
@pytest.mark.usefixtures("no_leak")
def test_fsync_of_the_directory_fails_after_the_link(store, monkeypatch, create):
    """A put or lock that fails after the link may leave its object: it is not locked, and `release` deletes it.

    Linux reports the error once, so neither a second put nor a sync may count the object as durable.
    """
    store.put("a/other", b"x")
    failing(monkeypatch, "fsync", errno.EIO, is_directory)
    with pytest.raises(StorageError, match=r"^a/b "):
        getattr(store, create)("a/b", b"x")
    assert temps_of(store) == []
    assert store.is_locked("a/b") is False
    for call in (lambda: store.put("a/b", b"x"), lambda: store.sync("a/"), lambda: store.sync("")):
        with pytest.raises(StorageError, match=r"^a/b in .*an fsync of its folder has failed.*open the repository ag"):
            call()
    store.put("a/b.1", b"x")
    store.sync("other/")
    with pytest.raises(AlreadyExistsError):
        LocalStore(store.root).put("a/b", b"x")
    store.release("a/b")
    assert keys_of(store) == ["a/b.1", "a/other"]
    store.sync("a/")
    store.put("a/b", b"x")


def test_another_process_deletes_a_file_in_doubt(store, monkeypatch):
    store.put("a/other", b"x")
    failing(monkeypatch, "fsync", errno.EIO, is_directory)
    with pytest.raises(StorageError):
        store.put("a/b", b"x")
    LocalStore(store.root).delete(["a/b"])
    store.put("a/b", b"x")
    store.sync("a/")


def test_a_failed_sync_is_not_forgotten(store, monkeypatch):
    store.put("a/b/c", b"x")
    failing(monkeypatch, "fsync", errno.EIO, lambda fd: path_of(fd).name == "b")
    with pytest.raises(StorageError, match="EIO"):
        store.sync("a/")
    with pytest.raises(StorageError, match=r"^a/b/ in .*an fsync of its folder has failed"):
        store.sync("a/")
    store.put("a/b/d", b"x")
    LocalStore(store.root).sync("a/")


def test_a_level_counts_as_durable_only_after_its_fsync(store, monkeypatch):
    failing(monkeypatch, "fsync", errno.EIO, is_directory)
    with pytest.raises(StorageError):
        store.put("a/b", b"x")
    with pytest.raises(StorageError, match=r"^a/ in .*an fsync of its folder has failed"):
        store.put("a/b", b"x")
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(path_of(fd)), real(fd)))
    LocalStore(store.root).put("a/b", b"x")
    assert synced[0] == Path(store.url)
    (store.root / "a" / "b").unlink()
    (store.root / "a").rmdir()
    store.put("a/b", b"x")  # a new folder is not in doubt


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_refused_writes(store, monkeypatch, code):
    store.put("a", b"x")
    failing(monkeypatch, "open", code, lambda path, *_: "tmp" in str(path))
    with pytest.raises(StorageError, match=rf"^b in .*(read-only|permission).*{errno.errorcode[code]}"):
        store.put("b", b"x")
    failing(monkeypatch, "unlink", code, times=9)
    for call in (lambda: store.delete(["a"]), lambda: store.release("a")):
        with pytest.raises(StorageError, match=r"^a in .*(read-only|permission)"):
            call()
    assert store.get("a") == b"x"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV])
def test_no_hard_links(store, monkeypatch, code):
    failing(monkeypatch, "link", code)
    with pytest.raises(CapabilityError, match=r"^a in .*hard link"):
        store.put("a", b"x")
    assert (keys_of(store), temps_of(store)) == ([], [])


def test_no_fsync_of_directories(store, monkeypatch):
    failing(monkeypatch, "fsync", errno.EINVAL, is_directory)
    with pytest.raises(CapabilityError, match="cannot fsync a directory"):
        store.put("a", b"x")


def test_a_link_whose_reply_was_lost(store, monkeypatch):
    """A put succeeds if a network file system makes the link, loses the reply, and finds that link in its retry."""
    real = os.link

    def link(source, target, **options):
        real(source, target, **options)
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(os, "link", link)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"x")


def test_read_errors(store, monkeypatch):
    store.put("a", b"x")
    failing(monkeypatch, "pread", errno.EIO)
    with pytest.raises(StorageError, match=r"^a in .*cannot read.*EIO"):
        store.get("a")
    failing(monkeypatch, "preadv", errno.EIO)
    with pytest.raises(StorageError, match=r"^a in .*cannot read.*EIO"):
        store.get_range("a", 0, 1)


def test_read_only_mount(mount):
    root = mount("size=1m")
    store = LocalStore(root)
    store.put("packs/a", b"abc")
    mount("remount,ro", root)
    assert store.get("packs/a") == b"abc"
    assert store.get_range("packs/a", 1, 2) == b"bc"
    assert keys_of(store) == ["packs/a"]
    assert store.is_locked("packs/a") is False
    assert abs(store.now_s() - time.time()) < 300
    store.sync("packs/")
    for call in (
        lambda: store.put("packs/b", b"x"),
        lambda: store.lock("sessions/s", b"x"),
        lambda: store.delete(["packs/a"]),
        lambda: store.touch("packs/a"),
    ):
        with pytest.raises(StorageError, match="read-only"):
            call()
    mount("remount,rw", root)


def test_truncated_object(store, root):
    store.put("packs/a", b"x" * 1000)
    os.truncate(root / "packs" / "a", 500)
    with pytest.raises(IntegrityError, match=r"^packs/a in .* at 400\+200: .*500 bytes"):
        store.get_range("packs/a", 400, 200)


def test_truncated_while_read(store, root, monkeypatch):
    store.put("a", b"x" * 1000)
    monkeypatch.setattr(local, "_READ_PIECE_BYTES", 400)
    for name, call in (("pread", lambda: store.get("a")), ("preadv", lambda: store.get_range("a", 0, 1000))):
        os.truncate(root / "a", 1000)
        real = getattr(os, name)

        def cut(*args, real=real):
            got = real(*args)
            os.truncate(root / "a", 500)
            return got

        monkeypatch.setattr(os, name, cut)
        with pytest.raises(IntegrityError, match=r"^a in .* at 0\+1000: .*500 bytes"):
            call()


def test_only_files_are_objects(store, root):
    (root / "folder").mkdir()
    os.mkfifo(root / "fifo")
    (root / ".hidden").write_bytes(b"x")
    (root / "lost+found").mkdir()
    (root / "index").mkdir()
    (root / "index" / "data.mdb").write_bytes(b"x")
    assert keys_of(store) == []
    for key in ("folder", "fifo"):
        for call in (store.get, store.stat, store.touch):
            with pytest.raises(NotFoundError):
                call(key)
        assert store.is_locked(key) is False
    store.delete(["folder"])
    assert (root / "folder").is_dir()


# --- listing ---


def test_a_missing_root_is_no_empty_store(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "unmounted", tmp_path / "file"):
        store = LocalStore(path)
        for call in (
            lambda store=store: list(store.list("")),
            lambda store=store: list(store.list("packs/")),
            lambda store=store: store.put("a/b", b"x"),
            lambda store=store: store.sync("packs/"),
            lambda store=store: store.clean(),
        ):
            with pytest.raises(StorageError, match="expected a directory, found none"):
                call()
    assert not (tmp_path / "unmounted").exists()


def test_unmounted_while_listed(store, root):
    for i in range(3):
        store.put(f"p/{i}/x", b"x")
    listing = store.list("")
    next(listing)
    root.rename(root.with_name("elsewhere"))
    with pytest.raises(StorageError, match="expected a directory"):
        list(listing)
    root.with_name("elsewhere").rename(root)
    listing = store.list("")
    next(listing)
    root.rename(root.with_name("elsewhere"))
    root.mkdir()  # the empty mount point
    with pytest.raises(StorageError, match="unmounted"):
        list(listing)


def test_entries_that_vanish_while_listed(store, root, monkeypatch):
    for i in range(4):
        store.put(f"p/{i}/x", b"x")
    real = os.scandir

    class Vanishing:
        """A scandir whose first entry is deleted before the caller examines it."""

        def __init__(self, folder):
            self.path = path_of(folder)
            self.scan = real(folder)

        def __enter__(self):
            entries = sorted(self.scan, key=lambda entry: entry.name)
            if self.path == root / "p":
                (root / "p" / "0" / "x").unlink()
                (root / "p" / "0").rmdir()
            if self.path == root / "p" / "1":
                (root / "p" / "1" / "x").unlink()
            return iter(entries)

        def __exit__(self, *_):
            self.scan.close()

    monkeypatch.setattr(os, "scandir", Vanishing)
    assert keys_of(store) == ["p/2/x", "p/3/x"]


def test_a_directory_that_vanishes_before_it_is_read(store, root, monkeypatch):
    store.put("p/0/x", b"x")
    store.put("p/1/x", b"x")
    failing(monkeypatch, "scandir", errno.ENOENT, lambda folder: path_of(folder) == root / "p" / "0")
    assert keys_of(store) == ["p/1/x"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_a_listing_that_fails_raises(store, root, monkeypatch, code):
    store.put("p/0/x", b"x")
    failing(monkeypatch, "scandir", code, lambda folder: path_of(folder) == root / "p" / "0", times=9)
    with pytest.raises(StorageError, match=f"cannot list.*{errno.errorcode[code]}"):
        list(store.list(""))


BAD_INODES = [errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA]


def bad_inodes(monkeypatch, code, *paths):
    failing(monkeypatch, "stat", code, lambda path, *_: str(path) in set(map(str, paths)), times=10**9)


@pytest.mark.parametrize("code", BAD_INODES)
def test_a_bad_inode_hides_no_other_object(store, root, monkeypatch, code):
    """A listing shows the other files of the folder. It also shows the bad file, with a size that no object has: 0."""
    for key in ("p/0/x", "p/0/y", "q/x"):
        store.put(key, b"x")
    bad_inodes(monkeypatch, code, root / "p/0/x")
    listed = {info.key: info for info in store.list("")}
    assert listed.keys() == {"p/0/x", "p/0/y", "q/x"}
    assert (listed["p/0/x"].size_bytes, listed["p/0/y"].size_bytes) == (0, 1)
    assert store.now_s() - listed["p/0/x"].modified_s < 0, "its time must not look old"
    store.sync("p/")
    found = store.stat("p/0/x")
    assert (found.size_bytes, found.tag) == (0, "")
    assert abs(store.now_s() - found.modified_s) < 10
    assert store.sizes(["p/0/x", "p/0/y", "p/0/z"]) == {"p/0/x": 0, "p/0/y": 1}


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.ENOMEM])
def test_a_file_that_cannot_be_looked_at_for_another_reason_fails_the_listing(store, root, monkeypatch, code):
    store.put("p/0/x", b"x")
    bad_inodes(monkeypatch, code, root / "p/0/x")
    with pytest.raises(StorageError, match=f"cannot list.*{errno.errorcode[code]}"):
        list(store.list(""))
    with pytest.raises(StorageError, match=f"cannot stat.*{errno.errorcode[code]}"):
        store.stat("p/0/x")


@pytest.mark.parametrize("where", ["p", "p/0"])
def test_a_directory_whose_inode_is_bad_fails_the_listing(store, root, monkeypatch, where):
    """The entries of the folder are unknown, so a listing without them would be incomplete."""
    store.put("p/0/x", b"x")
    bad_inodes(monkeypatch, errno.EUCLEAN, root / where)
    with pytest.raises(StorageError, match=r"cannot list.*EUCLEAN"):
        list(store.list(""))
    with pytest.raises(StorageError, match=r"cannot stat.*EUCLEAN"):
        store.stat(where)


def test_a_disk_or_a_mount_that_fails_as_a_whole_fails_the_listing(store, root, monkeypatch):
    names = [f"p/{number}" for number in range(local._MOST_BAD_INODES + 1)]
    for name in names:
        store.put(name, b"x")
    with monkeypatch.context() as patch:
        bad_inodes(patch, errno.EIO, *(root / name for name in names[1:]))
        assert keys_of(store) == sorted(names)
    with monkeypatch.context() as patch:
        bad_inodes(patch, errno.EIO, *(root / name for name in names))
        with pytest.raises(StorageError, match=r"cannot list.*EIO"):
            list(store.list(""))
    listing = store.list("")
    next(listing)
    asked = failing(monkeypatch, "stat", errno.EIO, times=10**9)
    with pytest.raises(StorageError, match=r"cannot list.*EIO"):
        list(listing)
    assert len(asked) == 2, "each call may take a minute if a server is gone"


def test_1500_nested_folders_do_not_break_a_listing(store, root):
    depth = 1500
    level = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=level)
        level, up = os.open("d", os.O_RDONLY, dir_fd=level), level
        os.close(up)
    os.close(level)
    assert keys_of(store) == []
    subprocess.run(["rm", "-rf", str(root)], check=True)


# --- file systems that ignore case ---


@pytest.fixture
def caseless(monkeypatch, root):
    """Let os.stat and os.open ignore the case of names below the root."""

    def fold(path, dir_fd):
        return path if dir_fd is None or not path_of(dir_fd).is_relative_to(root) else path.lower()

    for name in ("stat", "open"):
        real = getattr(os, name)

        def call(path, *args, real=real, dir_fd=None, **kwargs):
            return real(fold(path, dir_fd), *args, dir_fd=dir_fd, **kwargs)

        monkeypatch.setattr(os, name, call)


def test_a_new_repository_is_refused_where_case_does_not_count(store, root, caseless):
    for _ in range(2):  # files that the first refusal leaves do not hide the problem from the second
        with pytest.raises(CapabilityError, match=r"^.*repo: .*'tmp' and 'TMP' for one name"):
            store.prepare()


# --- locks, processes, temporary files ---


@contextmanager
def python(script, *args):
    """Run a script in a child process. It can use `store`, and `say(x)`, which prints a line to stdout."""
    head = (
        "import os, sys, time\n"
        "from snapstore.storage import local, locks\n"
        "store = local.LocalStore(sys.argv[1])\n"
        "say = lambda x: os.write(1, f'{x}\\n'.encode())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", head + script, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process):
    ready, _, _ = select.select([process.stdout], [], [], 30)
    assert ready, "the child said nothing"
    return process.stdout.readline().decode().strip()


def test_a_forked_worker_does_not_keep_the_session_of_a_dead_trainer(store):
    script = (
        "store.lock('sessions/a', b'x')\n"
        "worker = os.fork()\n"
        "if worker == 0:\n"
        "    assert store.is_locked('sessions/a') is True\n"
        "    store.put('from/worker', b'x')\n"
        "    say(os.getpid())\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "time.sleep(60)\n"
    )
    with python(script, store.url) as trainer:
        worker = int(told(trainer))
        try:
            assert store.is_locked("sessions/a") is True
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            os.kill(worker, 0)  # the worker is alive
            assert store.is_locked("sessions/a") is False
        finally:
            os.kill(worker, signal.SIGKILL)
    assert keys_of(store) == ["from/worker", "sessions/a"]


def test_a_fork_leaves_the_lock_with_the_parent(store):
    store.lock("sessions/a", b"x")
    child = os.fork()
    if child == 0:
        # The child must not continue in pytest, so its exit code is the result.
        os._exit(0 if not locks._LOCKED_FDS and not locks._KEPT_FDS and store.is_locked("sessions/a") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.is_locked("sessions/a") is True
    store.release("sessions/a")


def test_ctrl_c_right_after_a_session_is_kept_locked(store, monkeypatch, no_leak):
    """A closed descriptor must not stay listed: its number may be that of another thread's file by now."""
    real, before = atomic_write.keep_locked, set(locks._KEPT_FDS.values())

    def interrupted(fd, name):
        real(fd, name)
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_write, "keep_locked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.lock("sessions/a", b"x")
    (kept,) = set(locks._KEPT_FDS.values()) - before
    assert os.fstat(kept).st_size == 1
    assert kept in locks._LOCKED_FDS
    store.release("sessions/a")
    assert set(locks._KEPT_FDS.values()) == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)


def test_no_descriptor_is_left_if_the_root_cannot_be_looked_at(store, monkeypatch):
    """On a dead mount the root can be opened with O_PATH, and fstat fails."""
    store.put("a", b"x")
    with store.pinned():
        before = len(list(Path("/proc/self/fd").iterdir()))
        with monkeypatch.context() as patch:
            patch.setattr(local, "identity", lambda status: (_ for _ in ()).throw(OSError(errno.ENOTCONN, "dead")))
            for _ in range(5):
                with pytest.raises(StorageError):
                    store.get("a")
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert store.get("a") == b"x"


def test_a_file_system_that_writes_nothing(store, monkeypatch):
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(StorageError, match=r"wrote no byte|EIO"):
        store.put("a", b"x")
    monkeypatch.undo()
    assert keys_of(store) == []


def test_a_file_with_a_lease_can_be_read(store, root):
    """A file server on this host may have a lease: an open waits until the kernel has taken it back."""
    store.put("a", b"hello")
    script = (
        "import fcntl, os, signal, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "signal.signal(signal.SIGIO, lambda *_: (time.sleep(0.2), fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)))\n"
        "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(root / "a")], stdout=subprocess.PIPE)
    try:
        if holder.stdout.readline() != b"ready\n":
            pytest.skip("this file system has no leases")
        assert store.get("a") == b"hello"
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize("exists", [False, True])
def test_the_name_of_a_new_root_is_durable(tmp_path, monkeypatch, exists):
    synced, real = [], os.fsync

    def fsync(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    if exists:  # a moment ago, by mkdir or by a `create` beside this one
        (tmp_path / "new").mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    LocalStore(tmp_path / "new", create=True)
    assert str(tmp_path) in synced


def test_an_executed_program_does_not_keep_the_session(store):
    script = (
        "import subprocess\n"
        "store.lock('sessions/a', b'x')\n"
        "say(subprocess.Popen(['sleep', '600'], close_fds=False).pid)\n"
        "time.sleep(600)\n"
    )
    with python(script, store.url) as trainer:
        program = int(told(trainer))
        try:
            trainer.kill()
            trainer.wait()
            # The kernel may close the file a moment after the exec.
            until(lambda: store.is_locked("sessions/a") is False)
        finally:
            os.kill(program, signal.SIGKILL)


@pytest.mark.usefixtures("no_leak")
def test_forks_beside_writing_threads(store):
    """A child that is forked at any moment has no locked file, and can write: no lock of a thread stays taken in it."""
    stop = threading.Event()

    def write(me):
        turn = 0
        while not stop.is_set():
            store.lock(f"s/{me}-{turn}", b"x")
            store.release(f"s/{me}-{turn}")
            turn += 1

    writers = [threading.Thread(target=write, args=(me,)) for me in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # if a lock stayed taken, the put would hang
                try:
                    store.put(f"child/{os.getpid()}", b"x")
                finally:
                    os._exit(1 if locks._KEPT_FDS or locks._LOCKED_FDS else 0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert len(keys_of(store, "child/")) == 8


def test_a_probe_does_not_look_like_a_lock(store, root):
    store.put("a", b"x")
    with (root / "a").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as another probe does at the same moment
        assert store.is_locked("a") is False


def test_a_file_system_without_locks(store, monkeypatch):
    def flock(fd, kind):
        raise OSError(errno.ENOSYS, "none")

    monkeypatch.setattr(fcntl, "flock", flock)
    store.lock("a", b"x")
    assert store.is_locked("a") is None
    (Path(store.url) / "tmp" / ("0" * 32)).write_bytes(b"x")
    assert store.clean() == 0
    store.release("a")
    assert store.is_locked("a") is False


def test_clean_removes_only_files_of_dead_processes(store):
    script = (
        "real = os.fsync\n"
        "def fsync(fd):\n"
        "    say('writing')\n"
        "    sys.stdin.readline()\n"
        "    os.fsync = real\n"
        "    real(fd)\n"
        "store.put(sys.argv[2] + '.before', b'')\n"
        "os.fsync = fsync\n"
        "store.put(sys.argv[2], b'x' * 1000)\n"
        "say('done')\n"
    )
    with python(script, store.url, "a/living") as living, python(script, store.url, "a/dead") as dead:
        assert told(living) == told(dead) == "writing"
        assert store.clean() == 0
        assert len(temps_of(store)) == 2
        dead.kill()
        dead.wait()
        assert store.clean() == 1000
        assert len(temps_of(store)) == 1
        living.stdin.write(b"go\n")
        living.stdin.flush()
        assert told(living) == "done"
    assert keys_of(store) == ["a/dead.before", "a/living", "a/living.before"]
    assert temps_of(store) == []
    assert store.clean() == 0


def test_killed_between_link_and_unlink(store, root):
    """`clean` removes the temporary name of an object. The object stays, so `clean` reports no freed bytes."""
    store.put("a", b"x" * 100)
    os.link(root / "a", root / "tmp" / ("0" * 32))
    assert store.clean() == 0
    assert temps_of(store) == []
    assert store.get("a") == b"x" * 100


def test_a_cleaner_that_is_faster_than_the_lock(store, monkeypatch):
    """The new file is unlinked before its writer has locked it: the writer takes another name."""
    real, seen = fcntl.flock, []

    def flock(fd, kind):
        if not seen:
            seen.append(path_of(fd))
            seen[0].unlink()
        return real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    assert len(seen) == 1


def test_a_cleaner_that_has_the_lock(store, monkeypatch):
    real, seen = fcntl.flock, []

    def flock(fd, kind):
        if not seen:
            seen.append(os.open(path_of(fd), os.O_RDWR))
            real(seen[0], kind)
        return real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    store.put("a", b"x")
    os.close(seen[0])
    assert len(temps_of(store)) == 1
    assert store.clean() == 0
    assert temps_of(store) == []


@pytest.mark.usefixtures("no_leak")
def test_locks_that_always_fail(store, monkeypatch):
    def flock(fd, kind):
        raise BlockingIOError(errno.EWOULDBLOCK, "taken")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StorageError, match="locked by another process"):
        store.put("a", b"x")


def test_cleaners_beside_writers(store):
    stop = threading.Event()
    failures = []

    def clean():
        while not stop.is_set():
            try:
                store.clean()
            except Exception as error:  # noqa: BLE001 - reported below
                failures.append(error)

    cleaners = [threading.Thread(target=clean) for _ in range(2)]
    for cleaner in cleaners:
        cleaner.start()
    try:
        for i in range(200):
            store.put(f"a/{i}", b"x" * 100)
    finally:
        stop.set()
        for cleaner in cleaners:
            cleaner.join()
    assert failures == []
    assert len(keys_of(store)) == 200
    assert all(store.get(f"a/{i}") == b"x" * 100 for i in range(200))


# --- open_store ---


def test_open_store_local(tmp_path, monkeypatch):
    path = tmp_path / "a b"
    with pytest.raises(NotFoundError, match="expected a directory, found none"):
        open_store(str(path))
    assert not path.exists()
    store = open_store(str(path / "deep" / "er"), create=True)
    store.put("a", b"x")
    monkeypatch.chdir(tmp_path)
    for url in (
        f"{path}/deep/er",
        f"{path}/deep/er/",
        "a b/deep/er",
        f"file://{path}/deep/er",
        f"file://{tmp_path}/a%20b/deep/er",
        f"FILE://localhost{path}/deep/er",
    ):
        opened = open_store(url)
        assert opened.get("a") == b"x"
        assert opened.url == str(path / "deep" / "er")
    assert open_store(str(path), create=True).url == str(path)


def test_open_store_memory():
    store = open_store("memory://test-open-store")
    assert isinstance(store, MemoryStore)
    assert open_store("memory://test-open-store", create=True) is store
    assert open_store("memory://other") is not store
    assert store.url == "memory://test-open-store"


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("s3://key:secret@bucket/prefix", InvalidInputError),
        ("gs://key:secret@bucket", InvalidInputError),
        ("https://user:secret@host/x", InvalidInputError),
        ("memory://", InvalidInputError),
        ("memory://a/b", InvalidInputError),
        ("file://otherhost/x", InvalidInputError),
        ("file://", InvalidInputError),
        ("", InvalidInputError),
        ("/a\0b", InvalidInputError),
        ("/etc/passwd", InvalidInputError),
        ("/etc/passwd/x", NotFoundError),
        ("/no/such/place", NotFoundError),
        ("/" + "x" * 300, StorageError),
    ],
)
def test_open_store_refuses(url, error):
    with pytest.raises(error) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        *((url, kind) for url in ("s3:bucket/x", "s3:b", "S3:/b", "file:x", "memory:x") for kind in (str, Path)),
        ("s3//secret@bucket/x", str),
        ("s3:key:secret@bucket/x", str),
        ("memory//x", str),
        *((f"{before}s3://bucket/x", str) for before in (" ", "\t", "\n", '"', "' ")),
        *((" file:///x", kind) for kind in (str, Path)),
        *((Path(url), Path) for url in ("gs://bucket/x", '"s3://bucket/x"')),
    ],
)
def test_a_mistyped_url_is_no_path(tmp_path, monkeypatch, url, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match=r"looks like a URL.*absolute path") as caught:
        open_store(kind(url), create=True)
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["s3", "s3/x", "files:x", "my-s3:x", "a/b:/x"])
def test_a_path_that_only_begins_like_a_url(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert open_store(name, create=True).url == str(tmp_path / name)
    assert open_store(tmp_path / "s3:x", create=True).url == str(tmp_path / "s3:x")


def test_create_over_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError):
            LocalStore(path, create=True)


# --- files that stay open ------------------------------------------------------------------------------------------


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def put_keys(store, count):
    keys = [f"packs/{i:02x}/{i:064x}" for i in range(count)]
    for i, key in enumerate(keys):
        store.put(key, bytes([i]) * 100)
    return keys


def filled(get_ranges, key, number, count=2):
    into = [memoryview(bytearray(5 + i)) for i in range(count)]
    get_ranges(key, [10 * i for i in range(count)], into)
    return all(bytes(one) == bytes([number]) * (5 + i) for i, one in enumerate(into))


def test_a_key_is_opened_once(store, monkeypatch):
    keys, opened, real = put_keys(store, 3), [], LocalStore._open_file
    monkeypatch.setattr(LocalStore, "_open_file", lambda self, key: opened.append(key) or real(self, key))
    before = open_files()
    with store.kept_open() as get_ranges:
        for _ in range(3):
            assert all(filled(get_ranges, key, i) for i, key in enumerate(keys))
        assert (sorted(opened), open_files()) == (keys, before + 3)
    assert open_files() == before


def test_only_a_few_stay_open(store, monkeypatch):
    monkeypatch.setattr(kept_open, "MOST_UNUSED", 4)
    keys, before, most = put_keys(store, 20), open_files(), [0]
    with store.kept_open() as get_ranges:

        def read(seed):
            for i in range(200):
                number = (7 * i + seed * i // 3) % 20
                assert filled(get_ranges, keys[number], number)
                most[0] = max(most[0], open_files())

        assert together([partial(read, seed) for seed in range(6)]) == [None] * 6
        assert open_files() <= before + 4
    assert open_files() == before
    assert most[0] <= before + 4 + 6 * 5  # plus files in use, the folders above them, and the listing


def test_files_are_opened_ahead_as_far_as_they_may_stay_open(store, monkeypatch):
    """A call without ranges opens a file only if it may stay open. Else the next files would close it before a read."""
    keys, before = put_keys(store, 20), open_files()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    with store.kept_open() as get_ranges:
        for key in keys:
            get_ranges(key, [], [])
        assert open_files() == before + 8
        assert all(filled(get_ranges, key, i) for i, key in enumerate(keys))
        assert open_files() == before + 8
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    with store.kept_open() as get_ranges:
        for key in keys:
            get_ranges(key, [], [])
        assert open_files() == before + 20
    assert open_files() == before


def test_too_many_open_files_close_what_nobody_reads(store, monkeypatch):
    keys, real, most = put_keys(store, 12), LocalStore._open_file, open_files() + 5

    def limited(self, key):
        if open_files() >= most:
            try:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            except OSError as error:
                raise StorageError("too many open files") from error
        return real(self, key)

    monkeypatch.setattr(LocalStore, "_open_file", limited)
    with store.kept_open() as get_ranges:
        assert all(filled(get_ranges, key, i) for i, key in enumerate(keys))
        most = 0
        with pytest.raises(StorageError, match="too many open files"):
            filled(get_ranges, keys[0], 0)


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_another_host_has_deleted(store, monkeypatch, again):
    """The next read of the open file fails with ESTALE. Then the key is opened again: it has another file, or none."""
    (key,), before, stale, real = put_keys(store, 1), open_files(), set(), os.preadv

    def preadv(fd, buffers, offset):
        if os.fstat(fd).st_ino in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        used.add(os.fstat(fd).st_ino)
        return real(fd, buffers, offset)

    used = set()
    monkeypatch.setattr(os, "preadv", preadv)
    with store.kept_open() as get_ranges:
        assert filled(get_ranges, key, 0)
        stale |= used
        store.delete([key])
        if again:
            store.put(key, bytes([7]) * 100)
            assert filled(get_ranges, key, 7)
        else:
            with pytest.raises(NotFoundError):
                filled(get_ranges, key, 0)
    assert open_files() == before


def test_a_file_that_is_read_while_all_are_closed(store):
    (key,), before = put_keys(store, 1), open_files()
    with store.kept_open() as get_ranges:
        files = get_ranges.__self__
        real, open_then = files._read_range, []

        def read_range(*args):
            files.close()
            open_then.append(open_files())
            return real(*args)

        files._read_range = read_range
        assert filled(get_ranges, key, 0, 1)
        assert (open_then, open_files()) == ([before + 1], before)


def test_a_file_that_fails_is_closed_at_the_end(store):
    keys, before = put_keys(store, 2), open_files()
    with store.kept_open() as get_ranges:
        with pytest.raises(IntegrityError):
            get_ranges(keys[0], [90], [memoryview(bytearray(11))])
        with pytest.raises(NotFoundError):
            filled(get_ranges, "packs/aa/missing", 0)
        assert filled(get_ranges, keys[1], 1)
    assert open_files() == before


def test_a_folder_that_another_process_makes_meanwhile(root, monkeypatch):
    """`open_store` accepts a folder that does not exist at its first look but exists at the second."""
    real, looks = Path.is_dir, []

    def is_dir(self):
        if self == root:
            looks.append(self)
            if len(looks) == 1:
                LocalStore(root, create=True)
                return False
        return real(self)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert open_store(str(root)).url == str(root)
    assert len(looks) > 1


def test_two_processes_make_a_repository_at_once(tmp_path):
    """The other process is first: its config appears after this process has looked for one."""

    class Late(LocalStore):
        def prepare(self):
            Repository.create(tmp_path / "repo").close()
            super().prepare()

    (tmp_path / "repo").mkdir()
    with Repository.open_or_create(Late(tmp_path / "repo")) as repository:
        assert repository.save({"a": 1}, run="r", step=0).state == "committed"


def test_trials_that_a_killed_doctor_left_are_no_content_and_the_next_trial_removes_old_ones(root, tmp_path):
    with Repository.create(root) as repository:
        store, kept = repository.store, tmp_path / "kept"
        kept.mkdir()
        old, new, link, other = (root / f".snapstore-trial-{name}" for name in ("old", "new", "link", "a.b"))
        for folder in (old, new, other):
            (folder / "probe").mkdir(parents=True)
            (folder / "probe" / "rate").write_bytes(b"x")
        link.symlink_to(kept)
        for path in (old, link, other, kept):
            os.utime(path, (1, 1), follow_symlinks=False)
        with store.sandbox() as trial:
            assert trial.root.is_dir()
            assert not old.exists()
        assert {path.name for path in root.glob(".*")} == {new.name, link.name, other.name}
        assert kept.is_dir()
    place = tmp_path / "place"
    (place / new.name / "probe").mkdir(parents=True)
    Repository.create(place).close()


def test_an_error_about_the_folder_itself_names_only_the_folder(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(StorageError) as caught, LocalStore(file).sandbox():
        pass
    assert str(caught.value).startswith(f"{file}: cannot write")


def _interrupt_release(path, line):
    """Take and release a lock; raise KeyboardInterrupt before line number `line` that its release runs.

    Returns whether the release had so many lines.
    """
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code is not locks._close.__code__:  # CPython raises an interrupt in called functions
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    try:
        with locks.locked(path, 0):
            sys.settrace(trace)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_while_a_lock_is_released_does_not_keep_it(tmp_path):
    """Else each later use of the index in this process would wait for it, and those of other processes too."""
    line, before = 1, set(locks._LOCKED_FDS)
    while _interrupt_release(tmp_path / "lock", line):
        assert before == locks._LOCKED_FDS
        line += 1
    assert line > 4


# --- empty folders


def folders_of(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir() and path.name != "tmp")


def test_a_delete_removes_the_folder_that_it_leaves_empty(store, root):
    for key in ("packs/ab/1", "packs/ab/2", "packs/cd/1", "snapshots/a/1.0", "gc/1.mark"):
        store.put(key, b"x")
    store.delete(["packs/ab/1", "packs/cd/1", "gc/1.mark", "snapshots/a/1.0", "snapshots/b/1.0"])
    assert folders_of(root) == ["gc", "packs", "packs/ab", "snapshots"]
    store.put("packs/cd/1", b"again")
    assert store.get("packs/cd/1") == b"again"
    (root / "packs/cd/foreign").write_bytes(b"of another program")
    store.delete(["packs/cd/1"])
    assert (root / "packs/cd/foreign").exists()


def test_puts_and_deletes_in_one_folder_at_the_same_time(store, root):
    """The folder goes and comes again and again between the steps of the puts."""
    ends, lost = threading.Event(), []

    def collect():
        other = LocalStore(root)
        while not ends.is_set():
            other.delete([key for key in keys_of(other, "packs/") if key.endswith("-old")])

    def put(number):
        writer = LocalStore(root)
        for count in range(100):
            writer.put(f"packs/ab/{number}-{count}-old", b"x")
            if count % 10 == 0:
                writer.put(f"packs/ab/{number}-{count}", b"y")
                lost.extend([] if writer.get(f"packs/ab/{number}-{count}") == b"y" else [count])
                writer.delete([f"packs/ab/{number}-{count}"])

    collectors = [threading.Thread(target=collect) for _ in range(2)]
    writers = [threading.Thread(target=put, args=(number,)) for number in range(2)]
    try:
        for thread in (*collectors, *writers):
            thread.start()
        for thread in writers:
            thread.join(300)
    finally:
        ends.set()
    for thread in collectors:
        thread.join(300)
    assert not lost
    store.put("packs/ab/last", b"z")
    store.delete(key for key in keys_of(store, "packs/") if not key.endswith("last"))
    assert keys_of(store, "packs/") == ["packs/ab/last"]


def test_a_put_makes_its_folder_again(store, root, monkeypatch):
    """A gc removes it between any two steps of the put; if it never stops, that is an error."""
    real, left = os.link, 3

    def link(*names, **options):
        nonlocal left
        if left:
            left -= 1
            (root / "packs/ab").rmdir()
        real(*names, **options)

    monkeypatch.setattr(os, "link", link)
    store.put("packs/ab/1", b"x")
    assert store.get("packs/ab/1") == b"x"
    left = 100
    store.delete(["packs/ab/1"])
    with pytest.raises(StorageError, match="packs/ab/2"):
        store.put("packs/ab/2", b"x")
    assert temps_of(store) == []
    assert 90 < left < 100, "it gives up"


def test_a_folder_that_has_the_inode_of_a_removed_one_is_made_durable(store, root):
    """Another process has made it again, and has not synced the folder above yet."""
    store.put("packs/ab/1", b"x")
    store.delete(["packs/ab/1"])
    (root / "packs/ab").mkdir()
    status = (root / "packs/ab").stat()
    store._writer._durable["packs/ab"] = (status.st_dev, status.st_ino)  # as if it were the same number
    recorder = power.Recorder(root)
    with recorder.recording():
        store.put("packs/ab/2", b"y")
    disk = power.Disk()
    for event in [("mkdir", "packs", None), ("sync names", "", None), ("mkdir", "packs/ab", None), *recorder.events]:
        disk.apply(event)
    assert disk.left(lambda values: values[0])["packs/ab/2"] == b"y"
    with recorder.recording():
        before = len(recorder.events)
        store.put("packs/ab/3", b"y")
    assert ("sync names", "packs", None) not in recorder.events[before:], "a folder with a file is durable"


def test_no_free_inodes_is_what_the_error_says(mount):
    store = LocalStore(mount("nr_inodes=8"))
    assert "no free inodes (ENOSPC): " in fill(store, b"")
    store.delete(keys_of(store))
    store.put("a/again", b"x")
