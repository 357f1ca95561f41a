"""Retry: send a request again after a failure that may pass, with exponential back-off and jitter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from .. import progress
from .failures import Failure, guarded

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 20.0


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
    """
    progress.begin_retry("S3")
    part = random.SystemRandom().uniform(0.5, 1)
    time.sleep(part * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)))
