"""`tools/bench ranks` measures what its rows say; the worlds of processes that it starts are replaced."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from snapstore import SnapshotManager


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    from benchmarks import ranks

    return ranks


@pytest.fixture
def worker(ranks):
    from benchmarks import ranks_worker

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ranks_worker
    dist.destroy_process_group()


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


@pytest.mark.parametrize("fault", ["", "order", "nothing", "other rank"])
def test_restores_count_only_if_each_element_of_each_rank_is_equal(worker, monkeypatch, tmp_path, fault):
    values, tensors = torch.arange(1.0, 9), {"w": torch.arange(1.0, 9)}
    with SnapshotManager(tmp_path / "repository", run="bench", ranks=False) as snapshots:
        snapshots.save(0, {"w": values})
    loaded = {"order": values.flip(0), "nothing": torch.zeros(8)}.get(fault, values)
    monkeypatch.setattr(worker.dcp, "load", lambda state, checkpoint_id: state["w"].copy_(loaded))
    if fault == "nothing":
        monkeypatch.setattr(worker.Repository, "restore_into", lambda self, name, state: None)
    if fault == "other rank":
        monkeypatch.setattr(worker, "all_of", lambda value: [value, False if value is True else value])
    found = worker.measure_restore(SimpleNamespace(state=lambda: dict(tensors)), tmp_path)
    assert found["equal"] is (not fault)
    assert [len(times) for times in found["seconds"].values()] == [3, 3]


def test_own_shares_are_saved_at_the_same_time_and_one_after_the_other(ranks, worker, monkeypatch, tmp_path):
    """Each ratio compares the same saves: deltas get smaller while a model trains."""
    monkeypatch.setattr(worker, "STALLS", 4)
    monkeypatch.setattr(worker, "SHARES", 3)
    run = SimpleNamespace(device=torch.device("cpu"), train=lambda: None, state=lambda: {"w": torch.ones(8)})
    save = worker.measure_saves(run, tmp_path, {})
    lengths = {"together": 4, "own_share": 3, "own_share_in_turn": 3}
    assert {name: len(save[name]["durable_s"]) for name in lengths} == lengths
    save["together"]["durable_s"] = [9.0, 9.0, 4.0, 100.0]
    save["own_share"]["durable_s"], save["own_share_in_turn"]["durable_s"] = [1.0, 1.0, 4.0], [1.0, 1.0, 2.0]
    found = {one["name"]: (one["value"], one["met"]) for one in ranks.share_rows(save | {"tensors": 4980})}
    title = "durable_over_own_share, 4,980 tensors: over the slowest rank's own share, saved "
    assert found == {f"{title}at the same time": (1.0, True), f"{title}one after the other": (2.0, False)}


def test_ranks_that_save_in_turn_wait_for_each_other(worker, monkeypatch):
    log = []
    monkeypatch.setattr(worker.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(worker, "synchronize", lambda: log.append("all"))
    monkeypatch.setattr(worker, "all_of", lambda value: [value, 60.0])
    wait, save = lambda: log.append("durable"), lambda step, state: log.append(step)
    saves = SimpleNamespace(save=save, wait_until_finished=wait)
    assert worker.save_timed(saves, 7, {}, [[0], [1], [2]]) == {"stalls_s": 60.0, "durable_s": 60.0}
    assert log == ["all", "all", 7, "durable", "all"]


@pytest.mark.parametrize(("machine", "replaced"), [("2 x H100", True), ("no GPU", False)])
def test_rows_of_gpus_are_replaced_by_rows_of_gpus_only(ranks, monkeypatch, tmp_path, machine, replaced):
    def row(name, value, machine):
        return ranks.row(name, value, "s") | {"machine": f"8 cores, {machine}; torch 2"}

    record = tmp_path / "docs" / "benchmarks" / "ranks.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"figures": [row("stall", 1.0, "4 x H100"), row("plan", 2.0, "no GPU")]}))
    monkeypatch.setattr(ranks, "ROOT", tmp_path)
    monkeypatch.setattr(ranks, "place", lambda *_: None)
    monkeypatch.setattr(ranks.tempfile, "gettempdir", lambda: str(tmp_path))
    before = record.read_bytes()
    found = {"figures": [row("stall", 3.0, machine), row("new", 4.0, machine)], "details": {}}
    if not replaced:
        with pytest.raises(SystemExit, match=r"another kind of device: stall\n.*--publish"):
            ranks.publish_beside(found)
        assert record.read_bytes() == before
        monkeypatch.setattr("sys.argv", ["ranks", "--publish", str(tmp_path / "snapstore-bench-ranks.json")])
        ranks.main()
    else:
        ranks.publish_beside(found)
    values = {one["name"]: one["value"] for one in json.loads(record.read_text())["figures"]}
    assert values == {"stall": 3.0, "plan": 2.0, "new": 4.0}
