"""Which cases of a harness a run of pytest tries: all of them, or a sample that differs from run to run."""

from __future__ import annotations

import os

#: Whether every test tries all its cases.
THOROUGH = bool(os.environ.get("SNAPSTORE_TEST_THOROUGH"))
#: Chooses the sample. conftest.py draws it, so that each run of pytest tries other cases.
SEED = int(os.environ.get("SNAPSTORE_TEST_SEED", "0"))


def sampled(total: int, every: int) -> range:
    """Every so many-th of `total` cases, beginning elsewhere in every run; all of them if `THOROUGH`."""
    return range(total) if THOROUGH or not total else range(SEED % min(every, total), total, every)
