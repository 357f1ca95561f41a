"""Copies of CUDA tensors that a save reads in the background: on the device, or in pinned host memory.

A separate stream copies every tensor: with one kernel on the device, or over the bus. The training stream waits for the
event of that copy, so that work enqueued later may change the tensors. The host does not wait: `copy` returns within
milliseconds, and `wait_copied` waits in the background.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ...arrays import Bytes, Column
from ...errors import InvalidInputError
from ...state.values.arrays import Memory, as_memory, copy_into
from ...text import log
from . import kernels
from .engine import WORK_PER_BATCH_BYTE
from .pinned import ALIGNMENT, Buffers, Pinned, host_rooms
from .sources import Sources, TensorKey, require_whole, start_digests
from .streams import copy_async, out_of_memory, ragged, release_cached_memory

if TYPE_CHECKING:
    from .engine import CudaEngine

#: The most device memory that a save works in [bytes]: if its copies lie on the device, and if they lie on the host.
WORK_BYTES, HOST_WORK_BYTES = 1280 * 1024 * 1024, 480 * 1024 * 1024
#: The most that copies and work memory of a large state take, times the state; with the cache of torch, it is 2.1.
MAX_OF_STATE = 2.07
#: A smaller state may take twice its size and SMALL_WORK_BYTES, a batch of 128 MiB, but not more than SMALL_BYTES. Each
#: batch costs the host milliseconds.
SMALL_WORK_BYTES, SMALL_BYTES = 1_050_000_000, 9_540_000_000
#: The least that it works in beside copies on the device [bytes]: a batch of 32 MiB.
LEAST_WORK_BYTES = 224 * 1024 * 1024
#: Device memory that streams take for any size of batch [bytes]: torch's allocator takes at least 20 MiB at a time.
STREAMS_BYTES = 100 * 1024 * 1024
#: Tables of copies that are kept per device: for large and for small tensors, and for each of two target memories.
TABLES = 4
#: Bytes that one thread block copies.
PIECE_BYTES = 256 * 1024
#: Copies get a new layout once this share of the state is to lie apart, in the allocation of copies without bases.
APART_SHARE = 0.1
#: The share of free memory that `auto` may take.
AUTO_SHARE = 0.9


class DeviceEngines(Protocol):
    """The engines of all devices; see `engine.registry.Engines`."""

    def on(self, device: torch.device) -> CudaEngine: ...  # noqa: D102
    def lift_limits(self, saver: object) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class _CopyLayout:
    """How copies of sources share allocations.

    Attributes:
        version: of the set of keys whose copies lie apart.
        small, large: rows of the sources.
        groups: for each allocation: indices into `large`, their offsets in the allocation, and its size [bytes].
    """

    keys: Sequence[TensorKey]
    version: int
    small: Column
    large: Column
    groups: list[tuple[Column, Column, int]]


@dataclass(frozen=True, slots=True)
class _Rooms:
    """Memory for the copies of one device's tensors.

    `memories` makes one Memory per tensor. It takes time, so it is called after the copies have begun.
    """

    addresses: Column  # (n,)
    memories: Callable[[], list[Memory]]
    on_device: bool


class DeviceStaging:
    """Copies the tensors of one lineage of saves, device by device."""

    def __init__(self, engines: DeviceEngines, mode: str, *, twice: bool) -> None:
        self._engines, self._asked, self._twice = engines, mode, twice
        self._modes: dict[torch.device, str] = {}
        self._state_bytes: dict[torch.device, int] = {}
        self._copying: list[tuple[torch.device, torch.cuda.Event]] = []
        self._keep: list[Any] = []  # memory that running copies read or write
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._layouts: dict[torch.device, _CopyLayout] = {}
        self._sources: dict[torch.device, Sources] = {}  # of the last copies, without tensors
        self._apart: dict[torch.device, set[TensorKey]] = {}  # tensors whose copies lie apart, and become no bases
        self._apart_version = 0
        self._tables: dict[torch.device, deque[tuple[Column, torch.Tensor]]] = defaultdict(lambda: deque(maxlen=TABLES))
        self._releases = 1  # saves after which to free cached memory: that of older copies fits no later save

    def copy(
        self, sources: Sources, spare: Buffers, base: Buffers, delta_rejected: Container[TensorKey], inline_below: int
    ) -> Callable[[], list[Memory]]:
        """Begin to copy tensors: those below `inline_below` bytes to host memory, others by the staging mode.

        Args:
            spare, base: buffers by key: to be overwritten, and to be kept.
            delta_rejected: keys of tensors that will keep no base.

        Returns:
            A function that returns the memories, in order, and puts them into `spare`. It takes time, and may be called
            in the background. Memory on the device may be up to ALIGNMENT bytes longer than its tensor.

        Raises:
            InvalidInputError: a CUDA graph is being captured.
        """
        _require_no_capture()
        with torch.cuda.device(sources.device), torch.no_grad():
            layout = self._layout(sources, inline_below)
            rooms = self._rooms(sources, layout, spare, base, delta_rejected)
            try:
                with out_of_memory():
                    hosted = self._begin(sources, layout, rooms)
            except torch.OutOfMemoryError:
                rooms = self._without_memory(sources, layout, spare, base, delta_rejected)
                small = [_copy_to_host(value, np.empty(n, np.uint8)) for _, value, n in sources.all_of(layout.small)]
                hosted = partial(list, small)
        self._sources[sources.device] = Sources.of(sources.device, sources.keys, sources.nbytes, ())
        keys = sources.keys

        def memories() -> list[Memory]:
            found: list[Memory] = [None] * len(keys)
            for row, memory in zip(layout.large.tolist(), rooms.memories(), strict=True):
                found[row] = spare[keys[row]] = memory
            for row, memory in zip(layout.small.tolist(), hosted(), strict=True):
                found[row] = memory
            return found

        return memories

    def start_digests(
        self, sources: Sources, spans: tuple[Column, Column, Column], seed: int
    ) -> Callable[[], Bytes] | None:
        """Begin to hash spans of tensors: XXH3-128 under a seed.

        Args:
            spans: (n,) the tensor of each span, ascending; its start; its length [bytes].

        Returns:
            A function that waits for the digests, and returns them (n, 16). None: there are no spans, the kernels are
            not loaded yet, or the device has no memory for it.

        Raises:
            InvalidInputError: a CUDA graph is being captured.
        """
        device, (which, starts, lengths) = sources.device, spans
        _require_no_capture()
        if not kernels.loaded(device.index) or not len(which):
            return None
        with torch.cuda.device(device), torch.no_grad():
            training, stream = torch.cuda.current_stream(device), self._stream(device)
            self._keep.append(sources.keep)
            try:
                with out_of_memory():
                    addresses = self._addresses(sources)
                    stream.wait_stream(training)
                    with torch.cuda.stream(stream):
                        host = start_digests(addresses[which] + starts, lengths, seed, device, stream)
                        done = torch.cuda.Event()
                        done.record(stream)
            except torch.OutOfMemoryError:
                return None
            training.wait_event(done)
            self._copying.append((device, done))

        def found() -> Bytes:
            with torch.cuda.device(device):
                done.synchronize()
            digests: Bytes = host.numpy()
            return digests

        return found

    def _addresses(self, sources: Sources) -> Column:
        """Return the address of each tensor's bytes in C order; copy strided ones first."""
        if sources.addresses is None:
            return np.array([self._address(sources.tensor(row)) for row in range(len(sources.keys))], np.int64)
        for row in sources.in_pieces:
            sources.addresses[row] = self._address(sources.tensor(row))
        return sources.addresses

    def _begin(self, sources: Sources, layout: _CopyLayout, rooms: _Rooms) -> Callable[[], list[Bytes]]:
        """Enqueue all copies of a device on its copy stream; the training stream waits for them."""
        device = sources.device
        training, stream = torch.cuda.current_stream(device), self._stream(device)
        self._keep.append(sources.keep)  # their owner may free them now
        if not rooms.on_device:  # an interrupt may come before another reference to the target memory exists
            self._keep.append(rooms)
        by_torch = not kernels.loaded(device.index)
        addresses = None if by_torch else self._addresses(sources)
        stream.wait_stream(training)
        with torch.cuda.stream(stream):
            if addresses is None:
                hosted = self._copy_by_torch(sources, layout, rooms)
            else:
                hosted = self._copy_by_address(sources, layout, rooms, addresses, stream)
            done = torch.cuda.Event()
            done.record(stream)
        training.wait_event(done)
        self._copying.append((device, done))
        return hosted

    def _copy_by_address(
        self, sources: Sources, layout: _CopyLayout, rooms: _Rooms, addresses: Column, stream: torch.cuda.Stream
    ) -> Callable[[], list[Bytes]]:
        small, large, nbytes = layout.small, layout.large, sources.nbytes
        hosted = self._copy_small(addresses[small], nbytes[small], sources.device, stream)
        if rooms.on_device:
            self._gather(addresses[large], rooms.addresses, nbytes[large], sources.device, stream)
        else:
            columns = (rooms.addresses, addresses[large], nbytes[large])
            for place, source, size in zip(*(column.tolist() for column in columns), strict=True):
                copy_async(place, source, size, stream)
        return hosted

    def _copy_by_torch(self, sources: Sources, layout: _CopyLayout, rooms: _Rooms) -> Callable[[], list[Bytes]]:
        """Begin the copies with one call of torch per tensor: our kernels are not loaded yet."""
        small, places = _small_places(sources.nbytes[layout.small])
        host = torch.empty(small, dtype=torch.uint8, device="cpu", pin_memory=True)
        into = [host[at : at + n] for at, n in zip(places.tolist(), sources.nbytes[layout.small].tolist(), strict=True)]
        for memory in rooms.memories():
            into.append(torch.from_numpy(memory.array) if isinstance(memory, Pinned) else memory)
        rows = np.concatenate([layout.small, layout.large])
        for target, (_, value, size) in zip(into, sources.all_of(rows), strict=True):
            self._keep.append(as_memory(value, lambda _: True))
            target[:size].copy_(self._keep[-1], non_blocking=True)
        return partial(list, [view.numpy() for view in into[: len(layout.small)]])

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _address(self, value: torch.Tensor) -> int:
        """Return the address of a tensor's bytes in C order; the copy of a strided one lives until `wait_copied`."""
        if value.is_contiguous() and not value.is_conj() and not value.is_neg():
            address = value.data_ptr()
            require_whole(value)  # after the address was read: if it is freed now, the address stays mapped
            return address
        self._keep.append(as_memory(value, lambda _: True))
        return int(self._keep[-1].data_ptr())

    def prepare(
        self,
        sources: Sources,
        spare: Buffers,
        base: Buffers,
        delta_rejected: Container[TensorKey],
        inline_below: int,
        *,
        is_early: bool = False,
    ) -> None:
        """Allocate memory for the copies of tensors ahead: page-lock it, or put it into torch's device cache.

        Args:
            is_early: only page-lock memory. Leave it to the first save whether to copy on the device.
        """
        with torch.cuda.device(sources.device):
            layout = self._layout(sources, inline_below)
            if not len(layout.large):
                return
            if self._mode(sources, layout, spare, base, is_early=is_early) == "host":
                _host_rooms(sources, layout, spare, base, delta_rejected)
                return
            needed = sum(nbytes for *_, nbytes in layout.groups)
            if not is_early and needed <= AUTO_SHARE * _free_bytes(sources.device):
                with suppress(torch.OutOfMemoryError):  # then the save allocates it
                    self._device_rooms(sources, layout, spare)

    def prepare_next(
        self,
        spare: Buffers,
        base: Buffers,
        delta_rejected: Container[TensorKey],
        inline_below: int,
        *,
        is_early: bool = False,
    ) -> None:
        """Allocate memory ahead for the next save of the same tensors; `is_early` as in `prepare`."""
        for sources in list(self._sources.values()):
            self.prepare(sources, spare, base, delta_rejected, inline_below, is_early=is_early)

    def wait_copied(self, spare: Buffers, base: Buffers) -> None:
        """Wait for all copies, then set how much device memory the save may work in."""
        self.wait()
        for device, mode in self._modes.items():
            state = self._state_bytes.get(device, 0)
            most = max(int(MAX_OF_STATE * state), min(2 * state + SMALL_WORK_BYTES, SMALL_BYTES))
            left = most - _bytes_on(device, spare, base) - STREAMS_BYTES
            left = min(left, WORK_PER_BATCH_BYTE * state)  # a batch never has more than what was copied
            work = min(max(left, LEAST_WORK_BYTES), int(AUTO_SHARE * _free_bytes(device)))
            self._engines.on(device).limit(self, HOST_WORK_BYTES if mode == "host" else work)

    def wait(self) -> None:
        """Wait for all copies and digests."""
        for device, event in self._copying:
            with torch.cuda.device(device):
                event.synchronize()
        self._copying.clear()
        self._keep.clear()

    def release_memory(self, spare: Buffers) -> None:
        """Release spare device memory after a save, committed or not: its content is not needed."""
        self._engines.lift_limits(self)
        with suppress(RuntimeError):  # a device that has failed
            self.wait()
        for key in [key for key, memory in spare.items() if isinstance(memory, torch.Tensor)]:
            del spare[key]
        if self._releases:
            self._releases -= 1
            for device in self._apart:
                release_cached_memory(device)

    # -- where

    def _mode(
        self, sources: Sources, layout: _CopyLayout, spare: Buffers, base: Buffers, *, is_early: bool = False
    ) -> str:
        """Decide where a device's copies go: at its first save, and when what is copied grows by 10 % or halves.

        Before it, "auto" only guesses (`is_early`): what fills the device now may be gone then, or the reverse.
        """
        device, needed = sources.device, int(sources.nbytes[layout.large].sum())
        before = self._state_bytes.get(device, 0)
        if device in self._modes and before / 2 <= needed <= 1.1 * before:
            return self._modes[device]
        mode = self._asked
        if mode == "auto":
            free = _free_bytes(device) + _bytes_on(device, spare, base)
            wanted = (2 if self._twice else 1) * needed + WORK_BYTES
            mode = "device" if wanted <= AUTO_SHARE * free else "host"
            if is_early:
                return mode
            log.info(
                "staging=%s on %s: copies of %.1f GB of state, and work buffers, take up to %.1f GB; %.1f GB is free",
                mode,
                device,
                needed / 1e9,
                wanted / 1e9,
                free / 1e9,
            )
        if needed < before:
            self._releases = 2
        self._modes[device], self._state_bytes[device] = mode, needed
        return mode

    def _layout(self, sources: Sources, inline_below: int) -> _CopyLayout:
        """Return the layout of the copies; it rarely changes, so that the same memory fits them again."""
        device = sources.device
        known = self._layouts.get(device)
        if known is not None and known.keys is sources.keys and known.version == self._apart_version:
            return known
        small = np.flatnonzero(sources.nbytes < inline_below)
        large = np.flatnonzero(sources.nbytes >= inline_below)
        apart = self._apart.setdefault(device, set())
        is_apart = np.array([sources.keys[row] in apart for row in large.tolist()], bool)
        sizes = sources.nbytes[large] + -sources.nbytes[large] % ALIGNMENT
        groups = [
            (rows, np.cumsum(sizes[rows]) - sizes[rows], int(sizes[rows].sum()))
            for rows in (np.flatnonzero(~is_apart), np.flatnonzero(is_apart))
        ]
        self._layouts[device] = _CopyLayout(sources.keys, self._apart_version, small, large, groups)
        return self._layouts[device]

    def lay_apart(self, rejected: Mapping[torch.device, Mapping[TensorKey, int]]) -> None:
        """Lay copies of tensors with rejected deltas (key -> bytes, by device) apart, once they are many."""
        for device, nbytes in rejected.items():
            before = self._apart.setdefault(device, set())
            more = nbytes.keys() - before
            if sum(nbytes[key] for key in more) > APART_SHARE * self._state_bytes.get(device, 0):
                before |= more
                self._apart_version += 1
                self._releases = 2

    # -- copies

    def _rooms(
        self, sources: Sources, layout: _CopyLayout, spare: Buffers, base: Buffers, delta_rejected: Container[TensorKey]
    ) -> _Rooms:
        """Return memory for the copies, on the device or on the host."""
        if len(layout.large) and self._mode(sources, layout, spare, base) == "device":
            try:
                with out_of_memory():
                    return self._device_rooms(sources, layout, spare)
            except torch.OutOfMemoryError:
                self._stage_on_host(sources.device, spare, base)
        rooms = _host_rooms(sources, layout, spare, base, delta_rejected)
        return _Rooms(np.array([room.array.ctypes.data for room in rooms], np.int64), lambda: list(rooms), False)

    def _stage_on_host(self, device: torch.device, spare: Buffers, base: Buffers) -> None:
        """Stage on the host from now on: the device is full."""
        for memories in (spare, base):
            for key in [k for k, m in memories.items() if isinstance(m, torch.Tensor) and m.device == device]:
                del memories[key]
        self._modes[device] = "host"
        log.warning("%s: out of memory for copies of the state; staging=host from here on", device)
        release_cached_memory(device)

    def _without_memory(
        self, sources: Sources, layout: _CopyLayout, spare: Buffers, base: Buffers, delta_rejected: Container[TensorKey]
    ) -> _Rooms:
        """Copy to the host while the caller waits: the device has no room even for tables."""
        self._stage_on_host(sources.device, spare, base)
        if sources.device in self._streams:  # copies that have begun write to the same memory
            self._streams[sources.device].synchronize()
        rooms = _host_rooms(sources, layout, spare, base, delta_rejected)
        for (_, value, _), room in zip(sources.all_of(layout.large), rooms, strict=True):
            _copy_to_host(value, room.array)
        return _Rooms(np.zeros(0, np.int64), lambda: list(rooms), False)

    def _device_rooms(self, sources: Sources, layout: _CopyLayout, spare: Buffers) -> _Rooms:
        """Make two allocations: for copies that become bases, and for others. One per tensor would take a millisecond.

        The spare buffers of the device are released first, so that torch returns the same memory. It belongs to the
        copy stream: the training would take small pieces from memory of its own stream between saves, and the rest
        would fit no copy again.
        """
        device = sources.device
        for key in [k for k, m in spare.items() if isinstance(m, torch.Tensor) and m.device == device]:
            del spare[key]
        addresses = np.empty(len(layout.large), np.int64)
        together: list[torch.Tensor] = []  # of each group
        for rows, offsets, nbytes in layout.groups:
            with torch.cuda.stream(self._stream(device)):
                together.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
            addresses[rows] = together[-1].data_ptr() + offsets

        def memories() -> list[Memory]:
            views: list[Memory] = [None] * len(addresses)
            for (rows, offsets, nbytes), memory in zip(layout.groups, together, strict=True):
                sizes = np.diff(np.append(offsets, nbytes))
                for row, piece in zip(rows.tolist(), memory.split_with_sizes(sizes.tolist()), strict=True):
                    views[row] = piece
            return views

        return _Rooms(addresses, memories, True)

    def _copy_small(
        self, sources: Column, lengths: Column, device: torch.device, stream: torch.cuda.Stream
    ) -> Callable[[], list[Bytes]]:
        """Begin to copy all small tensors: gathered on the device, then one copy into pinned memory."""
        if not len(sources):
            return list
        nbytes, places = _small_places(lengths)
        together = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._gather(sources, together.data_ptr() + places, lengths, device, stream)
        host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        view = host.copy_(together, non_blocking=True).numpy()
        return lambda: [view[at : at + n] for at, n in zip(places.tolist(), lengths.tolist(), strict=True)]

    def _gather(
        self, sources: Column, destinations: Column, lengths: Column, device: torch.device, stream: torch.cuda.Stream
    ) -> None:
        """Begin to copy every tensor, address to address, with one kernel; `stream` is the current one.

        The table of pieces stays on the device: tensors and copies mostly have the same addresses as two saves ago.
        """
        wanted = np.stack([sources, destinations, lengths])
        known = [table for columns, table in self._tables[device] if np.array_equal(columns, wanted)]
        table = known[0] if known else _table_of(wanted, device)
        if not known:
            self._tables[device].append((wanted, table))
        count, start = table.shape[1], table.data_ptr()
        kernels.launch("gather", (count,), stream, [start + 8 * count * i for i in range(3)])


