from collections.abc import Iterator

import pytest

from kit.faults import Actor, one_thread


@pytest.fixture
def actors(monkeypatch) -> Iterator[list[Actor]]:
    """Whom to stop at the end."""
    one_thread(monkeypatch, index=False)
    found: list[Actor] = []
    yield found
    for actor in found:
        actor.stop()
