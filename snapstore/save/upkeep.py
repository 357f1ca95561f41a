"""Upkeep: what follows a commit: forget by the policies, then gc."""

from __future__ import annotations

from collections.abc import Callable

from ..context import Context
from ..errors import IntegrityError, SnapstoreError
from ..protocol.forget import ForgetResult
from ..protocol.gc import collect
from ..text import log


def retain(
    context: Context, run: str, forget: Callable[[], ForgetResult], stops: Callable[[], bool]
) -> Exception | None:
    """Forget by the policies, then run gc. A failure costs only space, so it is logged: the next save tries again.

    Args:
        forget: applies the policies.
        stops: whether to delete no more.

    Returns:
        Damage, which the caller must learn of, or None.
    """
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
