"""Count the cases that were tried, by kind; `tools/torture` sums these counts over many runs of pytest."""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from pathlib import Path

#: Factor on the examples of the fuzzers, the random schedules, and the kills of the training run.
EXAMPLES = int(os.environ.get("SNAPSTORE_TEST_EXAMPLES", "1"))
_FOLDER = os.environ.get("SNAPSTORE_TEST_TALLY")
_counts: Counter[str] = Counter()


def tally(kind: str, count: int = 1) -> None:
    """Count more cases of a kind."""
    if _FOLDER:
        _counts[kind] += count


@atexit.register
def _write() -> None:
    if _counts and _FOLDER:
        (Path(_FOLDER) / f"{os.getpid()}.json").write_text(json.dumps(_counts))
