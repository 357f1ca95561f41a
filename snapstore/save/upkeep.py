"""Upkeep: what a manager does behind each of its commits, in the thread of the save: forget by policies, then gc.

In: a function that forgets, and one that says when to stop, because the program waits. Out: objects deleted. A failure
costs only space: it is logged, and the next save tries again. Damage is returned, for the caller's next call.
"""

from __future__ import annotations

from collections.abc import Callable

from ..context import Context
from ..errors import IntegrityError, SnapstoreError
from ..protocol.forget import ForgetResult
from ..protocol.gc import collect
from ..text import log


def forget_and_collect(
    context: Context, run: str, forget: Callable[[], ForgetResult], stops: Callable[[], bool]
) -> Exception | None:
    """Forget, and run gc if something was forgotten; return the error that the user must know of."""
    try:
        if forget().forgotten:
            with context.store.pinned():
                collect(context, stops=stops)
    except Exception as error:  # noqa: BLE001  raised at the caller's next call, but not by `save`
        if isinstance(error, SnapstoreError) and not isinstance(error, IntegrityError):
            log.warning("run=%s retention ended early, the next save tries again: %s", run, error)
            return None
        log.error("run=%s nothing is forgotten or deleted until this is repaired: %s", run, error)
        return error
    return None
