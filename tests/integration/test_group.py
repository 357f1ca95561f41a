"""Users of a group share a local repository: each can use and delete the files of another, whatever their umasks."""

from __future__ import annotations

import os
import tempfile
import threading
import traceback
from pathlib import Path

import pytest

from kit.repositories import OPTIONS, opened, save
from snapstore import KeepLast, Repository
from snapstore.storage.local import LocalStore

GROUP, FIRST, SECOND = 2001, 1001, 1002  # ids that no user or group has
UMASKS = (0o002, 0o022, 0o077)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")


def every_verb(root, run, first=0):
    """Save, tag, forget, collect, rewrite, check and repair."""
    with opened(root) as repository:
        for step in range(first, first + 3):
            save(repository, run, step, step)
        repository.tag(f"{run}@{first}", "kept")
        repository.untag(f"{run}@{first}", "kept")
        repository.forget([KeepLast(1)], run=run)
        repository.set_policies(run, [KeepLast(2)])
        repository.gc()
        repository.compact()
        assert repository.repair(apply=True).ok
        assert repository.check("restore").ok


def dying_save(root):
    """Die after the first pack; leave a temporary file."""
    put, one_at_a_time = LocalStore.put, threading.Lock()

    def die(self, key, data):
        with one_at_a_time:  # so no other thread dies between making its temporary file and sharing it
            put(self, key, data)
            if key.startswith("packs/"):
                os.link(root / key, root / "tmp" / ("0" * 32))
                os._exit(0)

    LocalStore.put = die
    with opened(root) as repository:
        save(repository, "dead", 0, 0)


def as_user(uid, umask, folder, function, *args):
    """Call a function in a child process of a user whose second group is `GROUP`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([GROUP])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(umask)
            os.environ["SNAPSTORE_CACHE_DIR"] = str(folder / f"cache-{uid}")
            function(*args)
            code = 0
        except BaseException:  # noqa: BLE001  the parent looks at the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (uid, function)


@pytest.fixture
def folder(tmp_path):
    """A folder that every user can reach; pytest makes its own folders private to its user."""
    every_verb_once = tmp_path / "imports"  # imports the modules that these users cannot read
    Repository.create(every_verb_once, chunk_bytes=1024, options=OPTIONS).close()
    every_verb(every_verb_once, "a")
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o777)
        yield Path(made)


def shared(folder, name="shared"):
    """Make a folder as an administrator makes it for a group."""
    found = folder / name
    found.mkdir()
    os.chown(found, FIRST, GROUP)
    found.chmod(0o2775)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", UMASKS)
@pytest.mark.parametrize("second", UMASKS)
def test_two_users_of_a_group(folder, first, second):
    """One creates the repository; each fences the dead save of the other, and forgets and collects its snapshots."""
    root = shared(folder) / "repository"

    def create():
        Repository.create(root, chunk_bytes=1024, options=OPTIONS).close()
        every_verb(root, "one")

    def collect():
        with opened(root) as repository:
            assert len(repository.gc().fenced) == 1
            assert list((root / "tmp").iterdir()) == []
            repository.forget_snapshots([s.ref for s in repository.snapshots()], force=True)
            assert repository.gc().deleted_objects
        every_verb(root, "two")
        every_verb(root, "one", first=10)

    as_user(FIRST, first, folder, create)
    as_user(FIRST, first, folder, dying_save, root)
    as_user(SECOND, second, folder, collect)
    as_user(SECOND, second, folder, dying_save, root)
    as_user(FIRST, first, folder, collect)


def test_a_temporary_file_that_was_not_shared_yet(folder):
    """Its writer died between making and sharing it: gc works for another member, and removes it for the writer."""
    root = shared(folder) / "repository"
    left = root / "tmp" / ("1" * 32)

    def create():
        Repository.create(root, chunk_bytes=1024, options=OPTIONS).close()
        every_verb(root, "one")
        left.write_bytes(b"half an object")
        left.chmod(0o600)

    def collect(remains):
        with opened(root) as repository:
            repository.gc()
        assert left.exists() is remains

    as_user(FIRST, 0o022, folder, create)
    as_user(SECOND, 0o022, folder, collect, True)
    as_user(FIRST, 0o022, folder, collect, False)


@pytest.mark.parametrize("umask", UMASKS)
def test_modes(folder, umask):
    """The umask decides the modes, except in a setgid folder that its group may write."""

    def create(root):
        Repository.create(root, chunk_bytes=1024, options=OPTIONS).close()
        every_verb(root, "a")

    def modes(root):
        found = [root, *root.rglob("*")]
        assert len(found) > 20
        return {path.stat().st_mode & 0o7777 for path in found}, {path.stat().st_gid for path in found}

    as_user(FIRST, umask, folder, create, shared(folder) / "repository")
    for_all = 0o2777 & ~umask | 0o070, 0o666 & ~umask | 0o060
    assert modes(folder / "shared" / "repository") == (set(for_all), {GROUP})
    as_user(FIRST, umask, folder, create, folder / "own")
    assert modes(folder / "own") == ({0o777 & ~umask, 0o666 & ~umask}, {FIRST})
