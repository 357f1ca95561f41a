"""Puts this folder on the path, so that every test finds the kit, and chooses the cases that a run tries.

`@pytest.mark.sampled(n)` marks a test of many cases: a run tries n of them, other ones each time: one of each n-th of
the list, so that cases next to each other, such as those of one verb, are not left out together. All of them run if
`THOROUGH`, or if the command line names a test (`FILE::TEST`, `-k`).

A time limit in a test judges a hang, never speed: other processes may be busy. So hypothesis judges no example by its
time, whatever profile the environment suggests.

Every test has a cache of its own, so that none sees another's indexes, and none writes to the user's.

Files of tests lie in memory where there is room: on a disk, half of the time goes into syncing and deleting them.
`SNAPSTORE_TEST_DIR` names another folder. Thorough runs stay on the disk.
"""

import contextlib
import gc
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path

import hypothesis
import pytest

from kit.remembered import remember
from kit.samples import SEED, THOROUGH, examples
from snapstore.chunks.limits import available_bytes
from snapstore.distributed import preemption
from snapstore.text import Log

#: Until then threads have closed what the collector found; judges a hang.
PATIENCE_S = 60.0
_CACHES = pytest.StashKey[Path]()
#: A file system in memory, and the free bytes that it must have: tests take up to 3 GB at a time.
MEMORY, MEMORY_BYTES = Path("/dev/shm"), 8 * 1024**3
_FOLDER = pytest.StashKey[Path | None]()
#: Files whose tests take a minute or more each.
LONGEST = ("test_gpu_on_cpu.py", "test_dcp_ranks.py")
_NUMBERS = itertools.count()
#: If tests have imported more modules than this, their objects are frozen too.
MODULES = 100
_FROZEN = pytest.StashKey[int]()

hypothesis.settings.register_profile(
    "snapstore", max_examples=examples(100), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("snapstore")


def pytest_configure(config):
    """Workers of xdist inherit the folder."""
    gc.disable()  # until all tests are collected
    config.stash[_FOLDER] = None
    place = os.environ.get("SNAPSTORE_TEST_DIR") or (MEMORY if _has_room() and not THOROUGH else None)
    if place and config.option.basetemp is None:
        config.stash[_FOLDER] = Path(tempfile.mkdtemp(prefix="snapstore-tests-", dir=place))
        config.option.basetemp = config.stash[_FOLDER] / "tests"
    caches = tempfile.mkdtemp(prefix="caches-", dir=config.option.basetemp and Path(config.option.basetemp).parent)
    config.stash[_CACHES] = Path(caches)
    os.environ["SNAPSTORE_CACHE_DIR"] = str(config.stash[_CACHES] / "fixtures")


def pytest_collection_finish(session):
    freeze(session.config)
    gc.enable()


def freeze(config):
    """Freeze what lives until the end (modules and tests, half a million objects): full collections skip it."""
    gc.collect()
    gc.freeze()
    config.stash[_FROZEN] = len(sys.modules)


def _has_room():
    """Return whether MEMORY is there and has room; its files also take from the machine's memory."""
    with contextlib.suppress(OSError):
        return min(shutil.disk_usage(MEMORY).free, available_bytes() or 0) >= MEMORY_BYTES
    return False


def pytest_collection_modifyitems(config, items):
    """Drop the cases that the samples leave out. Begin with the longest tests: at the end they would run alone."""
    if not (THOROUGH or config.option.keyword or any("::" in argument for argument in config.args)):
        left_out = {item for cases in _sampled(items).values() for item in cases}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not item.path.name.startswith(LONGEST))


def _sampled(items):
    """Return the cases that the sample of each test leaves out."""
    tests = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            tests[item.nodeid.partition("[")[0], *mark.args].append(item)
    for (name, count), cases in tests.items():
        draw, parts = random.Random(f"{SEED} {name}"), min(count, len(cases))
        ends = [len(cases) * i // parts for i in range(parts + 1)]
        for begin, end in reversed([*itertools.pairwise(ends)]):
            del cases[draw.randrange(begin, end)]
    return tests


def pytest_unconfigure(config):
    shutil.rmtree(config.stash[_CACHES], ignore_errors=True)
    if config.stash[_FOLDER]:
        shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


@pytest.fixture(autouse=True)
def cache(request, monkeypatch):
    """The test's own cache folder, which is not there yet. Fixtures of modules have one together."""
    if len(sys.modules) > request.config.stash[_FROZEN] + MODULES:  # such as transformers: a test imports it
        freeze(request.config)
    folder = request.config.stash[_CACHES] / str(next(_NUMBERS))
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(folder))
    before = open_indexes()
    yield folder
    try:
        require_closed(request, before)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _signal_handlers():
    """A manager whose last save ends the process leaves its handlers; each test begins with those of pytest."""
    before = [signal.getsignal(number) for number in preemption.MAY_TELL]
    yield
    preemption._signals._told.clear()
    for number, handler in zip(preemption.MAY_TELL, before, strict=True):
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def log_lines(monkeypatch):
    """`Log` raises nothing, so the test looks whether each line could be written."""
    lost, note = [], Log._note_lost
    monkeypatch.setattr(Log, "_note_lost", lambda self: (lost.append(traceback.format_exc()), note(self)))
    yield
    assert not [text for text in lost if "in getMessage" in text]


@pytest.fixture
def remembering(monkeypatch):
    """Decode each chunk and manifest once: the test is about which objects are stored, read or damaged."""
    remember(monkeypatch)


def open_indexes():
    """Return the indexes that are open in this process."""
    indexes = sys.modules.get("snapstore.catalog.lmdb_file")
    return (
        {index for index in list(indexes.Environment._open.values()) if index._name[0] == os.getpid()}
        if indexes
        else set()
    )


def require_closed(request, before):
    """A repository or index that a test leaves open, in any folder, changes what later tests of this process find."""
    if open_indexes() - before:
        request.node.funcargs.clear()  # what fixtures return, which pytest drops after this
        until = time.monotonic() + PATIENCE_S
        while open_indexes() - before and time.monotonic() < until:
            gc.collect()  # again and again: a thread that ends meanwhile leaves cycles
            time.sleep(0.2)
        left = [index._name[1] for index in open_indexes() - before]
        assert not left, f"the test leaves the indexes of {left} open: close each repository, or what keeps it"


def pytest_terminal_summary(terminalreporter, config):
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"the samples of this run again: SNAPSTORE_TEST_SEED={SEED}")
        if config.stash[_FOLDER] and "CI" not in os.environ:
            terminalreporter.write_line(f"files of the tests that failed: {config.stash[_FOLDER]}; remove it")
            config.stash[_FOLDER] = None
