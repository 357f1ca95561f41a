"""Give the stateful tests one thread, and stop their actors at the end."""

from collections.abc import Iterator

import pytest

from kit import foreign
from kit.actors import Actor
from kit.faults import one_thread
from kit.remembered import remember
from kit.samples import SEED
from snapstore.protocol import joining

#: These judge no request counts, and damage no record by its key.
HOLD_WITH_JOINS = [
    "all_interleavings",
    "bounded_gc",
    "collected_anywhere",
    "compact_interleavings",
    "copy_interleavings",
    "crash_points",
    "interleavings",
    "interrupts",
    "late_and_torn",
    "lies",
    "machine",
    "mirror_interleavings",
    "mirror_machine",
    "outages",
    "ranks_faults",
    "reading_meanwhile",
    "recode_interleavings",
    "tag_interleavings",
    "volumes",
]


@pytest.fixture(autouse=True)
def _reading(monkeypatch) -> None:
    """Decode each object once, codec 70 too: these tests are about the order of operations on objects."""
    remember(monkeypatch)
    foreign.readable(monkeypatch)


@pytest.fixture(autouse=True)
def _joining(request, monkeypatch) -> None:
    """In every other run, each upkeep and each gc joins two snapshots or more."""
    if SEED % 2 and request.module.__name__.rpartition("test_")[2] in HOLD_WITH_JOINS:
        monkeypatch.setattr(joining, "AT_LEAST", 2)


@pytest.fixture
def actors(monkeypatch) -> Iterator[list[Actor]]:
    """A list for actors, which are stopped at the end."""
    one_thread(monkeypatch, index=False)
    found: list[Actor] = []
    yield found
    for actor in found:
        actor.stop()
