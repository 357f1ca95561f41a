"""The peers: other ways to save and load one whole state, with as many threads and on the same disk as snapstore."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zstandard

from benchmarks.data import tensors_of

THREADS = 2
Tree = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """One way to write a state to a path and read it back."""

    name: str
    save: Callable[[Tree, Path], None]
    load: Callable[[Path], Any]


def stored_bytes(path: Path) -> int:
    """Return the bytes on disk under a path."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def _torch_save(tree: Tree, path: Path) -> None:
    torch.save(tree, path)


def _torch_load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def _zstd_save(tree: Tree, path: Path) -> None:
    compressor = zstandard.ZstdCompressor(level=3, threads=THREADS)
    with path.open("wb") as file, compressor.stream_writer(file) as stream:
        buffer = io.BytesIO()  # torch.save seeks
        torch.save(tree, buffer)
        stream.write(buffer.getbuffer())


def _zstd_load(path: Path) -> Any:
    with path.open("rb") as file:
        data = zstandard.ZstdDecompressor().stream_reader(file).read()
    return torch.load(io.BytesIO(data), weights_only=False)


def _flat(tree: Tree) -> dict[str, torch.Tensor]:
    """Return all tensors by name, tied ones once: safetensors refuses ties."""
    flat, seen = {}, set()
    for name, tensor in tensors_of(tree):
        if tensor.data_ptr() not in seen or not tensor.nbytes:
            flat[name] = tensor.contiguous()
            seen.add(tensor.data_ptr())
    return flat


def _safetensors_save(tree: Tree, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(_flat(tree), path)


def _safetensors_load(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def _dcp_save(extensions: list[Any] | None) -> Callable[[Tree, Path], None]:
    def save(tree: Tree, path: Path) -> None:
        from torch.distributed.checkpoint import state_dict_saver
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        shutil.rmtree(path, ignore_errors=True)
        writer = FileSystemWriter(path, thread_count=THREADS, _extensions=extensions)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_saver.save({"flat": _flat(tree)}, storage_writer=writer, no_dist=True)

    return save


def _dcp_load(like: dict[str, torch.Tensor]) -> Callable[[Path], Any]:
    def load(path: Path) -> Any:
        from torch.distributed.checkpoint import state_dict_loader
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        into = {"flat": {name: torch.empty_like(tensor) for name, tensor in like.items()}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_loader.load(into, storage_reader=FileSystemReader(path), no_dist=True)
        return into

    return load


def _zipnn_save(tree: Tree, path: Path) -> None:
    from zipnn import ZipNN

    flat = _flat(tree)
    head = json.dumps({name: [str(t.dtype), list(t.shape)] for name, t in flat.items()}).encode()
    with path.open("wb") as file:  # the header that safetensors has: without it, tensors would have no names
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in flat.values():
            coder = ZipNN(input_format="byte", bytearray_dtype="float32", threads=THREADS)
            data = coder.compress(bytearray(tensor.reshape(-1).view(torch.uint8).numpy()))
            file.write(len(data).to_bytes(8, "little"))
            file.write(data)


def _zipnn_load(path: Path) -> Any:
    from zipnn import ZipNN

    out = []
    with path.open("rb") as file:
        json.loads(file.read(int.from_bytes(file.read(8), "little")))
        while length := file.read(8):
            coder = ZipNN(input_format="byte", bytearray_dtype="float32", threads=THREADS)
            out.append(coder.decompress(file.read(int.from_bytes(length, "little"))))
    return out


def peers(tree: Tree) -> list[Peer]:
    """Every peer that works here."""
    from torch.distributed.checkpoint._extension import ZStandard

    found = [
        Peer("torch.save", _torch_save, _torch_load),
        Peer("torch.save + zstd -3", _zstd_save, _zstd_load),
        Peer("safetensors", _safetensors_save, _safetensors_load),
        Peer("DCP", _dcp_save(None), _dcp_load(_flat(tree))),
        Peer("DCP + ZStandard extension", _dcp_save([ZStandard()]), _dcp_load(_flat(tree))),
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import zipnn  # noqa: F401
    except ImportError:
        return found
    return [*found, Peer("ZipNN", _zipnn_save, _zipnn_load)]
