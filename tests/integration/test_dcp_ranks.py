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

SEVERAL = ["load_of_another_world", "write_for_another_world"]
REST = [name for name in dcp_ranks.CASES if name not in SEVERAL]
#: The cases of the first world, a sample; of the second, which finds what the first has left, and runs a smaller
#: sample; and of the third, which finds what both have left.
FIRST = [SEVERAL[1], *some(REST, len(REST) // 4)]
SECOND = [*SEVERAL, *some([name for name in REST if name != "process_mode"], 4)]
THIRD = SEVERAL[:1]


@pytest.mark.timeout(600)
def test_on_four_ranks_then_on_two_then_on_three(tmp_path: Path) -> None:
    """One test: each world takes seconds to start, and reads what those before it have saved."""
    failed = []
    Repository.create(tmp_path / dcp_ranks.OTHER_WORLDS, chunk_bytes=32 * 1024).close()
    for ranks, cases in ((4, FIRST), (2, SECOND), (3, THIRD)):
        found = dcp_ranks.run(tmp_path, ranks, cases)
        failed += [f"{name} on {ranks} ranks:\n{text}" for name in cases for text in found[name] if text]
    assert not failed, "\n".join(failed)
    with Repository.open(tmp_path / "repository") as repository:
        repository.gc()
        assert not repository.check("restore").problems
        assert len(repository.snapshots()) > len(FIRST) // 2
    with Repository.open(tmp_path / dcp_ranks.OTHER_WORLDS) as repository:
        assert not repository.check("restore").problems
        assert {s.ref for s in repository.snapshots()} == {"of-4@1", "of-4@2", "of-4@3", "of-2@1", "of-2@3"}
