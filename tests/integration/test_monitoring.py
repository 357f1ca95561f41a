"""The hooks for TensorBoard, W&B, MLflow and Prometheus write what their own packages read back."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.faults import FaultStore
from kit.processes import ROOT
from kit.repositories import OPTIONS, created, opened
from kit.waits import until
from snapstore import CapabilityError, InvalidInputError, SnapshotManager, UnsupportedLeafError
from snapstore.integrations.monitoring import MlflowHook, PrometheusHook, TensorBoardHook, WandbHook
from snapstore.storage.memory import MemoryStore

#: The steps of the run, and those of them that were committed.
STEPS, COMMITTED = [0, 10, 20, 30], [0, 10, 30]
VALUES = ["stall_s", "total_s", "stored_bytes", "logical_bytes", "ratio", "depth"]


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory):
    """No package sends anything, or writes outside of the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("monitoring"))
        for name, value in {
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_DISABLE_GIT": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_TRACKING_URI": (tmp_path_factory.getbasetemp() / "mlruns").as_uri(),
        }.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def trained(_alone):
    """Return what a short run has left: its hooks, its snapshots, the run of W&B and that of MLflow."""
    import mlflow
    import wandb
    from prometheus_client import CollectorRegistry

    run, registry = wandb.init(project="snapstore"), CollectorRegistry()
    mlflow.start_run()
    hooks = [TensorBoardHook("tensorboard"), WandbHook(), MlflowHook(), PrometheusHook(registry)]
    named = mlflow.active_run().info.run_id
    mlflow.end_run()
    snapshots, seen = [], []
    told = [*hooks, seen.append]
    with SnapshotManager(
        created(), run="a", mirror=MemoryStore(), options=OPTIONS, on_commit=told, on_failure=told
    ) as manager:
        for step in STEPS:
            if step in COMMITTED:
                state = {"w": torch.full((5000,), float(step)), "noise": np.random.bytes(500)}
                snapshots.append(manager.save(step, state).result(60))
            else:
                with pytest.raises(UnsupportedLeafError):
                    manager.save(step, {"w": object()})
            until(lambda step=step: len(seen) > STEPS.index(step), 60)
            run.log({"loss": float(step)})
    run.finish()
    wandb.teardown()
    (file,) = Path("wandb").glob("offline-run-*/*.wandb")
    return SimpleNamespace(snapshots=snapshots, file=file, mlflow=named, registry=registry)


def check(found, snapshots):
    """Check the values that a package returns, as lists of (step, value) by name."""
    for name in VALUES:
        expected = [(snapshot.step, getattr(snapshot, name)) for snapshot in snapshots]
        assert [step for step, _ in found[name]] == [step for step, _ in expected]
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in expected], rel=1e-6)
    for name in ("commit_age_s", "mirror_age_s", "failures", "failed_saves"):
        assert [step for step, _ in found[name]] == STEPS
    for name in ("failures", "failed_saves"):
        assert [value for _, value in found[name]] == [0, 0, 1, 1]
    assert all(0 <= value < 600 for name in ("commit_age_s", "mirror_age_s") for _, value in found[name])


def test_tensorboard_reads_the_scalars(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("tensorboard").Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert all(tag.startswith("snapstore/") for tag in found)
    check({tag.removeprefix("snapstore/"): values for tag, values in found.items()}, trained.snapshots)


def test_a_writer_of_the_user_gets_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 1.0, 0)
        with SnapshotManager(created(), run="a", options=OPTIONS, on_commit=TensorBoardHook(writer)) as manager:
            manager.save(7, {"w": torch.ones(5)})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {"loss", "snapstore/ratio"} <= {*events.Tags()["scalars"]}
    assert [event.step for event in events.Scalars("snapstore/ratio")] == [7]


