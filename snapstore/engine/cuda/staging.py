"""Copies of CUDA tensors that a save reads in the background: on the device, or in pinned host memory.

A separate stream copies every tensor, with one kernel on the device, or over the bus. The training stream waits for its
event, so that work enqueued later may change the tensors. The host does not wait: `copy` returns within milliseconds,
and `wait_copied` waits in the background.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...arrays import Bytes, Column
from ...errors import InvalidInputError
from ...state.arrays import Memory, as_memory, copy_into
from . import kernels
from .streams import ALIGNMENT, copy_async, out_of_memory, pinned, ragged, release_cached_memory

if TYPE_CHECKING:
    from ..registry import Engines

log = logging.getLogger("snapstore")
#: The most device memory that a save works in: besides copies on the device, and with copies on the host.
WORK_BYTES, HOST_WORK_BYTES = 1280 * 1024 * 1024, 480 * 1024 * 1024
#: The most that copies and work may take together, as a multiple of the state: 2.1 with what torch's allocator keeps.
MAX_OF_STATE = 2.05
#: Bytes that one thread block copies.
PIECE_BYTES = 256 * 1024
#: Copies in host memory share allocations of about this size.
ARENA_BYTES = 1024 * 1024 * 1024
#: Copies are laid out again once this share of the state should lie apart, or of an allocation is unused.
APART_SHARE = 0.1
#: The share of free memory that `auto` may take.
AUTO_SHARE = 0.9

TensorKey = Any
Item = tuple[TensorKey, Any, int]  # key, tensor, bytes
Buffers = dict[TensorKey, Memory]


@dataclass(frozen=True, slots=True)
class Pinned:
    """Page-locked host memory that belongs to a device."""

    array: Bytes
    device: torch.device
    arena: Bytes  # the allocation that contains it

    def __len__(self) -> int:
        return len(self.array)


@dataclass(frozen=True, slots=True)
class _Rooms:
    """Memory for the copies of one device's tensors.

    `memories` makes one Memory per tensor. It is called once the copies are under way, since it takes time as well.
    """

    addresses: Column  # (n,)
    memories: Callable[[], list[Memory]]
    on_device: bool


class DeviceStaging:
    """Copies the tensors of one lineage of saves, device by device."""

    def __init__(self, engines: Engines, mode: str, *, twice: bool) -> None:
        self._engines, self._asked, self._twice = engines, mode, twice
        self._modes: dict[torch.device, str] = {}
        self._state_bytes: dict[torch.device, int] = {}
        self._copying: list[tuple[torch.device, torch.cuda.Event]] = []
        self._keep: list[Any] = []  # memory that copies under way read or write
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._apart: dict[torch.device, set[TensorKey]] = {}  # tensors whose copies lie apart: they become no bases
        self._moved = True  # whether copies lie elsewhere than at the last save

    def copy(
        self,
        items: Sequence[Item],
        spare: Buffers,
        base: Buffers,
        delta_rejected: Container[TensorKey],
        inline_below: int,
    ) -> list[Memory]:
        """Begin to copy tensors, those below `inline_below` bytes to host memory, others to their spare buffers.

        Args:
            delta_rejected: keys of tensors that will keep no base.

        Returns:
            The memories, in order. Memory on the device may be up to ALIGNMENT bytes longer than its tensor.

        Raises:
            InvalidInputError: a CUDA graph is being captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise InvalidInputError("save was called while a CUDA graph is being captured; call it between replays")
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for i, (_, value, _) in enumerate(items):
            by_device[value.device].append(i)
        memories: list[Memory] = [None] * len(items)
        for device, own in by_device.items():
            with torch.cuda.device(device), torch.no_grad():
                small = [i for i in own if items[i][2] < inline_below]
                large = [i for i in own if items[i][2] >= inline_below]
                rooms = self._rooms([items[i] for i in large], device, spare, base, delta_rejected)
                try:
                    with out_of_memory():
                        hosted = self._begin(device, [items[i] for i in small], [items[i] for i in large], rooms)
                        copies = rooms.memories()
                except torch.OutOfMemoryError:
                    copies = self._without_memory([items[i] for i in large], device, spare, base, delta_rejected)
                    hosted = [_copy_to_host(items[i][1], np.empty(items[i][2], np.uint8)) for i in small]
                for i, memory in zip(large, copies, strict=True):
                    memories[i] = spare[items[i][0]] = memory
                for i, memory in zip(small, hosted, strict=True):
                    memories[i] = memory
        return memories

    def _begin(self, device: torch.device, small: Sequence[Item], large: Sequence[Item], rooms: _Rooms) -> list[Bytes]:
        """Enqueue all copies of one device on its copy stream, between two waits of the training stream."""
        training, stream = torch.cuda.current_stream(device), self._stream(device)
        self._keep.append([value for _, value, _ in (*small, *large)])  # their owner may free them at once
        if not rooms.on_device:  # an interrupt may come before any other reference to the target memory exists
            self._keep.append(rooms)
        sources = np.array([self._address(value) for _, value, _ in (*small, *large)], np.int64)
        lengths = np.array([nbytes for _, _, nbytes in (*small, *large)], np.int64)
        stream.wait_stream(training)
        with torch.cuda.stream(stream):
            n = len(small)
            hosted = self._copy_small(sources[:n], lengths[:n], device, stream)
            if rooms.on_device:
                _gather(sources[n:], rooms.addresses, lengths[n:], device, stream)
            else:
                columns = (rooms.addresses, sources[n:], lengths[n:])
                for place, source, nbytes in zip(*(column.tolist() for column in columns), strict=True):
                    copy_async(place, source, nbytes, stream)
            done = torch.cuda.Event()
            done.record(stream)
        training.wait_event(done)
        self._copying.append((device, done))
        return hosted

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _address(self, value: torch.Tensor) -> int:
        """Return where a tensor's bytes lie in C order; a strided one is copied first, and kept until `wait_copied`."""
        if value.is_contiguous() and not value.is_conj() and not value.is_neg():
            return value.data_ptr()
        self._keep.append(as_memory(value, lambda _: True))
        return int(self._keep[-1].data_ptr())

    def wait_copied(self, spare: Buffers, base: Buffers) -> None:
        """Wait for all copies, then let the save work in the device memory that they leave free."""
        self._wait()
        for device, mode in self._modes.items():
            left = int(MAX_OF_STATE * self._state_bytes.get(device, 0)) - _bytes_on(device, spare, base)
            work = min(left, int(AUTO_SHARE * _free_bytes(device)))
            self._engines.on(device).limit(self, HOST_WORK_BYTES if mode == "host" else work)

    def _wait(self) -> None:
        for device, event in self._copying:
            with torch.cuda.device(device):
                event.synchronize()
        self._copying.clear()
        self._keep.clear()

    def release_memory(self, spare: Buffers) -> None:
        """Release spare device memory after a save, committed or not: the next save would only overwrite it."""
        for device in self._modes:
            self._engines.on(device).limit(self, None)
        with suppress(RuntimeError):  # a device that has failed
            self._wait()
        for key in [key for key, memory in spare.items() if isinstance(memory, torch.Tensor)]:
            del spare[key]
        if self._moved:  # memory that this save took, for copies and its large first batches, fits no later save
            self._moved = False
            for device in self._apart:
                release_cached_memory(device)

    # -- where

    def _mode(self, items: Sequence[Item], device: torch.device, spare: Buffers, base: Buffers) -> str:
        """Decide where this device's copies go, when the device is first seen, and again when the state grows."""
        needed = sum(nbytes for _, _, nbytes in items)
        if device in self._modes and needed <= 1.1 * self._state_bytes[device]:
            return self._modes[device]
        self._state_bytes[device] = needed
        mode = self._asked
        if mode == "auto":
            free = _free_bytes(device) + _bytes_on(device, spare, base)
            wanted = (2 if self._twice else 1) * needed + WORK_BYTES
            mode = "device" if wanted <= AUTO_SHARE * free else "host"
            log.info(
                "staging=%s on %s: copies of %.1f GB of state, and work, take up to %.1f GB; %.1f GB is free",
                mode,
                device,
                needed / 1e9,
                wanted / 1e9,
                free / 1e9,
            )
        self._modes[device] = mode
        return mode

    # -- copies

    def _rooms(
        self,
        items: Sequence[Item],
        device: torch.device,
        spare: Buffers,
        base: Buffers,
        delta_rejected: Container[TensorKey],
    ) -> _Rooms:
        """Return memory for the copies: on the device, or else on the host."""
        if items and self._mode(items, device, spare, base) == "device":
            try:
                with out_of_memory():
                    return self._device_rooms(items, device, spare, delta_rejected)
            except torch.OutOfMemoryError:
                self._stage_on_host(device, spare, base)
        rooms = _host_rooms(items, device, spare, base, delta_rejected)
        return _Rooms(np.array([room.array.ctypes.data for room in rooms], np.int64), lambda: list(rooms), False)

    def _stage_on_host(self, device: torch.device, spare: Buffers, base: Buffers) -> None:
        """Keep no copies on a device that has no room for them."""
        for memories in (spare, base):
            for key in [k for k, m in memories.items() if isinstance(m, torch.Tensor) and m.device == device]:
                del memories[key]
        self._modes[device] = "host"
        log.warning("%s: out of memory for copies of the state; staging=host from here on", device)
        release_cached_memory(device)

    def _without_memory(
        self,
        items: Sequence[Item],
        device: torch.device,
        spare: Buffers,
        base: Buffers,
        delta_rejected: Container[TensorKey],
    ) -> list[Memory]:
        """Copy to the host while the caller waits: the device has no room even for tables."""
        self._stage_on_host(device, spare, base)
        if device in self._streams:  # copies that have begun write into the same memory
            self._streams[device].synchronize()
        rooms = _host_rooms(items, device, spare, base, delta_rejected)
        for (_, value, _), room in zip(items, rooms, strict=True):
            _copy_to_host(value, room.array)
        return list(rooms)

    def _device_rooms(
        self, items: Sequence[Item], device: torch.device, spare: Buffers, delta_rejected: Container[TensorKey]
    ) -> _Rooms:
        """Make two allocations: for copies that become bases, and for others. One per tensor would take a millisecond.

        The spare buffers of the device are released first: torch returns the same memory. It belongs to the copy
        stream: from memory of the training stream, the training would take small pieces between saves, and the rest
        would fit no copy again.
        """
        lie_apart = self._lie_apart(items, device, delta_rejected)
        for key in [k for k, m in spare.items() if isinstance(m, torch.Tensor) and m.device == device]:
            del spare[key]
        sizes = np.array([nbytes + -nbytes % ALIGNMENT for _, _, nbytes in items], np.int64)
        is_apart = np.array([key in lie_apart for key, _, _ in items], bool)
        addresses = np.empty(len(items), np.int64)
        groups: list[tuple[Column, torch.Tensor]] = []  # rows, and the memory that they share
        for rows in (np.flatnonzero(~is_apart), np.flatnonzero(is_apart)):
            with torch.cuda.stream(self._stream(device)):
                together = torch.empty(int(sizes[rows].sum()), dtype=torch.uint8, device=device)
            addresses[rows] = together.data_ptr() + np.cumsum(sizes[rows]) - sizes[rows]
            groups.append((rows, together))

        def memories() -> list[Memory]:
            views: list[Memory] = [None] * len(items)
            for rows, together in groups:
                pieces = together.split_with_sizes(sizes[rows].tolist())
                for row, piece in zip(rows.tolist(), pieces, strict=True):
                    views[row] = piece
            return views

        return _Rooms(addresses, memories, True)

    def _lie_apart(
        self, items: Sequence[Item], device: torch.device, delta_rejected: Container[TensorKey]
    ) -> set[TensorKey]:
        """Return which copies to lay apart: nearly always the same, so that the same memory fits them again."""
        before = self._apart.setdefault(device, set())
        more = {key: nbytes for key, _, nbytes in items if key in delta_rejected and key not in before}
        if sum(more.values()) > APART_SHARE * sum(nbytes for _, _, nbytes in items):
            if before:  # else the memory of the first copies fits
                release_cached_memory(device)
            before.update(more)
            self._moved = True
        return before

    def _copy_small(
        self, sources: Column, lengths: Column, device: torch.device, stream: torch.cuda.Stream
    ) -> list[Bytes]:
        """Begin to copy all small tensors: gathered on the device, then one copy into pinned memory."""
        if not len(sources):
            return []
        rooms = (lengths + 15) // 16 * 16
        places = np.cumsum(rooms) - rooms
        together = torch.empty(int(rooms.sum()), dtype=torch.uint8, device=device)
        _gather(sources, together.data_ptr() + places, lengths, device, stream)
        host = torch.empty(len(together), dtype=torch.uint8, pin_memory=True)
        view = host.copy_(together, non_blocking=True).numpy()
        return [view[at : at + n] for at, n in zip(places.tolist(), lengths.tolist(), strict=True)]


