"""When the disk is full at any file of a save, training goes on, nothing is lost, and gc frees space."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kit.samples import sampled
from kit.tally import tally
from snapstore import KeepLast, Repository, SaveOptions, SnapshotManager, StorageFullError
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

PAGE = 4096
#: Pages that a forget and a gc write before they delete.
WORDS_PAGES = 16
OPTIONS = SaveOptions(pack_bytes=16 * 1024, threads=1)


@pytest.fixture
def disk(tmp_path):
    """A tmpfs of 16 MB; skips where mounting is not allowed."""
    point = tmp_path / "disk"
    point.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(point)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    yield point
    subprocess.run(["umount", "--lazy", str(point)], check=True)


def state_of(version: int) -> dict[str, torch.Tensor]:
    """Return a state that is all new at every version, and that takes several packs."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(4000, generator=generator) for name in ("w", "m", "v")}


def leave(disk: Path, pages: int) -> None:
    """Fill the disk but for some pages."""
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(PAGE)):
            pass
    release(disk, pages)


def release(disk: Path, pages: int) -> None:
    """Free some pages of the file that fills the disk."""
    with (disk / "ballast").open("r+b") as file:
        file.truncate(max(0, (disk / "ballast").stat().st_size - pages * PAGE))


def whole(url: Path) -> set[int]:
    """Restore and compare every committed snapshot; return their steps."""
    with Repository.open(url, options=OPTIONS) as repository:
        steps = set()
        for snapshot in repository.snapshots():
            got, wanted = repository.restore(f"id:{snapshot.id}"), state_of(snapshot.step)
            assert all(torch.equal(got[name], wanted[name]) for name in wanted), snapshot.ref
            steps.add(snapshot.step)
        assert repository.check("restore").ok
        return steps


def saved(snapshots: SnapshotManager, step: int) -> bool:
    """Return whether a save commits. If it runs in the background, the next call raises its error."""
    try:
        snapshots.save(step, state_of(step))
        snapshots.wait_until_finished()
    except StorageFullError:
        return False
    return True


def collected(url: Path, disk: Path) -> set[int]:
    """Forget the oldest snapshot on the full disk and collect it; return the steps that are gone."""
    with Repository.open(url, options=OPTIONS) as repository:
        oldest, *rest = sorted(repository.snapshots(), key=lambda s: s.step)
        if not rest:
            return set()
        before = free_pages(disk)
        if before < WORDS_PAGES:
            release(disk, WORDS_PAGES - before)
            before = WORDS_PAGES
        repository.forget_snapshots([oldest.ref])
        repository.gc()
        assert free_pages(disk) > before
        return {oldest.step} - {s.step for s in repository.snapshots()}


def free_pages(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize // PAGE


@pytest.mark.parametrize("background", [True, False])
def test_at_every_page_of_a_save(disk, background):
    url = disk / "repository"
    with SnapshotManager(url, run="r", async_save=background, options=OPTIONS) as snapshots:
        for step in range(2):
            snapshots.save(step, state_of(step))
        snapshots.wait_until_finished()
    before = sum(file.stat().st_blocks * 512 for file in url.rglob("*") if file.is_file())
    save_pages = before // 2 // PAGE + 8
    step, failed = 2, 0
    for pages in sampled(save_pages, 5):
        known = whole(url)
        leave(disk, pages)
        tally("full disks")
        with SnapshotManager(url, run="r", async_save=background, options=OPTIONS) as snapshots:
            fits = saved(snapshots, step)
            failed += not fits
            assert whole(url) == known | ({step} if fits else set()), pages
            known -= collected(url, disk)
            (disk / "ballast").unlink()
            snapshots.save(step + 2, state_of(step + 2)).result()
        assert whole(url) == known | ({step} if fits else set()) | {step + 2}
        step += 3
        with Repository.open(url, options=OPTIONS) as repository:
            repository.gc()
            assert repository.stats().unneeded_bytes == 0
    assert failed, "the disk was never full"


def test_not_one_free_block(disk):
    """Forget and gc write a few kilobytes before they delete: their error says so, and with these they free space."""
    url = disk / "repository"
    with Repository.create(url, options=OPTIONS) as repository:
        for step in range(4):
            repository.save(state_of(step), run="r", step=step)
        leave(disk, 0)
        while free_pages(disk):  # opening a file takes a block and frees it again
            leave(disk, 0)
        for verb in (lambda: repository.forget([KeepLast(1)], run="r"), lambda: repository.forget_snapshots(["r@0"])):
            with pytest.raises(StorageFullError, match="a few kilobytes before they delete: free a few kilobytes"):
                verb()
        assert whole(url) == {0, 1, 2, 3}
        release(disk, WORDS_PAGES)
        assert len(repository.forget([KeepLast(1)], run="r").forgotten) == 3
        assert repository.gc().deleted_objects >= 3
        assert free_pages(disk) > 10
        (disk / "ballast").unlink()
        repository.save(state_of(9), run="r", step=9)
    assert whole(url) == {3, 9}


def test_a_mark_that_landed_on_a_full_disk_is_gone_on_with(tmp_path, monkeypatch):
    """The file of the mark is there, but its folder could not be synced: the next gc works."""
    url = tmp_path / "repository"
    with Repository.create(url, options=OPTIONS) as repository:
        for step in range(3):
            repository.save(state_of(step), run="r", step=step)
        repository.forget([KeepLast(1)], run="r")
        put = LocalStore.put

        def full(self, key, data):
            put(self, key, data)
            if key.endswith(".mark"):
                raise StorageFullError("no space is left (injected)")

        monkeypatch.setattr(LocalStore, "put", full)
        with pytest.raises(StorageFullError, match="free a few kilobytes"):
            repository.gc()
        monkeypatch.undo()
        assert repository.gc().deleted_objects
    assert whole(url) == {2}


class _Late(MemoryStore):
    """The first put of a record is ended by Ctrl-C, and stored later; then there is no space for other records."""

    record: tuple[str, bytes] | None = None

    def put(self, key, data):
        if not key.startswith("snapshots/"):
            super().put(key, data)
        elif self.record is None:
            self.record = key, bytes(data)
            raise KeyboardInterrupt
        else:
            raise StorageFullError("no space is left (injected)")


def test_a_record_that_may_still_be_stored_keeps_its_packs():
    """The store has said "full" to another put, so this says nothing about the first one."""
    store = _Late()
    with Repository.create(store, options=OPTIONS) as repository, pytest.raises(KeyboardInterrupt):
        repository.save(state_of(0), run="r", step=0)
    assert [info.key for info in store.list("packs/")]
    MemoryStore.put(store, *store.record)
    with Repository.open(store) as repository:
        assert [s.ref for s in repository.snapshots()] == ["r@0"]
        assert repository.check("restore").ok
