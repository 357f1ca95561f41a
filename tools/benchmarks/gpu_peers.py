"""The peers of `tools/bench gpu`: coders that take one tensor at a time, and the whole-state savers of torch.

The nvCOMP recipe is the one of NVIDIA's blog ("Cut Checkpoint Costs with About 30 Lines of Python and NVIDIA nvCOMP",
2026): one Codec call a tensor, over its bytes, with the defaults. "typed" tells ANS the element type as well, which
the recipe does not.
"""

from __future__ import annotations

import inspect
import os
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks.gpu_limits import MiB, fsync_tree, median, seconds, synchronize
from benchmarks.gpu_train import State, tensors

CORES = os.cpu_count() or 1
DCP_THREADS = min(8, CORES)
CALLS = 3  # of torch.save, DCP and their loads, after one that is not counted
RECIPES = ("nvCOMP Zstd", "nvCOMP ANS")  # the ones that snapstore must beat
_TYPES = {torch.float32: "<f4", torch.bfloat16: "<f2", torch.float16: "<f2"}


@dataclass(frozen=True)
class Coder:
    """A peer that codes tensors one by one; `size` and `pieces` take what `encode` returns."""

    name: str
    encode: Callable[[torch.Tensor], Any]
    size: Callable[[Any], int]
    pieces: Callable[[Any], Iterable[Any]]

    def sizes(self, state: State) -> dict[str, int]:
        """Coded bytes by kind of tensor."""
        return {kind: sum(self.size(self.encode(t)) for t in group.values()) for kind, group in state.items()}

    def save(self, state: State, path: Path) -> None:
        """One file with everything, durable."""
        with path.open("wb") as file:
            for tensor in tensors(state):
                for piece in self.pieces(self.encode(tensor)):
                    file.write(piece)
        fsync_tree(path)


