"""On a volume with few inodes a run under a policy goes on for ever: joins keep the count of its files bounded."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

import numpy as np
import pytest

from kit.samples import THOROUGH
from snapstore import KeepLast, Repository, SnapshotManager, StorageFullError
from snapstore.protocol import joining

#: Inodes of the volume, and saves. Without pages 400 inodes last for about 125 saves, and 1,000 for about 325.
INODES, SAVES = (1000, 2000) if THOROUGH else (400, 500)


@pytest.fixture
def volume(tmp_path):
    """A tmpfs of few inodes; skips where mounting is not allowed."""
    point = tmp_path / "volume"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size=64m,nr_inodes={INODES}", "tmpfs", str(point)]
    if (done := subprocess.run(command, capture_output=True)).returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    yield point
    subprocess.run(["umount", "--lazy", str(point)], check=True)


def free(volume):
    return os.statvfs(volume).f_ffree


def loose(url):
    return [*(url / "snapshots" / "r").iterdir()]


def leave(volume, count):
    """Take all inodes but some."""
    folder = volume / "ballast"
    folder.mkdir(exist_ok=True)
    number = len([*folder.iterdir()])
    with suppress(OSError):
        while free(volume) > count:
            (folder / str(number)).touch()
            number += 1


def saved(url, first, count):
    """Save some steps under KeepLast(2)."""
    with SnapshotManager(url, run="r", keep=[KeepLast(2)], async_save=False) as snapshots:
        for step in range(first, first + count):
            snapshots.save(step, {"w": np.full(4, step)})


def check_last(url, *steps):
    """Check that these snapshots are kept and restore, and that a gc leaves nothing that is not needed."""
    with Repository.open(url) as repository:
        repository.gc()
        assert [s.step for s in repository.snapshots()] == [*steps]
        assert [repository.restore(f"r@{step}")["w"].tolist() for step in steps] == [[step] * 4 for step in steps]
        assert repository.check("restore").ok
        assert repository.stats().unneeded_bytes == 0


def test_a_run_goes_on_for_ever(volume):
    """Each save leaves two to three records. They filled this volume after a fourth of the saves."""
    url = volume / "repository"
    saved(url, 0, SAVES // 2)
    half = free(volume)
    saved(url, SAVES // 2, SAVES - SAVES // 2)
    check_last(url, SAVES - 2, SAVES - 1)
    assert len(loose(url)) < joining.AT_LEAST * 4  # three records of each snapshot since the last join
    assert free(volume) > half - joining.AT_LEAST * 4


@pytest.mark.parametrize("left", [0, 4, 8, 12, 16])
def test_a_gc_joins_on_a_volume_that_was_full(volume, monkeypatch, left):
    """A join needs some inodes for its page and its volume. Once a gc has them, it frees all that records took."""
    url = volume / "repository"
    with monkeypatch.context() as patch:
        patch.setattr(joining, "AT_LEAST", 1 << 30)
        saved(url, 0, 80)
    assert len(loose(url)) > 200
    leave(volume, left)
    with suppress(StorageFullError), SnapshotManager(url, run="r", keep=[KeepLast(2)], async_save=False) as snapshots:
        snapshots.save(80, {"w": np.full(4, 80)})
    for file in [*(volume / "ballast").iterdir()][:16]:
        file.unlink()
    with Repository.open(url) as repository:
        steps = [s.step for s in repository.snapshots()]
        assert {*steps} >= {79, 80} or {*steps} >= {78, 79}
        repository.gc()
    assert len(loose(url)) < 8
    saved(url, 81, 80)
    check_last(url, 159, 160)
