"""Choose: which ranks of a job under torch.distributed save together.

In: the `ranks=` of a SnapshotManager. Out: the `Ranks` of the job, or None for one process. If two ranks would each
save the same run alone, an error says what to do. torch.distributed is used only if the program has imported it.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Literal

from ..errors import InvalidInputError
from ..text import log, quoted
from ..threads import imported
from .base import Ranks
from .local import local_ranks

_ADVICE = (
    "save with a SnapshotManager, made on every rank: it stores one snapshot of all; if each rank saves a run of its "
    'own, such as run=f"{name}-rank{{rank}}", or rank 0 alone saves the full state, pass ranks=False'
)


def choose(run: str, ranks: Ranks | Literal[False] | None) -> tuple[Ranks | None, bool]:
    """Return the ranks that save a run together, and whether they were made here; None: this process alone.

    Args:
        ranks: False: this process alone. None: all ranks of the job, if torch.distributed is initialised.

    Raises:
        InvalidInputError: `ranks` is something else.
        RanksError: not all ranks of the job have called this within 60 s.
    """
    if ranks is False:
        return None, False
    if ranks is not None:
        if not isinstance(ranks, Ranks):
            raise InvalidInputError(f"ranks={quoted(ranks)}: expected a Ranks such as TorchRanks(group), False or None")
        return ranks, False
    rank, count = place()
    if not _is_initialized():
        _warn_of_launcher(run)
        return None, False
    if count == 1:  # its tensors may be sharded on a mesh of one rank
        return local_ranks(1)[0], True
    from .torch_ranks import TorchRanks

    log.info("run=%s this is rank %d of %d: all ranks save together; ranks=False saves alone", run, rank, count)
    return TorchRanks(), True


def check(run: str, ranks: Literal[False] | None, *, has_manager: bool = False) -> None:
    """Refuse to save a run alone from one of several ranks.

    If a launcher (torchrun) has set WORLD_SIZE and torch.distributed is not initialised, only log one warning: child
    processes inherit the variable, and programs that never form a group save only their own state.

    Args:
        ranks: False: the caller makes sure that no two ranks save the same run. None: unknown.
        has_manager: whether a SnapshotManager saves that was made when torch.distributed was not initialised.

    Raises:
        InvalidInputError: torch.distributed is initialised with more than one rank; or `ranks` is something else.
    """
    if ranks is False:
        return
    if ranks is not None:
        raise InvalidInputError(f"ranks={quoted(ranks)}: expected False or None; {_ADVICE.format(name=run)}")
    rank, count = place()
    if count > 1 and has_manager:
        raise InvalidInputError(
            f"run {run!r}: this is rank {rank} of {count}, and this SnapshotManager was made before "
            "init_process_group, when there were no ranks: make it after that, on every rank; or pass ranks=False if "
            "no two ranks save the same run"
        )
    if count > 1:
        raise InvalidInputError(
            f"run {run!r}: this is rank {rank} of {count}: all ranks would save their own states under the same steps, "
            f"and only one of them would be found: {_ADVICE.format(name=run)}"
        )
    if not _is_initialized():
        _warn_of_launcher(run)


def place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks of its job; (0, 1) if torch.distributed has none."""
    distributed: Any = imported("torch.distributed")
    return (distributed.get_rank(), distributed.get_world_size()) if _is_initialized() else (0, 1)


def _is_initialized() -> bool:
    distributed: Any = imported("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _warn_of_launcher(run: str) -> None:
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1 and "RANK" in os.environ:
        _warn(run, os.environ["RANK"], size)


@cache
def _warn(run: str, rank: str, size: str) -> None:
    text = "run=%s a launcher has set RANK=%s and WORLD_SIZE=%s, and torch.distributed is not initialised: if these "
    text += "processes save the same run, each overwrites the others' steps; initialise it first, and %s"
    log.warning(text, run, rank, size, _ADVICE.format(name=run))
