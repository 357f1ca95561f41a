"""With read="exchange" the ranks of a node read each chunk once and exchange it; on four real ranks with gloo.

The cases are in kit.exchange_ranks; one world runs a sample of them, since it takes seconds to start.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from kit import dcp_ranks, exchange_ranks
from kit.samples import some

#: The ranks end in the last case, which each run has.
*BEFORE, LAST = exchange_ranks.CASES
CASES = [*some(BEFORE, 4), LAST]


@pytest.mark.timeout(300)
def test_on_four_ranks(tmp_path: Path) -> None:
    exchange_ranks.other_worlds(tmp_path / "repository")
    assert LAST == "killed"
    found = dcp_ranks.run(tmp_path, 4, CASES, "kit.exchange_ranks")
    del found["killed"]
    failed = [f"{name}:\n{text}" for name in found for text in found[name] if text]
    assert not failed, "\n".join(failed)
    assert sorted(path.name for path in tmp_path.glob("killed-*")) == ["killed-0", "killed-2", "killed-3"]