def better_recipes(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """For every regime and gap the row of the recipe that stores less."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    for row in rows:
        case = (row["regime"], row["gap"])
        if row["who"] in RECIPES and (case not in found or row["stored_bytes"] < found[case]["stored_bytes"]):
            found[case] = row
    return found


class HostBytes:
    """A tensor's bytes in host memory; those of a device's tensor are valid until the next call."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def __call__(self, tensor: torch.Tensor) -> Any:
        """(nbytes,) uint8."""
        flat = tensor.reshape(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            return flat.numpy()
        if self._room.numel() < flat.numel():
            self._room = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
        return self._room[: flat.numel()].copy_(flat).numpy()


def coders(device: torch.device) -> tuple[list[Coder], dict[str, str]]:
    """Return the peers that work here, and why the others do not."""
    found, missing = [_zstd()], {}
    for name, algorithm, typed in ((*RECIPES[:1], "Zstd", False), (*RECIPES[1:], "ANS", False),
                                   ("nvCOMP ANS typed", "ANS", True)):  # fmt: skip
        try:
            found.append(_nvcomp(name, algorithm, typed, device))
        except Exception as error:  # noqa: BLE001  one peer less
            missing[name] = f"{type(error).__name__}: {error}"
    try:
        found.append(_zipnn())
    except Exception as error:  # noqa: BLE001  one peer less
        missing["ZipNN"] = f"{type(error).__name__}: {error}"
    return found, missing


def _nvcomp(name: str, algorithm: str, typed: bool, device: torch.device) -> Coder:
    if device.type != "cuda":
        raise RuntimeError("needs CUDA")
    nvcomp = import_module("nvidia.nvcomp")
    codecs: dict[str, Any] = {}

    def encode(tensor: torch.Tensor) -> Any:
        kind = _TYPES[tensor.dtype] if typed else ""
        if kind not in codecs:
            codecs[kind] = nvcomp.Codec(algorithm=algorithm, **({"data_type": kind} if kind else {}))
        return codecs[kind].encode(nvcomp.as_array(tensor.reshape(-1).view(torch.uint8)))

    coder = Coder(name, encode, lambda coded: int(coded.buffer_size), lambda coded: [np.asarray(coded.cpu())])
    probe = encode(torch.arange(1 << 18, dtype=torch.float32, device=device))  # else fails on the first real tensor
    if coder.size(probe) != sum(piece.nbytes for piece in coder.pieces(probe)):
        raise RuntimeError("nvCOMP's buffer_size is not the size of what it coded")
    return coder


def _zstd() -> Coder:
    """Level 1, 1 MiB frames on all cores."""
    pool, local, host = ThreadPoolExecutor(CORES), threading.local(), HostBytes()

    def frame(data: Any) -> bytes:
        if not hasattr(local, "compressor"):
            local.compressor = zstandard.ZstdCompressor(level=1)
        coded: bytes = local.compressor.compress(data)
        return coded

    def encode(tensor: torch.Tensor) -> list[bytes]:
        data = host(tensor)
        return list(pool.map(frame, [data[i : i + MiB] for i in range(0, data.size, MiB)]))

    return Coder("zstd -1", encode, lambda coded: sum(map(len, coded)), lambda coded: coded)


def _zipnn() -> Coder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from zipnn import ZipNN
    host = HostBytes()

    def encode(tensor: torch.Tensor) -> bytes:
        dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[tensor.dtype]
        coder = ZipNN(input_format="byte", bytearray_dtype=dtype, threads=CORES)
        coded: bytes = coder.compress(bytearray(host(tensor)))
        return coded

    return Coder("ZipNN", encode, len, lambda coded: [coded])


# -- times of whole saves


def times(state: State, device: torch.device, folder: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a row for every peer; all saves are durable. A peer that fails has its error in its row."""
    found, missing = coders(device)
    calls: dict[str, Callable[[], Mapping[str, Any]]] = {
        "torch.save": lambda: _torch_save(state, device, folder / "torch.pt"),
        "dcp.save, dcp.load": lambda: _dcp(state, device, folder / "dcp"),
        "dcp.async_save, staging waited for": lambda: _dcp_async(state, device, folder / "dcp-async", False),
        "dcp.async_save, staging in a thread": lambda: _dcp_async(state, device, folder / "dcp-async", True),
    }
    for coder in found:
        calls[coder.name] = lambda coder=coder: _coded(coder, state, device, folder / "coded")  # type: ignore[misc]
    rows: list[dict[str, Any]] = []
    for name, call in calls.items():
        try:
            row = {key: round(value, 5) for key, value in call().items()}
        except Exception as error:  # noqa: BLE001  recorded, the others go on
            row = {"error": f"{type(error).__name__}: {error}"}
        rows.append({"peer": name, **row})
        say(f"{name}: {row}")
        for path in folder.iterdir():
            _remove(path)
    return rows + [{"peer": name, "skipped": reason} for name, reason in missing.items()]


def _torch_save(state: State, device: torch.device, path: Path) -> dict[str, float]:
    def save() -> None:
        torch.save(state, path)
        fsync_tree(path)

    total = _median_of_saves(device, save, path)
    return {"total_s": total, "bytes": _stored(path), "load_s": median(device, lambda: torch.load(path), CALLS)}


def _median_of_saves(device: torch.device, save: Callable[[], object], path: Path) -> float:
    """Return the median time of saves to a path at which there is nothing, after one that is not counted."""
    times = []
    for _ in range(1 + CALLS):
        _remove(path)
        times.append(seconds(device, save))
    return statistics.median(times[1:])


def _coded(coder: Coder, state: State, device: torch.device, path: Path) -> dict[str, float]:
    coder.encode(tensors(state)[0])
    encode_s = seconds(device, lambda: [coder.size(coder.encode(tensor)) for tensor in tensors(state)])
    return {"encode_s": encode_s, "total_s": seconds(device, lambda: coder.save(state, path)), "bytes": _stored(path)}


def _dcp(state: State, device: torch.device, path: Path) -> dict[str, float]:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        total = _median_of_saves(
            device, lambda: state_dict_saver.save(state, storage_writer=_writer(path), no_dist=True), path
        )
        into = {kind: {name: torch.empty_like(t) for name, t in group.items()} for kind, group in state.items()}
        load = median(
            device, lambda: state_dict_loader.load(into, storage_reader=FileSystemReader(path), no_dist=True), CALLS
        )
    return {"total_s": total, "bytes": _stored(path), "load_s": load, "threads": DCP_THREADS}


def _dcp_async(state: State, device: torch.device, path: Path, in_thread: bool) -> dict[str, float]:
    """`wait_s`: until async_save returns; `safe_s`: until the state may change; `first_`, then the mean of two warm."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import async_save

    cuda = device.type == "cuda"
    stager = DefaultStager(StagingOptions(
        use_pinned_memory=cuda, use_shared_memory=True, use_async_staging=in_thread, use_non_blocking_copy=cuda
    ))  # fmt: skip
    inner: Any = stager._state_dict_stager  # torch 2.11 clears its table of copiers after each save
    inner._deepcopy_dispatch = _Kept(inner._deepcopy_dispatch)
    no_dist = {"no_dist": True} if "no_dist" in inspect.signature(async_save).parameters else {}
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(3):
            synchronize(device)
            began = time.perf_counter()
            given: Any = async_save(
                state, storage_writer=_writer(path / str(number)), async_stager=stager, **no_dist  # type: ignore[arg-type]
            )  # fmt: skip
            wait_s = time.perf_counter() - began
            if in_thread:
                given.staging_completion.result()
            safe_s = time.perf_counter() - began
            (given.upload_completion if in_thread else given).result()
            rows.append((wait_s, safe_s, time.perf_counter() - began))
    stager.close()
    warm = np.mean(np.array(rows[1:]), axis=0).tolist()
    names = ("wait_s", "safe_s", "total_s")
    return {f"first_{n}": v for n, v in zip(names, rows[0], strict=True)} | dict(zip(names, warm, strict=True))


class _Kept(dict[Any, Any]):
    """A table that cannot be cleared."""

    def clear(self) -> None:
        """Do nothing."""


def _writer(path: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    return FileSystemWriter(path, thread_count=DCP_THREADS, sync_files=True)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _stored(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size
