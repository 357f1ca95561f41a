"""Ranks of one job under torch.distributed: refuse that two of them save the same run.

In: the run to save, and whether the caller takes care of ranks. Out: nothing, or an error that says what to do.
torch.distributed is used only if the program has imported it.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from typing import Any

from .errors import InvalidInputError

log = logging.getLogger("snapstore")

_UNTIL_THEN = (
    "snapshots of several ranks together are not built yet; give each rank a run of its own, such as "
    'run=f"{name}-rank{{rank}}", or save on rank 0 alone with the full state (torch.distributed.checkpoint.state_dict.'
    "get_model_state_dict with StateDictOptions(full_state_dict=True)); either way pass ranks=False"
)


def check(run: str, ranks: bool | None) -> None:
    """Refuse to save a run from one of several ranks.

    If only a launcher (torchrun) has set WORLD_SIZE, log one warning: child processes inherit the variable, and
    programs that never form a group save only their own state.

    Args:
        ranks: False: the caller makes sure that no two ranks save the same run. None: unknown.

    Raises:
        InvalidInputError: torch.distributed is initialised with more than one rank, or `ranks` is True.
    """
    if ranks is False:
        return
    if ranks is not None:
        raise InvalidInputError(f"ranks={ranks!r}: {_UNTIL_THEN.format(name=run)}")
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise InvalidInputError(
                f"run {run!r}: this is rank {distributed.get_rank()} of {size}, and each would save its own state as "
                f"the same steps, of which one alone would be found: {_UNTIL_THEN.format(name=run)}"
            )
    elif os.environ.get("WORLD_SIZE", "").isdecimal() and int(os.environ["WORLD_SIZE"]) > 1 and "RANK" in os.environ:
        _warn(run, os.environ["RANK"], os.environ["WORLD_SIZE"])


@cache
def _warn(run: str, rank: str, size: str) -> None:
    text = "run=%s a launcher has set RANK=%s and WORLD_SIZE=%s, and torch.distributed is not initialised: if these "
    text += "processes save the same run, each overwrites the others' steps; pass ranks=False if they do not. %s"
    log.warning(text, run, rank, size, _UNTIL_THEN.format(name=run))
