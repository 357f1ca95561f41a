"""Target: the run of a repository that a writer or a reader of DCP uses.

In: a repository or its URL, and a run. Out: the open repository, and the checkpoint id of DCP's current call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import torch.distributed as dist

from ..checks import check_name
from ..errors import InvalidInputError
from ..repository import Repository
from ..steps import Url as Url
from .names import refs_of

RankPlace = tuple[int, int]
#: Why neither a writer nor its staged copies can be pickled.
NO_PROCESS = (
    "cannot be sent to another process: AsyncCheckpointerType.PROCESS copies the state to a process that keeps nothing "
    "from one save to the next, so no save could build on the last one; use AsyncCheckpointerType.THREAD, which waits "
    "only for copies on the device"
)


def place_in(group: dist.ProcessGroup | None) -> RankPlace:
    """Return (rank, number of ranks) of this process in a group; None: in the job; (0, 0) without torch.distributed.

    Raises:
        InvalidInputError: it is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0, 0
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidInputError("process_group: this rank is not in it; make writers and readers only on its ranks")
    return rank, dist.get_world_size(group)


def job_ranks_of(group: dist.ProcessGroup | Literal[False] | None) -> Sequence[int] | None:
    """Return by rank of a group its number in the job; None: the same numbers."""
    if not group or place_in(group) == (0, 0):
        return None
    return tuple(dist.get_process_group_ranks(group))


class Target:
    """A run, for DCP.

    Attributes:
        repository: the open repository.
        run: the name of the run.
        checkpoint_id: of DCP's current save or load; None: none was given.
    """

    def __init__(self, repository: Url | Repository, run: str, open_at: Callable[[Url], Repository]) -> None:
        self.run = check_name("run", run)
        self._owned = not isinstance(repository, Repository)
        self.repository = repository if isinstance(repository, Repository) else open_at(repository)
        self.checkpoint_id: Any = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the checkpoint id of the next save or load; None: keep the present one, as DCP's own storages do."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint id names a step, a tag, or "latest"."""
        try:
            return bool(refs_of("run", checkpoint_id))
        except InvalidInputError:
            return False

    def close(self) -> None:
        """Close the repository, if it was opened here."""
        if self._owned:
            self.repository.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.repository.url!r}, run={self.run!r})"

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(f"{type(self).__name__} {NO_PROCESS}")
