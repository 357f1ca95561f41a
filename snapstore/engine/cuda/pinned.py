"""Page-locked host memory: the device copies to and from it at the speed of the bus.

In: sizes. Out: memory that stays locked while an array on it lives; buffers for reuse; and memory for the copies of a
state, in a few large allocations. A forked child inherits none of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
import torch

from ...arrays import Bytes, Column
from ...state.values.arrays import Memory
from ...text import log
from ...threads import Threads, after_fork_in_child
from .graph_capture import beside_captures

#: Parts of an allocation begin at multiples of this [bytes].
ALIGNMENT = 256
HUGE_PAGE_BYTES = 2 * 1024 * 1024
#: Before host memory is page-locked, threads touch its pages: the size of a piece [bytes], and the number of threads.
TOUCH_BYTES, TOUCH_THREADS = 32 * 1024 * 1024, 8
#: Copies in host memory share allocations of about this size [bytes].
ARENA_BYTES = 1024 * 1024 * 1024
#: An allocation is released once this share of it is unused.
UNUSED_SHARE = 0.1

Buffers = dict[Any, Memory]


@dataclass(frozen=True, slots=True)
class Pinned:
    """Page-locked host memory that belongs to a device."""

    array: Bytes
    device: torch.device
    arena: Bytes  # the allocation that contains it

    def __len__(self) -> int:
        return len(self.array)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.array.nbytes


class PinnedBuffers:
    """Page-locked host memory for reuse; the device copies into and out of it at the speed of the bus."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._free: list[Bytes] = []
        self._lent: dict[int, weakref.ref[Bytes]] = {}  # by id: `give` accepts only these, each once
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """Return (n,) uint8, n at least `nbytes`."""
        with self._lock:
            fits = [i for i, buffer in enumerate(self._free) if nbytes <= buffer.size]
            buffer = self._free.pop(min(fits, key=lambda i: self._free[i].size)) if fits else pinned(nbytes)
            self._lent = {number: lent for number, lent in self._lent.items() if lent() is not None}
            self._lent[id(buffer)] = weakref.ref(buffer)
            return buffer

    def give(self, buffer: Bytes) -> None:
        """Take back a buffer from `take`; above the limit, release the buffers unused for longest."""
        with self._lock:
            lent = self._lent.pop(id(buffer), None)
            if lent is None or lent() is not buffer:
                return
            self._free.append(buffer)
            while sum(free.size for free in self._free) > self._max_bytes:
                self._free.pop(0)

    def clear(self) -> None:
        """Release all free buffers."""
        with self._lock:
            self._free.clear()


def pinned(nbytes: int) -> Bytes:
    """Return (nbytes,) uint8 of host memory, page-locked while the array lives; ordinary memory if locking fails.

    It uses huge pages if the system has them. The driver's own allocation uses small pages, and locks 3 GB/s.
    """
    try:
        return _locked(max(nbytes, 1))[:nbytes]
    except (cupy.cuda.runtime.CUDARuntimeError, OSError) as error:
        log.warning("%d bytes of host memory cannot be page-locked, copies will be slow: %s", nbytes, error)
        return np.empty(nbytes, np.uint8)


def _locked(nbytes: int) -> Bytes:
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    array = whole[start : start + nbytes]
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)  # after a fork, a write would move pages that the device uses
    _mapped.add(memory)
    pieces = [array[i : i + TOUCH_BYTES] for i in range(0, nbytes, TOUCH_BYTES)]
    with Threads(min(len(pieces), TOUCH_THREADS)) as threads:  # the kernel zeroes pages at 8 GB/s per thread
        threads.start(_touch, pieces)()
    address = array.ctypes.data
    # of the array, not of `memory`: an mmap object unmaps its pages before its finalizers run. So the finalizer holds
    # `memory`. It is made first, as an interrupt may come as soon as the pages are locked.
    weakref.finalize(whole, _unlock, memory, address, torch.cuda.current_device(), os.getpid()).atexit = False
    cupy.cuda.runtime.hostRegister(address, nbytes, 0)
    return array


_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _never_unmap() -> None:
    """Stop a forked child, which inherits none of these pages, from unmapping its own pages at their addresses."""
    for memory in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


after_fork_in_child(_never_unmap)


def _touch(piece: Bytes) -> None:
    piece[:: mmap.PAGESIZE] = 0


def _unlock(memory: mmap.mmap, address: int, device: int, pid: int) -> None:
    """Unlock pages of `memory`, still mapped. Else CUDA would take other memory at their addresses for these pages."""
    if os.getpid() != pid:  # CUDA does not survive a fork
        return
    # errors: the device has failed, or did not lock them; the thread that collects garbage may capture a graph
    with suppress(Exception), beside_captures(), torch.cuda.device(device):
        cupy.cuda.runtime.hostUnregister(address)


def host_rooms(
    device: torch.device,
    tensors: tuple[Sequence[Any], Column],
    spare: Buffers,
    base: Buffers,
    delta_rejected: Container[Any],
) -> list[Pinned]:
    """Return page-locked memory for each tensor of a device: its spare buffer, or a part of a new allocation.

    An allocation costs huge pages, a driver call and threads: too much for each small tensor. It lives as long as any
    part of it. So parts of an allocation that is little used are not reused, and it is released. Tensors that will keep
    no base get separate allocations, since no base will use their memory.

    Args:
        tensors: keys, and sizes (n,) in bytes.
        spare: buffers by key; it gets the returned memory too.
        base: buffers that stay in use.
        delta_rejected: keys of tensors that will keep no base.
    """
    keys, lengths = tensors
    rooms: list[Pinned | None] = []
    for key, nbytes in zip(keys, lengths.tolist(), strict=True):
        room = spare.pop(key, None)
        fits = isinstance(room, Pinned) and len(room) == nbytes and room.device == device
        rooms.append(room if fits else None)
    room = None
    if little := _little_used(rooms):
        little = _little_used([*rooms, *base.values()])
    rooms = [None if room is None or id(room.arena) in little else room for room in rooms]
    sizes = lengths + -lengths % ALIGNMENT
    lacking = np.array([room is None for room in rooms], bool)
    is_apart = np.array([key in delta_rejected for key in keys], bool)
    for rows in (np.flatnonzero(lacking & ~is_apart), np.flatnonzero(lacking & is_apart)):
        ends = np.cumsum(sizes[rows])
        for own in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(ends // ARENA_BYTES)) + 1):
            if not len(own):
                continue
            places = ends[own] - sizes[rows[own]] - (ends[own[0]] - sizes[rows[own[0]]])
            arena = pinned(int(sizes[rows[own]].sum()))
            for row, at in zip(rows[own].tolist(), places.tolist(), strict=True):
                rooms[row] = Pinned(arena[at : at + int(lengths[row])], device, arena)
    found = [room for room in rooms if room is not None]
    spare.update(zip(keys, found, strict=True))  # before the copies, which may fail
    return found


def _little_used(memories: Iterable[Memory]) -> set[int]:
    """Return the ids of allocations of which these memories leave over UNUSED_SHARE unused."""
    used: dict[int, int] = defaultdict(int)
    whole: dict[int, int] = {}
    for memory in memories:
        if isinstance(memory, Pinned):
            arena, nbytes = memory.arena, memory.array.size
            used[id(arena)] += nbytes + -nbytes % ALIGNMENT
            whole[id(arena)] = arena.size
    return {number for number, nbytes in used.items() if nbytes < (1 - UNUSED_SHARE) * whole[number]}
