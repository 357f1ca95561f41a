"""Limits: how much memory a restore may take, and how many bytes a verb may decode; both are checked first.

In: sizes that a repository declares. Out: nothing, or an error that names the declared size, the limit, and what to do.
A forged repository can declare any size. So sizes are compared with the memory of the machine, and with the stored
bytes.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CapabilityError, InvalidInputError
from ..format.manifests.delta_choice import MAX_LINKS
from ..storage.base import ObjectStore
from ..text import human_bytes, size_in_bytes

#: Environment variables that override the limits. Their values are numbers of bytes, or sizes such as 200G.
MEMORY, DECODED = "SNAPSTORE_MAX_MEMORY", "SNAPSTORE_MAX_DECODED"
#: Smaller states are restored without comparing them with the machine's memory [bytes].
SMALL_BYTES = 16 * 1024 * 1024
#: A verb may always decode this many bytes,
MIN_DECODED_BYTES = 1024**3
#: and this many bytes more per stored byte. 64 KiB of zeros take 24 bytes, or 15 bytes if forged by hand. So no blob
#: decodes to more than 4,400 times its size. All links of a chain count.
DECODED_RATIO = 8192
#: A restore may always decode each of its bytes this many times: no save makes a longer chain, and compact makes a
#: chain no longer than that. Equal chunks may share a long chain, and then few stored bytes explain much work.
MAX_DEPTH_UNASKED = MAX_LINKS + 1

_ADVICE = "restore parts of it with keys, onto a device, into tensors of your own, or one by one with named_tensors"
_UNLIMITED = 2**64  # above every value that means "no limit" in cgroups of version 1


def parse_size(text: str) -> int:
    """Return the number of bytes of a text such as `10G`; see `size_in_bytes`.

    Raises:
        InvalidInputError: the text is not a size.
    """
    if (size := size_in_bytes(text)) is not None:
        return size
    raise InvalidInputError(f"{text}: expected a number of bytes, or a size such as 500M or 10G")


def from_environment(name: str) -> int | None:
    """Return the limit that an environment variable sets; None if it is not set, or empty.

    Raises:
        InvalidInputError: its value is not a size.
    """
    value = os.environ.get(name)
    try:
        return parse_size(value) if value else None
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}={error}") from error


def require_memory(nbytes: int, what: str, advice: str = _ADVICE) -> None:
    """Check that `nbytes` fit into memory, before any of it is taken.

    Args:
        what: names the object in the error.
        advice: says in the error what to do.

    Raises:
        CapabilityError: they are more than is available, or than SNAPSTORE_MAX_MEMORY allows.
        InvalidInputError: the value of SNAPSTORE_MAX_MEMORY is not a size.
    """
    if nbytes < SMALL_BYTES:
        return
    limit = from_environment(MEMORY)
    room = limit if limit is not None else available_bytes()
    if room is not None and nbytes > room:
        there = "are available here" if limit is None else f"are allowed by {MEMORY}"
        raise CapabilityError(
            f"{what}: needs {human_bytes(nbytes)} ({nbytes} bytes) of memory, {human_bytes(room)} {there}; "
            f"{advice}; set {MEMORY}={nbytes} to try it anyway"
        )


@dataclass(slots=True)
class Budget:
    """How many bytes one verb may decode. One thread at a time uses it.

    Attributes:
        limit_bytes: None: not known yet. When there is much to decode, the sizes of packs are summed until they justify
            twice as many bytes. If all packs do not, the sum sets the limit.
        spent_bytes: decoded so far.
    """

    store: ObjectStore
    limit_bytes: int | None = None
    spent_bytes: int = 0
    _explained_bytes: int = 0  # the packs summed so far justify this many bytes

    def spend(self, nbytes: int, what: str, *, free_bytes: int = 0) -> None:
        """Count work before it is done.

        Args:
            nbytes: plain bytes that will be decoded.
            what: names the work in the error.
            free_bytes: this many bytes in total, or MIN_DECODED_BYTES, need no justification by stored bytes.

        Raises:
            CapabilityError: the work is above the limit. It is not counted.
            InvalidInputError: the value of SNAPSTORE_MAX_DECODED is not a size.
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
        """Sum the sizes of packs until they justify `most_bytes`; if all do not, set the limit by the sum."""
        allowed = MIN_DECODED_BYTES
        for info in self.store.list("packs/"):
            allowed += DECODED_RATIO * info.size_bytes
            if allowed >= most_bytes:
                self._explained_bytes = allowed
                return
        self.limit_bytes = allowed


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this process can still take [bytes]; None if it is not known.

    It is the least of three: the memory that the machine has left, with swap; the memory that cgroups leave; and the
    memory that resource limits leave.
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
    """Yield the memory left of the machine, then of each control group of this process [bytes]."""
    swap = machine.get("SwapFree", 0)
    if "MemAvailable" in machine:
        yield machine["MemAvailable"] + swap + _zfs_cache(root)
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
        place = base / path.strip("/")
        for folder in [place, *place.parents]:  # a container sees its own group at the top, at any path
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
    """Return the bytes of a group and its children that the kernel frees when they are needed.

    In version 1 the usage of a group counts its children too. So do the numbers with `total_`; those without do not.
    """
    found = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line)
    names = ("active_file", "inactive_file", "slab_reclaimable")
    counts = (found.get(f"total_{name}", found.get(name, "")) for name in names)
    return sum(int(count) for count in counts if count.isdecimal())


def _zfs_cache(root: Path) -> int:
    """Return the bytes that ZFS's cache would free; MemAvailable does not count them."""
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
    """Return the number in a file; None for other text, such as "max"."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> Iterable[str]:
    try:
        return os.fsdecode(file.read_bytes()).splitlines()
    except OSError:
        return []
