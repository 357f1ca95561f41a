"""Puts this folder on the path, so that every test finds the helper modules beside it; chooses what a run samples.

A time limit in a test judges a hang, never speed: other processes may be busy. So hypothesis judges no example by its
time, whatever profile the environment suggests.
"""

import os
import random

import hypothesis

hypothesis.settings.register_profile(
    "snapstore", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("snapstore")


def pytest_configure(config):
    """Workers of xdist inherit it."""
    os.environ.setdefault("SNAPSTORE_TEST_SEED", str(random.randrange(1_000_000)))


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(
            f"the samples of this run again: SNAPSTORE_TEST_SEED={os.environ['SNAPSTORE_TEST_SEED']}"
        )
