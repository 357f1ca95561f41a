"""Gives the stateful tests one thread and actors that are stopped at the end."""

from collections.abc import Iterator

import pytest

from kit.actors import Actor
from kit.faults import one_thread
from kit.remembered import remember


@pytest.fixture(autouse=True)
def _remembering(monkeypatch) -> None:
    """Decode each object once: these tests are about the order in which objects come and go."""
    remember(monkeypatch)


@pytest.fixture
def actors(monkeypatch) -> Iterator[list[Actor]]:
    """Whom to stop at the end."""
    one_thread(monkeypatch, index=False)
    found: list[Actor] = []
    yield found
    for actor in found:
        actor.stop()
