"""Limits: how much memory a restore may take, and how many bytes a verb may decode; checked before either.

In: sizes that a repository declares. Out: nothing, or an error that says what is declared, what is there, and what to
do. A forged repository can declare any size. So sizes are compared with the memory of the machine, and with the bytes
that are stored.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CapabilityError, InvalidInputError
from ..storage.base import ObjectStore
from ..text import human_bytes

#: Environment variables that override the limits: a number of bytes, or a size such as 200G.
MEMORY, DECODED = "SNAPSTORE_MAX_MEMORY", "SNAPSTORE_MAX_DECODED"
#: Smaller states are restored without a look at the machine's memory.
SMALL_BYTES = 16 * 1024 * 1024
#: A verb may always decode this many bytes ...
MIN_DECODED_BYTES = 1024**3
#: ... and this many more per stored byte. 64 KiB of zeros take 24 bytes, or 15 if forged by hand, so no blob decodes to
#: more than 4,400 times its size. A chain counts all its links.
DECODED_RATIO = 8192
#: A restore may always decode each of its bytes this often. By the default SaveOptions.restore_cost only chunks whose
#: full blobs are large have longer chains, so these stay below DECODED_RATIO.
MAX_DEPTH_UNASKED = 16

_SIZE = re.compile(r"([0-9]{1,15})([KMGTP]?)")
_UNLIMITED = 2**64  # as cgroups of version 1 and resource limits say it, and more


def parse_size(text: str) -> int:
    """Return the number of bytes of a text such as `10G`; K, M, G, T and P are powers of 1024.

    Raises:
        InvalidInputError: the text is no size.
    """
    if match := _SIZE.fullmatch(text.upper().removesuffix("B").removesuffix("I")):
        return int(match[1]) << 10 * " KMGTP".index(match[2] or " ")
    raise InvalidInputError(f"{text}: expected a number of bytes, or a size such as 500M or 10G")


def from_environment(name: str) -> int | None:
    """Return the limit that an environment variable sets; None if it is not set, or empty.

    Raises:
        InvalidInputError: its value is no size.
    """
    value = os.environ.get(name)
    try:
        return parse_size(value) if value else None
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}={error}") from error


def require_memory(nbytes: int, what: str) -> None:
    """Check that `nbytes` fit into memory, before any of it is taken.

    Raises:
        CapabilityError: they are more than is available, or than SNAPSTORE_MAX_MEMORY allows.
    """
    if nbytes < SMALL_BYTES:
        return
    limit = from_environment(MEMORY)
    room = limit if limit is not None else available_bytes()
    if room is not None and nbytes > room:
        there = "are available here" if limit is None else f"are allowed by {MEMORY}"
        raise CapabilityError(
            f"{what}: needs {human_bytes(nbytes)} ({nbytes} bytes) of memory, {human_bytes(room)} {there}; restore "
            "parts of it with keys, onto a device, into tensors of your own, or one by one with named_tensors; "
            f"set {MEMORY}={nbytes} to try it anyway"
        )


@dataclass(slots=True)
class Budget:
    """How many bytes one verb may decode. One thread at a time uses it.

    Attributes:
        limit_bytes: None: not known yet. Once there is much to decode, stored bytes are summed until they explain twice
            as much; if all are too few, they set it.
        spent_bytes: decoded so far.
    """

    store: ObjectStore
    limit_bytes: int | None = None
    spent_bytes: int = 0
    _explained_bytes: int = 0  # the limit is at least this

    def spend(self, nbytes: int, what: str, *, free_bytes: int = 0) -> None:
        """Count work before it is done.

        Args:
            nbytes: what will be decoded.
            what: names the work in the error.
            free_bytes: the limit that follows from stored bytes is at least this, and at least MIN_DECODED_BYTES.

        Raises:
            CapabilityError: the stored bytes do not explain so much work. It is not counted.
        """
        total = self.spent_bytes + nbytes
        if self.limit_bytes is None and total > max(free_bytes, MIN_DECODED_BYTES, self._explained_bytes):
            self.limit_bytes = from_environment(DECODED)
            if self.limit_bytes is None:
                self._explain(2 * total)
        if self.limit_bytes is not None and total > self.limit_bytes:
            raise CapabilityError(
                f"{what}: has to decode {human_bytes(total)} ({total} bytes), expected at most "
                f"{human_bytes(self.limit_bytes)} for the bytes that are stored; if you trust this repository, "
                f"set {DECODED}={total}"
            )
        self.spent_bytes = total

    def _explain(self, most_bytes: int) -> None:
        """Sum stored bytes until they allow decoding `most_bytes`; if all together do not, they set the limit."""
        allowed = MIN_DECODED_BYTES
        for info in self.store.list("packs/"):
            allowed += DECODED_RATIO * info.size_bytes
            if allowed >= most_bytes:
                self._explained_bytes = allowed
                return
        self.limit_bytes = allowed


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this process can still take [bytes]; None if the system does not say.

    It is the least of three: what the machine has left, with swap; what cgroups leave; what resource limits leave.
    """
    machine = _machine(root)
    rooms = [*_cgroups(root, machine), *_resources(root)]
    return max(0, min(rooms)) if rooms else None


def _machine(root: Path) -> dict[str, int]:
    """Return the values of /proc/meminfo [bytes]; empty where it does not exist."""
    found = {}
    for line in _lines(root / "proc/meminfo"):
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def _cgroups(root: Path, machine: dict[str, int]) -> Iterator[int]:
    """Yield what the machine has left, and what each control group of this process leaves [bytes]."""
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
    """Return the bytes of a group and its children that the kernel gives back when they are needed.

    In version 1 the plain numbers count the group alone, but its usage counts its children too: `total_` counts all.
    """
    found = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line)
    names = ("active_file", "inactive_file", "slab_reclaimable")
    counts = (found.get(f"total_{name}", found.get(name, "")) for name in names)
    return sum(int(count) for count in counts if count.isdecimal())


def _zfs_cache(root: Path) -> int:
    """Return the bytes that ZFS's cache would give back; MemAvailable does not count them."""
    rows = (line.split() for line in _lines(root / "proc/spl/kstat/zfs/arcstats"))
    found = {row[0]: row[2] for row in rows if len(row) == 3}
    with suppress(KeyError, ValueError):
        return max(0, int(found["size"]) - int(found["c_min"]))
    return 0


def _resources(root: Path) -> Iterator[int]:
    """Yield what `ulimit -v` and `ulimit -d` leave [bytes]."""
    used = [int(word) * resource.getpagesize() for word in " ".join(_lines(root / "proc/self/statm")).split()]
    for which, at in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        soft = resource.getrlimit(which)[0]
        if soft != resource.RLIM_INFINITY and len(used) > at:
            yield soft - used[at]


def _number(file: Path) -> int | None:
    """Return the number in a file; None if it holds none, such as "max"."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> Iterable[str]:
    try:
        return os.fsdecode(file.read_bytes()).splitlines()
    except OSError:
        return []
