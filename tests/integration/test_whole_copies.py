"""Copies of a whole repository, file by file, while a process saves, sweeps and joins; and backups that are put back.

docs/guides/recovery.md ("A copy of the files") says what was tried here. Between any two files of a copy a save runs
to its end: it forgets and sweeps a snapshot, and each third save joins records.
"""

from __future__ import annotations

import random
import shutil
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from kit.repositories import same
from kit.samples import SEED
from kit.shell import invoke
from snapstore import IntegrityError, KeepEvery, KeepLast, Repository, SnapshotManager, SnapstoreError
from snapstore.protocol import joining

KEEP = (KeepLast(3), KeepEvery(4))
FOLDERS = ("snapshots", "volumes", "pages", "")  # the order that is safe; "": all others


@pytest.fixture(autouse=True)
def _few(monkeypatch, tmp_path):
    monkeypatch.setattr(joining, "AT_LEAST", 3)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))


@contextmanager
def elsewhere(tmp_path, monkeypatch, name="other"):
    """Act as another machine, with an index of its own."""
    with monkeypatch.context() as patch:
        patch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / name))
        yield


def state(step):
    noise = np.random.default_rng(step).integers(0, 255, 3000, np.uint8)
    return {"noise": noise, "constant": np.arange(3000), "step": step}


class Job:
    """A job that saves one step after the other into a run."""

    def __init__(self, root, first=0, count=0):
        self.root, self.step = root, first
        self._snapshots = SnapshotManager(root, run="a", keep=KEEP, async_save=False)
        self.save(count)

    def save(self, count=1):
        for _ in range(count):
            self._snapshots.save(self.step, state(self.step))
            self.step += 1

    def close(self):
        self._snapshots.close()
        return self


def files(root, under=""):
    return sorted(str(file.relative_to(root)) for file in (root / under).rglob("*") if file.is_file())


def copy_file(root, to, name):
    """Copy a file; as `cp -r` and rsync, go on without one that has vanished."""
    (to / name).parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        shutil.copy2(root / name, to / name)


def copy_in_order(root, to, order, between=lambda: None):
    """Copy all files that are there at the beginning."""
    names = files(root)
    if order == "reverse":
        names.reverse()
    elif order == "random":
        random.Random(SEED).shuffle(names)
    for name in names:
        copy_file(root, to, name)
        between()


def copy_by_folders(root, to, between=lambda: None):
    """Copy one folder after the other, each as it is then."""
    for folder in FOLDERS:
        for name in files(root, folder):
            if folder or name.partition("/")[0] not in FOLDERS:
                copy_file(root, to, name)
                between()


def copy_again(root, to):
    """Make a copy equal, as `rsync -a --delete` does."""
    copy_in_order(root, to, "sorted")
    for name in {*files(to)} - {*files(root)}:
        (to / name).unlink()


def committed(root):
    with Repository.open(root) as repository:
        return {s.step for s in repository.snapshots()}


def restored(root):
    """Return the steps that restore, each compared with what was saved."""
    with Repository.open(root) as repository:
        found = set()
        for snapshot in repository.snapshots():
            try:
                got = repository.restore(f"id:{snapshot.id}")
            except SnapstoreError:
                continue
            assert same(got, state(snapshot.step)), snapshot.ref
            found.add(snapshot.step)
        return found


def is_clean(root):
    with Repository.open(root) as repository:
        report = repository.check("restore")
        return report.ok


def check_goes_on(root, step):
    """Check that a repository takes saves, sweeps and joins as any other."""
    Job(root, step, 12).close()
    with Repository.open(root) as repository:
        repository.gc()
        assert repository.check("restore").ok
        assert repository.stats().unneeded_bytes == 0
    assert restored(root) >= {step + 9, step + 10, step + 11}


@pytest.mark.parametrize("order", ["sorted", "reverse", "random"])
def test_a_copy_in_any_order_is_told_from_a_whole_one(tmp_path, monkeypatch, order):
    """It may lack records that were joined meanwhile. Nothing restores as another state, and check names the loss."""
    root, to = tmp_path / "repository", tmp_path / "copy"
    job = Job(root, count=21)
    before = committed(root)
    copy_in_order(root, to, order, job.save)
    kept = before & committed(root)
    assert kept >= {0, 4, 8, 12, 16}
    with elsewhere(tmp_path, monkeypatch):
        found = restored(to)
        assert is_clean(to) == (found == committed(to) and found >= kept), (found, kept)
        if not is_clean(to):
            with Repository.open(to) as repository, pytest.raises(IntegrityError, match="nothing was deleted"):
                repository.gc()
            with Repository.open(to) as repository:
                repository.repair(apply=True)
            assert restored(to) >= found  # a repair loses nothing that was whole
    job.close()
    copy_again(root, to)
    with elsewhere(tmp_path, monkeypatch, "third"):
        assert restored(to) == committed(to) == committed(root)
        assert is_clean(to)
        check_goes_on(to, job.step)


