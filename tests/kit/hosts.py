"""The programs of the hosts in test_s3_hosts.py, each a process without torch: `python -m kit.hosts writer URL RUN`.

States are numpy arrays and a pure function of (run, version), as those of repositories.py are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from snapstore import KeepLast, Repository, SaveOptions, Snapshot
from snapstore.storage.s3.store import S3Store

OPTIONS = SaveOptions(pack_bytes=4096, threads=1)


def values(run: str, version: int) -> dict[str, Any]:
    """Return the state of a version: an array that drifts, one all new, small ones."""
    drift = np.random.default_rng(sum(run.encode())).standard_normal(2048).astype(np.float32)
    drift[:: 64 + version % 3] += np.float32(version) / 1000
    noise = np.random.default_rng(version).integers(0, 255, 4096, np.uint8)
    return {"model": {"drift": drift, "bias": np.arange(5) + version}, "noise": noise, "version": version}


def save(repository: Repository, run: str, version: int, parent: str | None = None) -> Snapshot:
    """Save a version at its step."""
    return repository.save(values(run, version), run=run, step=version, parent=parent, metadata=[run, version])


def writer(url: str, run: str) -> None:
    """Save six snapshots, and forget three of them."""
    with Repository.open(url, options=OPTIONS) as repository:
        for step in range(6):
            save(repository, run, step)
            if step % 3 == 2:
                repository.forget([KeepLast(3)], run=run)


def collector(url: str, log: str) -> None:
    """Run gc after gc; append a line to the log for each."""
    with Repository.open(url) as repository:
        while True:
            result = repository.gc()
            with Path(log).open("a") as file:
                print(result.deleted_objects, file=file)


def killed(url: str) -> None:
    """Begin a save, and end the process after its first pack."""
    put = S3Store.put

    def die(self, key, data):
        put(self, key, data)
        if key.startswith("packs/"):
            os._exit(9)

    S3Store.put = die
    save(Repository.open(url, options=OPTIONS), "a", 5)


if __name__ == "__main__":
    {"writer": writer, "collector": collector, "killed": killed}[sys.argv[1]](*sys.argv[2:])
    assert "torch" not in sys.modules
