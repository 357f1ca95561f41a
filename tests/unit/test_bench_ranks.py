"""`tools/bench ranks` measures what its rows say; the worlds of processes that it starts are replaced."""

from pathlib import Path

import pytest


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    from benchmarks import ranks

    return ranks


@pytest.mark.parametrize(("count", "pairs"), [(4, "4>4 4>2 4>1 2>4"), (2, "2>2 2>1 1>2"), (1, "1>1")])
def test_restores_are_measured_on_fewer_and_on_more_ranks(ranks, monkeypatch, tmp_path, count, pairs):
    saved, found = {}, []

    def world(size, task, folder):
        if task["do"] == "reference":
            assert saved.setdefault(folder, size) == size, "a folder has one reference"
        else:
            found.append(f"{saved[folder]}>{size}")
        return {"equal": True, "seconds": {"dcp": [6.0], "snapstore": [1.0]}}

    monkeypatch.setattr(ranks, "world", world)
    rows = ranks.restore_rows(count, (), tmp_path, details := {})
    assert found == pairs.split()
    assert [one["name"] for one in rows] == [f"restore_over_dcp, {pair.replace('>', ' -> ')}" for pair in found]
    assert len(details) == len(rows)
