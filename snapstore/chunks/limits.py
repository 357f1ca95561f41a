"""Limits: what a restore may take of this machine, before it takes it: memory, and bytes to decode.

In: sizes that a repository declares. Out: nothing, or an error that says what is declared, what there is, and what to
do. What a repository declares costs nothing to declare; so it is compared with what is there, and with what is stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CapabilityError, InvalidInputError
from ..storage.base import ObjectStore
from ..text import human_bytes

#: Environment variables that set the limits instead: a number of bytes, or one such as 200G.
MEMORY, DECODED = "SNAPSTORE_MAX_MEMORY", "SNAPSTORE_MAX_DECODED"
#: Less than this is not worth a look at the machine.
SMALL_BYTES = 16 * 1024 * 1024
#: A verb may always decode so much, ...
MIN_DECODED_BYTES = 1024**3
#: ... and beyond that so much of every stored byte. 64 KiB of zeros take 24 bytes, 15 if they are forged by hand; so no
#: blob gives more than 4,400 times its size, and a chain is decoded for all its links at once.
DECODED_RATIO = 8192
#: A restore may decode each of its bytes so often whatever is stored: chains are eight deltas long by default.
MAX_DEPTH_UNASKED = 16

_SIZE = re.compile(r"([0-9]{1,15})([KMGTP]?)")
_UNLIMITED = 2**64  # as cgroups of version 1 and resource limits say it, and more


def parse_size(text: str) -> int:
    """Bytes of `10G`; K, M, G, T and P are powers of 1024.

    Raises:
        InvalidInputError: it is no size.
    """
    if match := _SIZE.fullmatch(text.upper().removesuffix("B").removesuffix("I")):
        return int(match[1]) << 10 * " KMGTP".index(match[2] or " ")
    raise InvalidInputError(f"{text}: expected a number of bytes, or one such as 500M or 10G")


def from_environment(name: str) -> int | None:
    """A limit that a variable sets; None: it is not set, or empty.

    Raises:
        InvalidInputError: its value is no size.
    """
    value = os.environ.get(name)
    try:
        return parse_size(value) if value else None
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}={error}") from error


def require_memory(nbytes: int, what: str) -> None:
    """Refuse what does not fit into memory, before any of it is taken.

    Raises:
        CapabilityError: `nbytes` are more than there are, or than SNAPSTORE_MAX_MEMORY allows.
    """
    if nbytes < SMALL_BYTES:
        return
    limit = from_environment(MEMORY)
    room = limit if limit is not None else available_bytes()
    if room is not None and nbytes > room:
        there = "are available here" if limit is None else f"are allowed by {MEMORY}"
        raise CapabilityError(
            f"{what}: needs {human_bytes(nbytes)} ({nbytes} bytes) of memory, {human_bytes(room)} {there}; restore "
            "parts of it with keys, onto a device, or into tensors of your own; "
            f"{MEMORY}={nbytes} has it tried all the same"
        )


def decodable_bytes(stored_bytes: int) -> int:
    """How much a verb may decode of a repository that stores so much, or what SNAPSTORE_MAX_DECODED says."""
    limit = from_environment(DECODED)
    return MIN_DECODED_BYTES + DECODED_RATIO * stored_bytes if limit is None else limit


@dataclass(slots=True)
class Budget:
    """How much a verb may decode; of one repository, and of one thread at a time.

    Attributes:
        limit_bytes: None: by what is stored, which is looked up once there is much to decode.
        spent_bytes: so far.
    """

    store: ObjectStore
    limit_bytes: int | None = None
    spent_bytes: int = 0

    def spend(self, nbytes: int, what: str, *, free_bytes: int = 0) -> None:
        """Count work before it is done.

        Args:
            nbytes: what will be decoded.
            what: the work, for the error.
            free_bytes: no limit by what is stored is below this, nor below MIN_DECODED_BYTES.

        Raises:
            CapabilityError: nothing that is stored explains so much work; it is not counted.
        """
        total = self.spent_bytes + nbytes
        if self.limit_bytes is None and total > max(free_bytes, MIN_DECODED_BYTES):
            self.limit_bytes = decodable_bytes(sum(info.size_bytes for info in self.store.list("packs/")))
        if self.limit_bytes is not None and total > self.limit_bytes:
            raise CapabilityError(
                f"{what}: has to decode {human_bytes(total)} ({total} bytes), more than the "
                f"{human_bytes(self.limit_bytes)} that are allowed for what is stored; if you trust this repository, "
                f"{DECODED}={total} has it done"
            )
        self.spent_bytes = total


def available_bytes(root: Path = Path("/")) -> int | None:
    """How much memory this process can still take; None: this system does not say.

    The least of what the machine has left, its swap included, and what cgroups and resource limits leave.
    """
    machine = _machine(root)
    rooms = [*_cgroups(root, machine), *_resources(root)]
    return max(0, min(rooms)) if rooms else None


def _machine(root: Path) -> dict[str, int]:
    """/proc/meminfo [bytes]; empty where there is none."""
    found = {}
    for line in _lines(root / "proc/meminfo"):
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def _cgroups(root: Path, machine: dict[str, int]) -> Iterator[int]:
    """What the machine leaves, and every control group that this process is in."""
    swap = machine.get("SwapFree", 0)
    if "MemAvailable" in machine:
        yield machine["MemAvailable"] + swap + _zfs_cache(root)
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
        place = base / path.strip("/")
        for folder in [place, *place.parents]:  # a container sees its own group at the top, whatever its path says
            limit = _number(folder / ("memory.max" if number == "0" else "memory.limit_in_bytes"))
            if limit is not None and limit < machine.get("MemTotal", _UNLIMITED):
                used = _number(folder / ("memory.current" if number == "0" else "memory.usage_in_bytes")) or 0
                may_swap = _number(folder / "memory.swap.max")
                swapped = _number(folder / "memory.swap.current") or 0
                own_swap = swap if may_swap is None else min(swap, max(0, may_swap - swapped))
                yield limit - used + _page_cache(folder) + own_swap
            if folder == base:
                break


def _page_cache(folder: Path) -> int:
    """Bytes of a group, and of those below it, that its kernel gives back when they are needed.

    In version 1 the plain numbers are of the group alone, though its usage counts those below: `total_` has them all.
    """
    found = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line)
    names = ("active_file", "inactive_file", "slab_reclaimable")
    counts = (found.get(f"total_{name}", found.get(name, "")) for name in names)
    return sum(int(count) for count in counts if count.isdecimal())


def _zfs_cache(root: Path) -> int:
    """Bytes of ZFS's own cache, which it gives back, and which MemAvailable does not count."""
    rows = (line.split() for line in _lines(root / "proc/spl/kstat/zfs/arcstats"))
    found = {row[0]: row[2] for row in rows if len(row) == 3}
    with suppress(KeyError, ValueError):
        return max(0, int(found["size"]) - int(found["c_min"]))
    return 0


def _resources(root: Path) -> Iterator[int]:
    """What `ulimit -v` and `ulimit -d` leave."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = [int(word) * resource.getpagesize() for word in " ".join(_lines(root / "proc/self/statm")).split()]
    for name, at in (("RLIMIT_AS", 0), ("RLIMIT_DATA", 5)):
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY and len(used) > at:
            yield soft - used[at]


def _number(file: Path) -> int | None:
    """The number in a file; None: it holds none, such as "max"."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> Iterable[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
