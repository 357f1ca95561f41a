"""Boxes of any sharding restore to device memory to the bit: rows, columns, parts of chunks, and inline arrays."""

from dataclasses import replace

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from kit.rank_snapshots import RankWriter, columns, rows
from snapstore import Repository
from snapstore.storage.memory import MemoryStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WHOLE = {
    "rows": torch.arange(60 * 70, dtype=torch.float32).reshape(60, 70).sin(),
    "odd": torch.arange(13 * 7 * 301, dtype=torch.float32).reshape(13, 7, 301).cos().to(torch.bfloat16),
    "bytes": (torch.arange(3 * 1001) % 251).to(torch.uint8).reshape(3, 1001),
    "inline": torch.arange(6 * 9, dtype=torch.float64).reshape(6, 9),
}
DTYPES = {"<f4": "float32", "<u2": "bfloat16", "|u1": "uint8", "<f8": "float64"}


def of_tensors(contents):
    """Return a manifest of arrays, changed into a manifest of tensors."""
    entries = [msgspec.structs.replace(e, kind="tensor", dtype=DTYPES[e.dtype]) for e in contents.tensors]
    return replace(contents, tensors=entries, tree=tensor_nodes(contents.tree))


def tensor_nodes(node):
    if type(node) is list and node[:1] == ["array"]:
        return ["tensor", node[1], False]
    return [tensor_nodes(child) for child in node] if type(node) is list else node


def arrays():
    whole = {
        name: value.view(torch.uint16) if value.dtype is torch.bfloat16 else value for name, value in WHOLE.items()
    }
    return {name: value.numpy() for name, value in whole.items()}


class Part:
    """A box of a tensor on the device, with the methods that DCP calls; a DTensor would need a process group."""

    def __init__(self, whole, offsets, sizes):
        self.whole, self.offsets, self.dtype = whole, offsets, whole.dtype
        self.local = torch.zeros(sizes, dtype=whole.dtype, device="cuda")

    def size(self):
        return self.whole.shape

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size(self.offsets), self.local.shape)]

    def __get_tensor_shard__(self, index):
        return self.local

    def expected(self):
        place = zip(self.offsets, self.local.shape, strict=True)
        return self.whole[tuple(slice(at, at + size) for at, size in place)]


def parts():
    """Yield boxes: a third of the rows, of the columns, and of both. They begin and end within chunks."""
    for name, whole in WHOLE.items():
        first, second = (max(1, size // 3) for size in whole.shape[:2])
        rest = tuple(whole.shape[2:])
        none = (0,) * len(rest)
        yield f"{name}, rows", name, Part(whole, (first, 0, *none), (first, whole.shape[1], *rest))
        yield f"{name}, columns", name, Part(whole, (0, second, *none), (whole.shape[0], second, *rest))
        yield f"{name}, both", name, Part(whole, (first, second, *none), (first, second, *rest))


@pytest.mark.parametrize("chunk_bytes", [256, 1 << 20])
@pytest.mark.parametrize("cut", [rows, columns])
def test_boxes_on_the_device(cut, chunk_bytes):
    with Repository.create(MemoryStore(), chunk_bytes=chunk_bytes) as repository:
        writer = RankWriter(repository.store)
        ref = writer.save({"": {}, "model": arrays()}, world=3, cut=cut, changes=of_tensors).ref
        restored = repository.restore(ref, device="cuda")["model"]
        assert all(restored[name].device.type == "cuda" for name in WHOLE)
        assert all(torch.equal(restored[name].cpu(), whole) for name, whole in WHOLE.items())
        into = {name: torch.zeros_like(whole, device="cuda") for name, whole in WHOLE.items()}
        repository.restore_into(ref, {"model": into})
        assert all(torch.equal(into[name].cpu(), whole) for name, whole in WHOLE.items())
        for what, name, part in parts():
            repository.restore_into(ref, {"model": {name: part}}, keys=f"model.{name}")
            assert torch.equal(part.local.cpu(), part.expected()), what