def rows_of(path):
    """Yield the rows of the history in the file of an offline run: records of wandb, in a log of LevelDB's form."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, record = path.read_bytes(), b""
    at = 7  # behind the header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            parsed = Record.FromString(record)
            record = b""
            if parsed.WhichOneof("record_type") == "history":
                yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in parsed.history.item}


def test_wandb_reads_the_rows_beside_those_of_the_training(trained):
    rows = list(rows_of(trained.file))
    assert [row["loss"] for row in rows] == STEPS  # the hook has begun no row, and lost none
    found = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("snapstore/"):
                found.setdefault(name.removeprefix("snapstore/"), []).append((row["snapstore/step"], value))
    check(found, trained.snapshots)


def test_mlflow_reads_the_metrics(trained):
    import mlflow

    client = mlflow.MlflowClient()
    names = client.get_run(trained.mlflow).data.metrics
    assert all(name.startswith("snapstore/") for name in names)
    check(
        {
            name.removeprefix("snapstore/"): [
                (m.step, m.value) for m in client.get_metric_history(trained.mlflow, name)
            ]
            for name in names
        },
        trained.snapshots,
    )


def scraped(text):
    """Return the values by name of what Prometheus reads."""
    from prometheus_client.parser import text_string_to_metric_families

    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_prometheus_scrapes_the_metrics_over_http(trained):
    from prometheus_client import start_http_server

    server, thread = start_http_server(0, "127.0.0.1", trained.registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60) as answer:
            values = scraped(answer.read().decode())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    last = trained.snapshots[-1]
    assert values["snapstore_step"] == 30
    assert values["snapstore_stall_seconds"] == last.stall_s
    assert values["snapstore_save_seconds"] == last.total_s
    assert values["snapstore_stored_bytes"] == last.stored_bytes
    assert values["snapstore_logical_bytes"] == last.logical_bytes
    assert values["snapstore_ratio"] == last.ratio
    assert values["snapstore_depth"] == last.depth
    assert values["snapstore_commits_total"] == 3
    assert values["snapstore_failures_total"] == values["snapstore_failed_saves_total"] == 1
    assert values["snapstore_commit_age_seconds"] > 0
    assert values["snapstore_mirror_age_seconds"] > 0


def test_the_ages_grow_while_nothing_is_committed_or_mirrored(tmp_path):
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    hook, mirror, seen = PrometheusHook(registry), FaultStore(MemoryStore()), []
    store = created()
    with opened(store) as repository:
        repository.copy(to=mirror.inner)

    def ages():
        values = scraped(generate_latest(registry).decode())
        return values["snapstore_commit_age_seconds"], values["snapstore_mirror_age_seconds"]

    before = ages()
    assert math.isnan(before[1])  # no manager has told it of a mirror
    until(lambda: ages()[0] > before[0], 60)
    with SnapshotManager(store, run="a", mirror=mirror, options=OPTIONS, on_commit=[hook, seen.append]) as manager:
        manager.save(0, {"w": torch.ones(50)}).result(60)
        assert manager.wait_until_mirrored(60) == []
        until(lambda: seen, 60)
        first = ages()
        until(lambda: all(now > old for now, old in zip(ages(), first, strict=True)), 60)
        mirror.at, mirror.mode = len(mirror.log), "outage"
        manager.save(1, {"w": torch.ones(50)}).result(60)
        until(lambda: len(seen) == 2, 60)
        commit_s, mirror_s = ages()
        assert mirror_s > commit_s  # the mirror has step 0 alone
        mirror.heal()


def test_a_second_hook_in_a_registry_is_refused():
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    PrometheusHook(registry)
    with pytest.raises(InvalidInputError, match="make one hook in a process, or pass registry=CollectorRegistry"):
        PrometheusHook(registry)


def test_a_hook_without_an_active_run_says_what_to_do():
    with pytest.raises(InvalidInputError, match=r"call wandb.init\(\) first, or pass its run"):
        WandbHook()
    with pytest.raises(InvalidInputError, match=r"call mlflow.start_run\(\) first, or pass run_id="):
        MlflowHook()


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tensorboard", lambda: TensorBoardHook("x")),
        ("wandb", WandbHook),
        ("mlflow", MlflowHook),
        ("prometheus_client", PrometheusHook),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package, make, monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == package or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    extra = package.removesuffix("_client")
    with pytest.raises(CapabilityError, match=rf'{package}: not installed here.*pip install "snapstore\[{extra}\]"'):
        make()


def test_the_code_of_the_guide_runs(tmp_path, monkeypatch, trained, capsys):
    """Its blocks, one after the other."""
    import prometheus_client
    import wandb

    page = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    monkeypatch.chdir(tmp_path)
    servers, start = [], prometheus_client.start_http_server
    monkeypatch.setattr(
        prometheus_client, "start_http_server", lambda port: servers.append(start(0, "127.0.0.1")) or servers[-1]
    )
    names = {"state": {"w": torch.ones(50)}}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block.replace("/data/snapshots", str(tmp_path / "snapshots")), names)
    wandb.teardown()
    (server, thread), url = servers[0], f"http://127.0.0.1:{servers[0][0].server_port}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert scraped(answer.read().decode())["snapstore_commits_total"] == 1
    server.shutdown()
    server.server_close()
    thread.join()
    assert re.search(r"^exp1@100: \d+ bytes stored, training waited \d\.\d{3} s$", capsys.readouterr().out, re.M)
    assert list(tmp_path.glob("runs/exp1/events*"))
