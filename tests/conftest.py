"""Puts this folder on the path, so that every test finds the helper modules beside it; chooses what a run samples."""

import os
import random


def pytest_configure(config):
    """Workers of xdist inherit it."""
    os.environ.setdefault("SNAPSTORE_TEST_SEED", str(random.randrange(1_000_000)))


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(
            f"the samples of this run again: SNAPSTORE_TEST_SEED={os.environ['SNAPSTORE_TEST_SEED']}"
        )
