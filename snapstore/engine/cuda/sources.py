"""Sources: the tensors of one device that a save reads while the caller waits; and digests of their bytes there.

In: tensors, or the addresses of their memory. Out: the same, by row; and digests, once the stream has computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...arrays import Column
from ...state.values.tensors import is_whole
from . import kernels

TensorKey = Any


@dataclass(frozen=True, slots=True)
class Sources:
    """Tensors of one device that a save copies.

    Attributes:
        keys: (n,) of the tensors. The same list object means the same keys and sizes.
        nbytes: (n,) their sizes.
        tensor: returns the tensor of a row, as an alias whose form no other code can change. It takes longer than the
            address.
        addresses: (n,) of their memory; None: `data_ptr` of each tensor is used.
        in_pieces: if there are addresses, the rows of tensors that must first be made contiguous.
        keep: an object that keeps the memory of all tensors alive.
    """

    device: torch.device
    keys: Sequence[TensorKey]
    nbytes: Column
    tensor: Callable[[int], torch.Tensor]
    addresses: Column | None = None
    in_pieces: Sequence[int] = ()
    keep: Any = None

    @classmethod
    def of(
        cls, device: torch.device, keys: Sequence[TensorKey], nbytes: Column, tensors: Sequence[torch.Tensor]
    ) -> Sources:
        """Return the sources of tensors (n,)."""
        return cls(device, keys, nbytes, tensors.__getitem__, keep=tensors)

    def all_of(self, rows: Column) -> Iterator[tuple[TensorKey, torch.Tensor, int]]:
        """Yield (key, tensor, size) of these rows.

        Raises:
            RuntimeError: see `require_whole`.
        """
        for row in rows.tolist():
            yield self.keys[row], require_whole(self.tensor(row)), int(self.nbytes[row])


def require_whole(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage has all its bytes; the address of a freed one is 0, and torch would read there.

    Raises:
        RuntimeError: another thread has cut or freed the storage.
    """
    if not is_whole(value):
        raise RuntimeError(f"a storage has {value.untyped_storage().nbytes()} bytes; its tensor needs {value.nbytes}")
    return value


def start_digests(
    addresses: Column, lengths: Column, seed: int, device: torch.device, stream: torch.cuda.Stream
) -> torch.Tensor:
    """Begin to hash spans of device memory; return pinned memory for the digests, (n, 16).

    Args:
        addresses, lengths: (n,) of the spans.
        seed: of the digests (XXH3-128).
        stream: the current stream of the device; the digests are valid once it is done.
    """
    count = len(addresses)
    table = torch.empty((2, count), dtype=torch.int64, device="cpu", pin_memory=True)
    view = table.numpy()
    view[0], view[1] = addresses, lengths
    on_device = table.to(device, non_blocking=True)
    out = torch.empty((count, 16), dtype=torch.uint8, device=device)
    start = on_device.data_ptr()
    arguments = [start, start + 8 * count, out.data_ptr(), kernels.XXH3_128, seed]
    kernels.launch("digest", (count,), stream, arguments)
    return torch.empty((count, 16), dtype=torch.uint8, device="cpu", pin_memory=True).copy_(out, non_blocking=True)
