"""Retry: send a request again after a failure that may pass, with exponential back-off and jitter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...threads import current_watch
from .. import progress
from .failures import Failure, guarded

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 20.0
#: A pause looks so often whether the request is still wanted [s].
_LOOK_S = 0.5


def send(call: Callable[..., Any], options: Mapping[str, Any], attempts: int) -> Any:
    """Send a request and return the answer; after a failure that a retry may help, send it again after a pause.

    Raises:
        Failure: The last attempt failed, or a retry cannot help.
    """
    try:
        for attempt in range(1, attempts + 1):
            try:
                return guarded(call, **options)
            except Failure as failure:
                if attempt == attempts or not failure.retryable:
                    raise
            pause(attempt)
        raise AssertionError("unreachable")
    finally:
        progress.end_retry()


def pause(attempt: int) -> None:
    """Sleep after a failed attempt, longer after each; the first attempt is 1.

    The random part is the system's. The program's generator must give a run the same numbers whatever fails, and may
    have the same seed on all ranks.

    Raises:
        SnapstoreError: What waits for the answer is wanted no more (`threads.watched`).
    """
    progress.begin_retry("S3", current_watch())
    part = random.SystemRandom().uniform(0.5, 1)
    left_s, watch = part * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)), current_watch()
    while left_s > 0:
        if watch is not None:
            watch()
        time.sleep(min(left_s, _LOOK_S))
        left_s -= _LOOK_S
    if watch is not None:
        watch()