def _require_no_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise InvalidInputError("save was called while a CUDA graph is being captured; call it between replays")


def _small_places(lengths: Column) -> tuple[int, Column]:
    """Return the bytes for all small tensors, and the offset of each (n,)."""
    rooms = (lengths + 15) // 16 * 16
    return int(rooms.sum()), np.cumsum(rooms) - rooms


def _host_rooms(
    sources: Sources, layout: _CopyLayout, spare: Buffers, base: Buffers, delta_rejected: Container[TensorKey]
) -> list[Pinned]:
    keys = [sources.keys[row] for row in layout.large.tolist()]
    return host_rooms(sources.device, (keys, sources.nbytes[layout.large]), spare, base, delta_rejected)


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


def _table_of(columns: Column, device: torch.device) -> torch.Tensor:
    """Return pieces of tensors, (3, n) int64 on the device: addresses, addresses of copies, lengths."""
    sources, destinations, lengths = columns
    which, at, sizes = _pieces(lengths.tobytes())
    table = torch.empty((3, len(which)), dtype=torch.int64, device="cpu", pin_memory=True)
    view = table.numpy()
    view[0], view[1], view[2] = sources[which] + at, destinations[which] + at, sizes
    return table.to(device, non_blocking=True)


@lru_cache(maxsize=8)  # every save copies the same tensors, so nearly always the same lengths
def _pieces(lengths: bytes) -> tuple[Column, Column, Column]:
    """Cut tensors of these lengths (int64) into pieces: return each piece's tensor, start in it, and length."""
    whole = np.frombuffer(lengths, np.int64)
    which, within = ragged(-(-whole // PIECE_BYTES))
    at = within * PIECE_BYTES
    return which, at, np.minimum(whole[which] - at, PIECE_BYTES)


def _free_bytes(device: torch.device) -> int:
    """Return device bytes that are free, or in the cache of torch's allocator."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _bytes_on(device: torch.device, *buffers: Buffers) -> int:
    """Return the device bytes of buffers; those in one allocation count it once."""
    storages = {
        m.untyped_storage().data_ptr(): m.untyped_storage().nbytes()
        for memories in buffers
        for m in memories.values()
        if isinstance(m, torch.Tensor) and m.device == device
    }
    return sum(storages.values())
