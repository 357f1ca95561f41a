"""What `snapstore doctor` looks at: this machine, and a place for a repository.

Every probe answers with findings and raises nothing. A place is tried out in a temporary folder inside it whose name no
store lists (it begins with a dot), so a living repository is not disturbed and nothing stays behind.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import records
from ..cache import on_network
from ..engine import default_threads
from ..errors import AlreadyExistsError, InvalidInputError, NotFoundError, SnapstoreError
from ..index import folder_for
from ..records import human_bytes
from ..repository import Repository
from ..storage import ObjectStore, open_store
from ..storage.local import LocalStore

LIBRARIES = ("numpy", "lmdb", "msgspec", "xxhash", "zstandard", "torch", "safetensors")
RACERS = 8
#: Less free space than this is a finding that fails [bytes].
LITTLE_SPACE_BYTES = 1024**3
#: A store's clock may differ from ours by so much before we say so [s].
CLOCK_SKEW_S = 60.0


@dataclass(frozen=True)
class Finding:
    """One line of the answer; `ok` is None where there is nothing to judge."""

    name: str
    ok: bool | None
    message: str


class _Unfit(Exception):  # noqa: N818 - not an error of ours, a verdict
    """The place lacks what the protocol needs."""


def machine() -> list[Finding]:
    """Versions, cores, torch and GPU."""
    versions = ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)
    return [
        Finding("snapstore", None, f"{records.VERSION}, format version {records.FORMAT_VERSION}"),
        Finding("python", None, f"{platform.python_version()} on {platform.platform()}"),
        Finding("libraries", None, versions),
        _threads(),
        _torch(),
        Finding("nvcomp", None, "installed" if _present("nvidia.nvcomp") else "not installed"),
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _present(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        return Finding("cores", True, f"{cores}, snapstore uses {default_threads()} threads")
    except InvalidInputError as error:
        return Finding("cores", False, str(error))


def _torch() -> Finding:
    try:
        import torch

        count = torch.cuda.device_count()
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(count))
    except Exception as error:  # noqa: BLE001 - a broken installation fails in its own way
        return Finding("torch", False, f"cannot be used: {type(error).__name__}: {error}")
    return Finding("torch", True, f"{torch.__version__}, GPUs: {names or 'none'}")


def place(url: str) -> list[Finding]:
    """What is at a URL, and whether a repository works there."""
    try:
        store = open_store(url)
    except NotFoundError:
        return _missing(Path(url.removeprefix("file://")))
    except SnapstoreError as error:
        return [Finding("place", False, str(error))]
    findings = [_repository(store)]
    if isinstance(store, LocalStore):
        findings += _folder(store.root)
    return findings


def _missing(folder: Path) -> list[Finding]:
    """A folder that is not there yet: its nearest parent says what it would be like."""
    parent = next(level for level in folder.absolute().parents if level.is_dir())
    found = Finding("place", None, f"{folder}: does not exist yet; 'snapstore init' makes it; looking at {parent}")
    return [found, *_folder(parent)]


def _repository(store: ObjectStore) -> Finding:
    try:
        with Repository.open(store) as repository:
            count = len(repository.snapshots())
            index = folder_for(store, repository.config.uuid)[0] if isinstance(store, LocalStore) else "temporary"
            about = f"{store.url}: a repository of {count} snapshots, format version {repository.config.version}"
            return Finding("repository", True, f"{about}; index: {index}")
    except NotFoundError:
        return Finding("repository", None, f"{store.url}: no repository here; 'snapstore init' makes one")
    except SnapstoreError as error:
        return Finding("repository", False, str(error))


def _folder(folder: Path) -> list[Finding]:
    """File system, space, and a trial of what the protocol needs."""
    point, kind = _mount(folder)
    where = "over the network, so the index lies in the cache folder" if on_network(folder) else "local"
    findings = [Finding("file system", None, f"{kind} at {point}, {where}"), _space(folder)]
    try:
        with tempfile.TemporaryDirectory(prefix=".snapstore-doctor-", dir=folder) as trial:
            findings += [_try(name, probe, LocalStore(trial)) for name, probe in _PROBES.items()]
    except OSError as error:
        findings.append(Finding("writing", False, f"{folder}: cannot be written: {error.strerror}"))
    return findings


def _mount(folder: Path) -> tuple[str, str]:
    """(mount point, file system type) of a folder; Linux tells."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return str(folder), f"unknown ({sys.platform})"
    resolved = str(folder.resolve())
    inside = [m for m in mounts if resolved == m[0] or resolved.startswith(m[0].rstrip("/") + "/")]
    point, kind = max(inside, key=lambda mount: len(mount[0]), default=["/", "unknown"])
    return point, kind


def _space(folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    return Finding("free space", free_bytes >= LITTLE_SPACE_BYTES, human_bytes(free_bytes))


def _try(name: str, probe: Callable[[LocalStore], str], store: LocalStore) -> Finding:
    try:
        return Finding(name, True, probe(store))
    except (SnapstoreError, _Unfit) as error:
        return Finding(name, False, str(error))


def _durable(store: LocalStore) -> str:
    """A whole put: bytes fsynced, hard link, directory fsynced."""
    store.put("probe/first", b"0")  # makes the folder
    began = time.perf_counter()
    store.put("probe/second", b"1")
    took_ms = 1000 * (time.perf_counter() - began)
    seen = sorted(info.key for info in store.list("probe/"))
    if seen != ["probe/first", "probe/second"]:
        raise _Unfit(f"two objects were put, {len(seen)} are listed")
    return f"hard links and fsync work; a small durable write takes {took_ms:.1f} ms"


def _race(store: LocalStore) -> str:
    """Threads put the same key: one must win, and its bytes must stand."""
    start, won = threading.Barrier(RACERS), []

    def racer(number: int) -> None:
        start.wait()
        try:
            store.put("probe/race", bytes([number]))
            won.append(number)
        except AlreadyExistsError:
            pass
        except SnapstoreError:
            won.append(-1)

    threads = [threading.Thread(target=racer, args=(number,)) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stands = store.get("probe/race")
    if len(won) != 1:
        raise _Unfit(f"{len(won)} of {RACERS} racing writers won, expected one")
    if stands != bytes(won):
        raise _Unfit("the bytes of a loser stand")
    return f"one of {RACERS} racing writers wins"


def _locks(store: LocalStore) -> str:
    store.hold("probe/held", b"")
    held = store.is_held("probe/held")
    store.release("probe/held")
    if held is False:
        raise _Unfit("a lock that is held looks free: gc would take living saves for dead")
    return "work" if held else "are missing here; gc waits an hour for saves that died"


def _clock(store: LocalStore) -> str:
    skew_s = store.now_s() - time.time()
    return "agrees" if abs(skew_s) < CLOCK_SKEW_S else f"{abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"


_PROBES: dict[str, Callable[[LocalStore], str]] = {
    "writing": _durable,
    "create-only": _race,
    "file locks": _locks,
    "clock": _clock,
}