def test_the_safe_order_has_all_that_was_kept_meanwhile(tmp_path, monkeypatch):
    """Records are listed before pages, as readers do; volumes before the pages of which they are copies; then bytes.

    So each record is in the copy, loose or in a page, and so are the bytes of each one that nobody has swept.
    """
    root, to = tmp_path / "repository", tmp_path / "copy"
    job = Job(root, count=21)
    before = committed(root)
    copy_by_folders(root, to, job.save)
    kept = before & committed(root)
    with elsewhere(tmp_path, monkeypatch):
        assert restored(to) >= kept >= {0, 4, 8, 12, 16, 20}
        run(to, "repair", "--apply", "--drop")
        run(to, "gc", "--unexplained")
        assert is_clean(to)
        assert restored(to) == committed(to) >= kept
        check_goes_on(to, job.step)
    assert is_clean(job.close().root)


@pytest.mark.parametrize("lost", ["volumes", "pages/a/0000000/03"])
def test_a_copy_lacks_volumes_or_a_page(tmp_path, monkeypatch, lost):
    root, to = tmp_path / "repository", tmp_path / "copy"
    job = Job(root, count=21).close()
    shutil.copytree(root, to, ignore=lambda folder, names: [n for n in names if f"{folder}/{n}" == f"{root}/{lost}"])
    with elsewhere(tmp_path, monkeypatch):
        assert restored(to) == committed(root)
        assert is_clean(to) == (lost == "volumes")
        if not is_clean(to):
            assert f"{lost}: is gone: a later page or a volume shows that it was there" in run(to, "check")
            run(to, "repair", "--apply")
        assert is_clean(to)
        check_goes_on(to, job.step)
        assert files(to, "volumes")


def run(root, *args):
    """Run a command of the shell; return what it prints."""
    return invoke([*args, "--repo", str(root)]).output


# --- a backup that is put back ---------------------------------------------------------------------------------------


@pytest.fixture
def backed_up(tmp_path):
    """Return (a repository of 45 saves, a backup of it as it was after 21)."""
    root, backup = tmp_path / "repository", tmp_path / "backup"
    Job(root, count=21).close()
    shutil.copytree(root, backup)
    Job(root, 21, 24).close()
    return root, backup


def put_back(root, backup):
    shutil.rmtree(root)
    shutil.copytree(backup, root)


def test_in_place_of_the_repository(backed_up):
    """The index of this machine knows later records and pages: nothing is forgotten or deleted until it is told."""
    root, backup = backed_up
    put_back(root, backup)
    before = files(root)
    told = run(root, "check")
    assert "pages/a/0000000/07: is gone" in told
    assert "snapstore index rebuild --forget-missing" in told
    assert "is gone" in run(root, "gc")
    assert "whose record is gone" in run(root, "restore", "a@latest", "-o", str(root.parent / "out.pt"))
    assert "gone from the store" in run(root, "log")
    assert "would drop" in run(root, "index", "rebuild")
    assert files(root) == before
    assert "rebuilt the index: 21 snapshots" in run(root, "index", "rebuild", "--forget-missing")
    assert is_clean(root)
    assert restored(root) == committed(root) == committed(backup)
    check_goes_on(root, 21)


def test_in_place_and_another_machine_goes_on(backed_up, tmp_path, monkeypatch):
    """It gives numbers of pages a second time. This machine notices: it reads them, and deletes nothing."""
    root, backup = backed_up
    put_back(root, backup)
    with elsewhere(tmp_path, monkeypatch):
        assert is_clean(root)
        check_goes_on(root, 21)
        Job(root, 33, 6).close()
        expected = restored(root)
    before = files(root)
    assert "is gone" in run(root, "gc")
    assert "is gone" in run(root, "check")
    assert files(root) == before
    run(root, "index", "rebuild", "--forget-missing")
    assert is_clean(root)
    assert restored(root) == expected
    check_goes_on(root, 39)


def test_over_the_repository(backed_up):
    """Files of the backup beside later ones: its records are void, and the next gc deletes its bytes."""
    root, backup = backed_up
    expected = committed(root)
    shutil.copytree(backup, root, dirs_exist_ok=True)
    assert is_clean(root)
    assert restored(root) == committed(root) == expected
    check_goes_on(root, 45)


def test_into_a_new_place(backed_up, tmp_path):
    """It has an index of its own, also on this machine: nothing is missing."""
    root, backup = backed_up
    new = tmp_path / "new"
    shutil.copytree(backup, new)
    assert is_clean(new)
    assert restored(new) == committed(new)
    check_goes_on(new, 21)
    assert is_clean(root)


def test_a_mirror_of_a_store_that_was_put_back(tmp_path, monkeypatch):
    """The first store is an older backup without an index; the mirror has joined later records. It gives them back."""
    root, mirror, backup = tmp_path / "repository", tmp_path / "mirror", tmp_path / "backup"

    def saved(first, count):
        with SnapshotManager(root, run="a", keep=KEEP, mirror=mirror, async_save=False) as snapshots:
            for step in range(first, first + count):
                snapshots.save(step, state(step))
                assert snapshots.wait_until_mirrored() == []
            return snapshots.latest_step()

    saved(0, 13)
    shutil.copytree(root, backup)
    saved(13, 12)
    put_back(root, backup)
    with elsewhere(tmp_path, monkeypatch):
        with SnapshotManager(root, run="a", keep=KEEP, mirror=mirror, async_save=False) as snapshots:
            assert snapshots.latest_step() == 24
            got = state(0)
            assert snapshots.restore_into(got).step == 24
            assert same(got, state(24))
        assert saved(25, 12) == 36
        for store in (root, mirror):
            assert is_clean(store)
            assert restored(store) == committed(store) >= {34, 35, 36}
