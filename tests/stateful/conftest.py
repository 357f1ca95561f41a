"""Give the stateful tests one thread, and stop their actors at the end."""

from collections.abc import Iterator

import pytest

from kit import foreign
from kit.actors import Actor
from kit.faults import one_thread
from kit.remembered import remember


@pytest.fixture(autouse=True)
def _reading(monkeypatch) -> None:
    """Decode each object once, codec 70 too: these tests are about the order of operations on objects."""
    remember(monkeypatch)
    foreign.readable(monkeypatch)


@pytest.fixture
def actors(monkeypatch) -> Iterator[list[Actor]]:
    """A list for actors, which are stopped at the end."""
    one_thread(monkeypatch, index=False)
    found: list[Actor] = []
    yield found
    for actor in found:
        actor.stop()
