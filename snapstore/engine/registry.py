"""Engines: the CPU engine and the CUDA engines of one repository, each found by the memory that it works in.

In: arrays, tensors, devices. Out: their engine. A CUDA engine is made when a tensor on its device is first seen.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Bytes
from ..errors import CapabilityError, SnapstoreError
from ..format.blobs.codecs import nvcomp
from ..state.values.arrays import Memory, as_memory
from ..storage.base import ObjectStore
from ..text import human_bytes, log
from ..threads import imported
from .base import Engine
from .cpu import CpuEngine
from .rates import codec_for, measure

if TYPE_CHECKING:
    import torch

    from .cuda.engine import CudaEngine


@dataclass(slots=True)
class Engines:
    """The engines of one repository: one for host memory and one per CUDA device.

    Args:
        digest_seed: the repository's.
        threads: of the CPU engine; None: SNAPSTORE_THREADS, else one per core.
        codec: "portable", "ans" or "auto": how new blobs are coded; see `SaveOptions`.
        required: whether the caller asked for the GPU: then a device without an engine is an error.
    """

    digest_seed: int
    threads: int | None = None
    codec: str = "portable"
    required: bool = False
    cpu: CpuEngine = field(init=False)
    _cuda: dict[int, CudaEngine] = field(init=False, default_factory=dict)
    _loaded: set[int] = field(init=False, default_factory=set)  # devices whose kernels are loaded
    _lacking: str | None = field(init=False, default=None)  # why there is no CUDA engine
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _pid: int = field(init=False, default_factory=os.getpid)
    _stores_raw: bool | None = field(init=False, default=None)  # None: not measured yet

    def __post_init__(self) -> None:
        self.cpu = CpuEngine(self.digest_seed, self.threads)
        if self.codec != "auto":
            self._stores_raw = False

    def stores_raw(self, store: ObjectStore) -> bool:
        """Return whether saves store host chunks uncompressed; with "auto", the first call measures it."""
        with self._lock:
            if self._stores_raw is None:
                self._stores_raw = False
                try:
                    rates = measure(store, self.threads)
                except SnapstoreError as error:
                    log.warning("codec='auto': the store cannot be measured, so chunks are encoded: %s", error)
                    return False
                self._stores_raw = codec_for(rates.write, rates.encode) == "raw"
                found = human_bytes(int(rates.write)), human_bytes(int(rates.encode))
                done = "stored as they are" if self._stores_raw else "encoded"
                log.info("codec='auto': the store takes %s/s, the engine encodes %s/s: chunks are %s", *found, done)
            return self._stores_raw

    def of(self, memory: Memory) -> Engine:
        """Return the engine that works in a memory."""
        if isinstance(memory, np.ndarray):
            return self.cpu
        return self.on(memory.device)

    def memory_of(self, value: Any) -> Memory:
        """Return an array's own bytes if they can be read in place, else a copy; no write to them is pending."""
        memory = as_memory(value, self.on_device)
        if not isinstance(memory, np.ndarray):
            self.on(memory.device).sync()
        return memory

    def on(self, device: torch.device) -> CudaEngine:
        """Return the engine of a CUDA device; wait until its kernels are loaded.

        Raises:
            CapabilityError: CuPy or nvCOMP are not installed, or do not fit this machine.
        """
        if device.index in self._loaded and (known := self._cuda.get(device.index)):  # asked for each tensor
            return known
        engine = self._engine(device.index)
        if device.index not in self._loaded:
            from .cuda import wait_loaded

            try:
                wait_loaded(device.index)
            except CapabilityError as error:
                self._cuda.pop(device.index, None)
                self._note_lack(error)
                raise
            self._loaded.add(device.index)
        return engine

    def _engine(self, device: int) -> CudaEngine:
        from .cuda import engine_for

        with self._lock:
            if device not in self._cuda:
                self._cuda[device] = engine_for(device, "ans" if self.codec == "ans" else "portable", self.cpu)
            return self._cuda[device]

    def _note_lack(self, error: CapabilityError) -> None:
        """Send CUDA tensors through host memory from now on; log it once."""
        if self._lacking is None and not self.required:
            log.warning("CUDA tensors are compressed on the CPU: %s", error)
        self._lacking = str(error)

    def start_loading(self) -> None:
        """Begin to load the kernels of every CUDA device where torch has memory, so that no save waits for it."""
        torch = imported("torch")
        if torch is not None and torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                with suppress(CapabilityError, RuntimeError):  # a save raises it, or goes on without the GPU
                    if torch.cuda.memory_allocated(index):  # some allocators do not tell
                        self.on_device(torch.device("cuda", index))

    @property
    def has_devices(self) -> bool:
        """Whether a CUDA device has an engine by now."""
        return bool(self._cuda)

    def for_ans(self) -> CudaEngine:
        """Return an engine on the current CUDA device that codes in ANS.

        Raises:
            CapabilityError: there is no device, or a library is missing; the message says what to install.
        """
        from .cuda import current_engine

        return current_engine("ans", self.cpu)

    def on_device(self, device: torch.device) -> bool:
        """Return whether a device has an engine; if not, its tensors go through host memory.

        It does not wait for kernels: `on` may still find that they cannot be loaded.

        Raises:
            CapabilityError: the device has no engine, and the caller asked for the GPU.
        """
        if device.type != "cuda":
            return False
        if device.index in self._cuda:
            return True
        if self._lacking is None:
            try:
                self._engine(device.index)
                return True
            except CapabilityError as error:
                self._note_lack(error)
                if self.required:
                    raise
        if self.required:
            raise CapabilityError(self._lacking)
        return False

    def in_background(self) -> AbstractContextManager[None]:
        """Let this background thread work on devices while another thread captures a CUDA graph."""
        if not self.has_devices:
            return nullcontext()
        from .cuda import beside_captures

        return beside_captures()

    def lift_limits(self, saver: object) -> None:
        """Remove the limits of a save's device memory; without limits, do nothing."""
        for engine in list(self._cuda.values()):
            engine.limit(saver, None)

    def release_memory(self, buffers: Sequence[Bytes] = (), *, saved: bool = False) -> None:
        """Release unused device memory after a save (`saved`) or a restore; give each buffer to its engine."""
        for engine in list(self._cuda.values()):
            for buffer in buffers:
                engine.give_back(buffer)
            engine.release_memory(saved=saved)

    def close(self) -> None:
        """Release threads and memory of all engines."""
        self.cpu.close()
        if os.getpid() == self._pid:  # CUDA does not survive a fork
            for engine in list(self._cuda.values()):
                engine.close()


def _nvcomp_decoder() -> nvcomp.BlockDecoder:
    from .cuda import require

    require()
    from .cuda.nvcomp_host import decode_blocks

    return decode_blocks


nvcomp.decode_with(_nvcomp_decoder)
