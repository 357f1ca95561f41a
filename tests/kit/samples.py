"""Which cases of a harness a run of pytest tries: all of them, or a sample that differs from run to run."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

#: Whether every test tries all its cases.
THOROUGH = bool(os.environ.get("SNAPSTORE_TEST_THOROUGH"))
#: Chooses the sample: each run of pytest tries other cases. Processes that a run begins inherit it.
SEED = int(os.environ.setdefault("SNAPSTORE_TEST_SEED", str(random.randrange(1_000_000))))


T = TypeVar("T")


def some(cases: Sequence[T], count: int) -> list[T]:
    """Return `count` cases, different ones in each run; all of them if `THOROUGH`."""
    return list(cases) if THOROUGH else [cases[(SEED + i * len(cases) // count) % len(cases)] for i in range(count)]


def examples(count: int) -> int:
    """Return how many examples hypothesis tries where it tries `count` if `THOROUGH`."""
    return count if THOROUGH else -(-count // 3)


def sampled(total: int, every: int) -> range:
    """Return each `every`-th number below `total`, with another start in each run; all of them if `THOROUGH`."""
    return range(total) if THOROUGH or not total else range(SEED % min(every, total), total, every)
