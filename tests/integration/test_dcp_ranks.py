"""Real ranks save and load through torch.distributed.checkpoint over snapstore, also into another number of ranks.

The cases are in kit.dcp_ranks; a world runs all of them, since it takes seconds to start one. docs/design/dcp-tests.md
says which of DCP's own cases each one stands for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.checkpoint")

from kit import dcp_ranks
from kit.samples import some
from snapstore import Repository

#: The cases of the first world; and of the second, which finds what the first has left, and runs a sample of the rest.
FIRST = [name for name in dcp_ranks.CASES if name != "load_of_another_world"]
SECOND = ["load_of_another_world", *some([name for name in FIRST if name != "process_mode"], 8)]


@pytest.mark.timeout(600)
def test_on_four_ranks_then_on_two(tmp_path: Path) -> None:
    """One test: each world takes seconds to start, and the second reads what the first has saved."""
    failed = []
    for ranks, cases in ((4, FIRST), (2, SECOND)):
        found = dcp_ranks.run(tmp_path, ranks, cases)
        failed += [f"{name} on {ranks} ranks:\n{text}" for name in cases for text in found[name] if text]
    assert not failed, "\n".join(failed)
    with Repository.open(tmp_path / "repository") as repository:
        repository.gc()
        assert not repository.check("restore").problems
        assert len(repository.snapshots()) > 50
        repository.restore("other-world-4@2")
