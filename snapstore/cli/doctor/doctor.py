"""Test this machine, and a place for a repository.

In: a URL. Out: findings; nothing is raised. The probes (probes.py) run in a hidden store inside the place, which no
listing shows: a repository there is not disturbed, and nothing stays behind.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...engine.cpu import default_threads
from ...engine.spans import engine_in_use
from ...errors import NotFoundError, SnapstoreError
from ...format import records
from ...repository import Repository
from ...storage.base import ObjectStore
from ...storage.cache_dir import mount_of, on_network, usable_cache
from ...storage.local import LocalStore
from ...storage.os_errors import inodes
from ...storage.urls import local_path, open_store
from ...text import counted, human_bytes
from .probes import PROBES, Unfit

LIBRARIES = ("boto3", "numpy", "lmdb", "msgspec", "xxhash", "zstandard", "torch", "safetensors")
#: Less free space than this is a finding that fails [bytes].
LITTLE_SPACE_BYTES = 1024**3
#: Fewer free inodes than this are a finding that fails: a save takes about ten.
FEW_INODES = 1000
#: So many of the newest saves tell how fast a volume fills, if they took so long [s]; and how long before it is full a
#: warning comes [s].
LAST_SAVES, TELLING_S, SOON_S = 64, 3600.0, 14 * 86400.0


@dataclass(frozen=True)
class Finding:
    """One line of the output; `ok` is None if there is nothing to judge."""

    name: str
    ok: bool | None
    message: str


def machine() -> list[Finding]:
    """Return findings about versions, cores, torch and GPUs."""
    versions = ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)
    return [
        Finding("snapstore", None, f"{records.VERSION}, format version {records.FORMAT_VERSION}"),
        Finding("python", None, f"{platform.python_version()} on {platform.platform()}"),
        Finding("libraries", None, versions),
        _tested("cores", _threads),
        _tested("cpu engine", lambda: Finding("cpu engine", True, engine_in_use())),
        _torch(),
        Finding("nvcomp", None, "installed" if _present("nvidia.nvcomp") else "not installed"),
        Finding("cupy", None, "installed" if _present("cupy") else "not installed; the CPU encodes CUDA tensors"),
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _present(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent module is missing
        return False


def _tested(name: str, test: Callable[[], Finding]) -> Finding:
    """Return the finding of a test; one of this name that says why, if the test raises."""
    try:
        return test()
    except (SnapstoreError, Unfit) as error:
        return Finding(name, False, str(error))


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("cores", True, f"{cores}, snapstore uses {counted(default_threads(), 'thread')}")


def _torch() -> Finding:
    try:
        import torch

        count = torch.cuda.device_count()
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(count))
    except Exception as error:  # noqa: BLE001 - a broken installation fails in its own way
        return Finding("torch", False, f"cannot be used: {type(error).__name__}: {error}")
    return Finding("torch", True, f"{torch.__version__}, GPUs: {names or 'none'}")


def place(url: str) -> list[Finding]:
    """Return findings about a place, and whether a repository works there."""
    try:
        store = open_store(url)
    except NotFoundError:
        return _missing(Path(local_path(url) or "."))
    except SnapstoreError as error:
        return [Finding("place", False, str(error))]
    if isinstance(store, LocalStore):
        about = [*_folder(store.root), _tested("filling", partial(_filling, store))]
    else:
        about = [_tested("index", _cache)]
    return [_tested("repository", lambda: _repository(store)), *about, *_probe(store)]


def _probe(store: ObjectStore) -> list[Finding]:
    """Run every probe, each in its own hidden store."""

    def finding(name: str) -> Finding:
        with store.sandbox() as sandbox:
            return Finding(name, True, PROBES[name](sandbox))

    return [_tested(name, partial(finding, name)) for name in PROBES]


def _cache() -> Finding:
    """Return a finding about the cache folder, where indexes lie."""
    cache, why = usable_cache()
    if cache is None:
        cost = "every start reads all records; set SNAPSTORE_CACHE_DIR to a folder that you own on a local disk"
        return Finding("index", False, f"{why}: {cost}")
    return Finding("index", True, f"in {cache}, {mount_of(cache)[1] or 'an unknown file system'}")


def _missing(folder: Path) -> list[Finding]:
    """Test the nearest parent of a folder that does not exist yet."""
    parent = next(level for level in folder.absolute().parents if level.is_dir())
    found = Finding("place", None, f"{folder}: does not exist yet; 'snapstore init' creates it; testing {parent}")
    return [found, *_folder(parent), *_probe(LocalStore(parent))]


def _repository(store: ObjectStore) -> Finding:
    try:
        with Repository.open(store) as repository:
            count = counted(len(repository.snapshots()), "snapshot")
            about = f"{store.url}: a repository of {count}, format version {repository.config.version}"
            index = repository.context.index  # a temporary one goes when the repository is closed
            where = "temporary" if index.temporary else index.folder or "none"
            return Finding("repository", True, f"{about}; index: {where}")
    except NotFoundError:
        return Finding("repository", None, f"{store.url}: no repository here; 'snapstore init' creates one")


def _filling(store: LocalStore) -> Finding:
    """Return a finding about when the volume will be full, if saves go on as the last ones did.

    Of the older half of the last saves, the bytes of those count that were not forgotten since: the newest ones may
    only wait for their turn.
    """
    try:
        with Repository.open(store) as repository:
            known = [one for one in repository.view().snapshots(states=None) if one.created <= time.time()]
            last = sorted(known, key=lambda one: one.created)[-LAST_SAVES:]
    except NotFoundError:
        return Finding("filling", None, "no repository here yet")
    free_bytes = shutil.disk_usage(store.root).free
    largest = max((one.stored_bytes for one in last), default=0)
    if 2 * largest > free_bytes:
        text = f"{human_bytes(free_bytes)} free is less than two saves of {human_bytes(largest)}"
        return Finding("filling", False, f"{text}; 'snapstore forget --free SIZE -n' proposes what to forget")
    old = last[: len(last) // 2]
    stays = sum(one.stored_bytes for one in old[1:] if one.state == records.COMMITTED)
    took_s = old[-1].created - old[0].created if old else 0.0
    if took_s < TELLING_S:
        return Finding("filling", None, "the saves so far do not tell when it will be full")
    if not stays:
        return Finding("filling", True, f"of the last {counted(len(last), 'save')} none stays for long")
    left_s = free_bytes / stays * took_s
    rate = f"{counted(len(old), 'save')} left {human_bytes(int(stays / took_s * 86400))} a day here"
    text = f"{rate}: full in {left_s / 86400:.1f} days"
    if left_s < SOON_S:
        return Finding("filling", None, f"WARNING: {text}; set policies (keep=), or 'snapstore forget --free SIZE -n'")
    return Finding("filling", True, text)


def _folder(folder: Path) -> list[Finding]:
    """Return findings about the file system and its free space."""
    point, kind = mount_of(folder)
    where = "over the network" if on_network(folder) else "local"
    free_bytes = shutil.disk_usage(folder).free
    space = Finding("free space", free_bytes >= LITTLE_SPACE_BYTES, human_bytes(free_bytes))
    found = [Finding("file system", None, f"{kind or 'unknown'} at {point or folder}, {where}"), space]
    if (left := inodes(folder)) is not None:
        text = f"{left[0]:,} of {left[1]:,}; each object takes one"
        found.append(Finding("free inodes", left[0] >= FEW_INODES, text))
    return found
