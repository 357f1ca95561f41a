"""Where the checkout is, and the environment in which other processes find snapstore and this kit."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process, with the checkout and its tests first on PYTHONPATH."""
    paths = [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more