def _host_rooms(
    items: Sequence[Item],
    device: torch.device,
    spare: Buffers,
    base: Buffers,
    delta_rejected: Container[TensorKey],
) -> list[Pinned]:
    """Return page-locked memory for every tensor: its spare buffer if that fits, else part of a few new allocations.

    An allocation takes huge pages, a driver call and threads: too much for every small tensor. It lives as long as any
    part of it, so an allocation of which little is used is released. Tensors that will keep no base lie apart: no base
    would use their place.
    """
    rooms: list[Pinned | None] = []
    for key, _, nbytes in items:
        room = spare.pop(key, None)
        fits = isinstance(room, Pinned) and len(room) == nbytes and room.device == device
        rooms.append(room if fits else None)
    room = None
    if little := _little_used(rooms):
        little = _little_used([*rooms, *base.values()])
    rooms = [None if room is None or id(room.arena) in little else room for room in rooms]
    sizes = np.array([nbytes + -nbytes % ALIGNMENT for _, _, nbytes in items], np.int64)
    lacking = np.array([room is None for room in rooms], bool)
    is_apart = np.array([key in delta_rejected for key, _, _ in items], bool)
    for rows in (np.flatnonzero(lacking & ~is_apart), np.flatnonzero(lacking & is_apart)):
        ends = np.cumsum(sizes[rows])
        for own in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(ends // ARENA_BYTES)) + 1):
            if not len(own):
                continue
            places = ends[own] - sizes[rows[own]] - (ends[own[0]] - sizes[rows[own[0]]])
            arena = pinned(int(sizes[rows[own]].sum()))
            for row, at in zip(rows[own].tolist(), places.tolist(), strict=True):
                rooms[row] = Pinned(arena[at : at + items[row][2]], device, arena)
    found = [room for room in rooms if room is not None]
    spare.update(zip((key for key, _, _ in items), found, strict=True))  # now, as the copies may fail
    return found


def _little_used(memories: Iterable[Memory]) -> set[int]:
    """Return the allocations, by id, of which these memories leave more than APART_SHARE unused."""
    used: dict[int, int] = defaultdict(int)
    whole: dict[int, int] = {}
    for memory in memories:
        if isinstance(memory, Pinned):
            arena, nbytes = memory.arena, memory.array.size
            used[id(arena)] += nbytes + -nbytes % ALIGNMENT
            whole[id(arena)] = arena.size
    return {number for number, nbytes in used.items() if nbytes < (1 - APART_SHARE) * whole[number]}


def _copy_to_host(value: torch.Tensor, out: Bytes) -> Bytes:
    """Copy a tensor to host memory, in pieces if the device has no room to make it contiguous as a whole."""
    try:
        with out_of_memory():
            copy_into(value, out)
    except torch.OutOfMemoryError:
        if value.dim() == 0:
            raise
        size = len(out) // len(value)
        for i, piece in enumerate(value):
            _copy_to_host(piece, out[i * size : (i + 1) * size])
    return out


def _gather(
    sources: Column, destinations: Column, lengths: Column, device: torch.device, stream: torch.cuda.Stream
) -> None:
    """Begin to copy every tensor, address to address, with one kernel; `stream` is the current one."""
    which, at, sizes = _pieces(lengths.tobytes())
    table = torch.empty((3, len(which)), dtype=torch.int64, pin_memory=True)
    view = table.numpy()
    view[0], view[1], view[2] = sources[which] + at, destinations[which] + at, sizes
    on_device = table.to(device, non_blocking=True)
    start = on_device.data_ptr()
    kernels.launch("gather", (len(which),), stream, [start + 8 * len(which) * i for i in range(3)])


@lru_cache(maxsize=8)  # every save copies the same tensors, so nearly always the same lengths
def _pieces(lengths: bytes) -> tuple[Column, Column, Column]:
    """Cut tensors of these lengths (int64) for the blocks of a kernel: each piece's tensor, start in it, and length."""
    whole = np.frombuffer(lengths, np.int64)
    which, within = ragged(-(-whole // PIECE_BYTES))
    at = within * PIECE_BYTES
    return which, at, np.minimum(whole[which] - at, PIECE_BYTES)


def _free_bytes(device: torch.device) -> int:
    """Return device memory that is free, or that torch's allocator keeps for later."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _bytes_on(device: torch.device, *buffers: Buffers) -> int:
    """Return the device memory that buffers take; several may lie in one allocation."""
    storages = {
        m.untyped_storage().data_ptr(): m.untyped_storage().nbytes()
        for memories in buffers
        for m in memories.values()
        if isinstance(m, torch.Tensor) and m.device == device
    }
    return sum(storages.values())
