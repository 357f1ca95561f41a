"""A wait for what other threads or processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], limit_s: float = 300) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    ends_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends_s, f"it did not hold within {limit_s} s"
        time.sleep(0.005)
