"""torch.distributed.checkpoint over snapstore, on 4 and 2 real ranks with gloo, and between worlds of other sizes.

The cases are in kit.dcp_ranks; a world runs all of them, since it takes seconds to start one. docs/design/dcp-tests.md
says which of DCP's own cases each one stands for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed.checkpoint")

from kit import dcp_ranks
from snapstore import Repository

#: The cases of the first world; and of the second, which finds what the first has left.
FIRST = [name for name in dcp_ranks.CASES if name != "load_of_another_world"]
SECOND = ["load_of_another_world", *(name for name in FIRST if name != "process_mode")]


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory(prefix="snapstore-test-dcp-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, list[str]]:
    return dcp_ranks.run(folder, 4, FIRST)


@pytest.fixture(scope="module")
def two(folder: Path, four: Any) -> dict[str, list[str]]:
    return dcp_ranks.run(folder, 2, SECOND)


@pytest.mark.parametrize("name", FIRST)
def test_on_four_ranks(name: str, four: dict[str, list[str]]) -> None:
    assert four[name] == [""] * 4, "\n".join(text for text in four[name] if text)


@pytest.mark.parametrize("name", SECOND)
def test_on_two_ranks(name: str, two: dict[str, list[str]]) -> None:
    assert two[name] == [""] * 2, "\n".join(text for text in two[name] if text)


def test_nothing_is_damaged_in_the_end(folder: Path, two: Any) -> None:
    with Repository.open(folder / "repository") as repository:
        repository.gc()
        assert not repository.check("restore").problems
        assert len(repository.snapshots()) > 50
        repository.restore("other-world-4@2")
