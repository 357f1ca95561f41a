"""Node group: the ranks of one node, as a process group of torch.distributed; they exchange bytes by its collectives.

In: which ranks share a node. Out: on each rank, the bytes of all ranks of its node, or the bytes that each rank sends
to it. The group is separate, so a collective that fails breaks no group of the training. NCCL moves device memory,
other backends move host memory.

All ranks of the job make the groups in the same order, and the ranks of a node call its methods in the same order. The
caller ensures that by messages before each collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed

from ..errors import CapabilityError, InvalidInputError, RanksError
from ..state.values.arrays import Memory
from .base import Ranks, named

T = TypeVar("T")


def require_whole_job(ranks: Ranks) -> None:
    """Check that `ranks` are all ranks of torch.distributed's job: all of them must take part in making a group.

    Raises:
        InvalidInputError: they are not.
        CapabilityError: the job's backend moves neither memory of a CUDA GPU nor host memory.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise InvalidInputError("read='exchange': torch.distributed is not initialised; pass read='own'")
    job = distributed.get_rank(), distributed.get_world_size()
    if (ranks.rank, ranks.count) != job:
        raise InvalidInputError(
            f"read='exchange': rank {ranks.rank} of {ranks.count} of this manager is rank {job[0]} of {job[1]} of the "
            "job; only managers of the whole job exchange chunks; pass read='own'"
        )
    _device()


class NodeGroup:
    """The ranks of this rank's node.

    Args:
        nodes: the ranks of each node, ascending; every rank is in one. All ranks of the job pass the same.
        limit_s: of each collective [s].

    Attributes:
        ranks: those of this node, this one among them.
        device: the device on which bytes are exchanged.

    Raises:
        RanksError: a group could not be made.
    """

    def __init__(self, nodes: Sequence[Sequence[int]], limit_s: float) -> None:
        rank = distributed.get_rank()
        self.ranks: Sequence[int] = [rank]
        self._group: Any = None
        self.device = _device()
        for ranks in nodes:
            made = partial(distributed.new_group, list(ranks), timeout=timedelta(seconds=limit_s))
            group = self._checked(ranks, made) if len(ranks) > 1 else None
            if rank in ranks:
                self.ranks, self._group = ranks, group

    @property
    def place(self) -> int:
        """Return the position of this rank among those of the node."""
        return self.ranks.index(distributed.get_rank())

    def gather(self, mine: bytes, step: Callable[[], None]) -> list[bytes]:
        """Return the bytes of every rank of the node. The ranks must have agreed to call this.

        Args:
            step: waits until all of them have called it; it is called when the memory for their bytes is allocated.
        """
        size = torch.tensor([len(mine)], device=self.device)
        sizes = [torch.empty_like(size) for _ in self.ranks]
        self._checked(self.ranks, lambda: distributed.all_gather(sizes, size, group=self._group))
        counts = [int(one) for one in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        every = [torch.empty_like(padded) for _ in self.ranks]
        step()
        self._checked(self.ranks, lambda: distributed.all_gather(every, padded, group=self._group))
        return [one[:count].cpu().numpy().tobytes() for one, count in zip(every, counts, strict=True)]

    def swap(self, sent: Memory, sizes: Sequence[int], sizes_back: Sequence[int]) -> Callable[[], Memory]:
        """Prepare to exchange bytes with every rank of the node; return the function that calls the collective.

        It returns the received bytes, (sum of sizes_back,) uint8, rank after rank.

        Args:
            sent: (sum of sizes,) uint8, rank after rank.
            sizes, sizes_back: how many bytes go to each rank, and come from it.
        """
        there = (torch.from_numpy(sent) if isinstance(sent, np.ndarray) else sent).to(self.device)
        if there.is_cuda:  # another stream's memory: the allocator would reuse it as soon as nothing refers to it
            there.record_stream(torch.cuda.current_stream(there.device))
        back = torch.empty(sum(sizes_back), dtype=torch.uint8, device=self.device)

        def call() -> Memory:
            distributed.all_to_all_single(back, there, list(sizes_back), list(sizes), group=self._group)
            return back.numpy() if self.device.type == "cpu" else back

        return lambda: self._checked(self.ranks, call)

    def close(self) -> None:
        """End the group, unless the job has ended all groups."""
        if self._group is not None and distributed.is_initialized():
            with suppress(ValueError):  # it belongs to a job that was initialised before
                distributed.destroy_process_group(self._group)

    def _checked(self, ranks: Sequence[int], call: Callable[[], T]) -> T:
        """Return the result of a collective.

        Raises:
            RanksError: the collective failed, or took too long; the group cannot be used any more.
        """
        try:
            return call()
        except RuntimeError as error:  # torch's DistError is a RuntimeError
            others = [rank for rank in ranks if rank != distributed.get_rank()]
            raise RanksError(
                f"a collective with {named(others)} of this node failed: {str(error).splitlines()[0][:200]}",
                ranks=others,
            ) from error


def _device() -> torch.device:
    """Return the device on which the job's backend exchanges bytes: this rank's GPU with NCCL, else host memory.

    Raises:
        CapabilityError: the backend supports neither.
    """
    config = dict(pair.split(":") for pair in distributed.get_backend_config().split(","))
    if config.get("cuda") == "nccl" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "cpu" in config and config["cpu"] != "nccl":
        return torch.device("cpu")
    raise CapabilityError(
        f"read='exchange': the backend {distributed.get_backend()!r} of the job moves neither host memory nor that of "
        "a CUDA GPU; pass read='own'"
    )
