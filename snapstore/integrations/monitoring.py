"""Hooks for TensorBoard, Weights & Biases, MLflow and Prometheus.

    hook = TensorBoardHook("runs/exp1")
    SnapshotManager("/data/snapshots", run="exp1", on_commit=hook, on_failure=hook)

In: the events of a manager. Out: for each event the stall, the bytes, the ratio and the depth of the save, the ages of
the newest commit and of the mirror, and how often saves have failed; the names begin with "snapstore". One object
serves both hooks. Each class imports its package when it is made, in the caller's thread.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError, needs
from ..save.hooks import Ages, CommitEvent, FailureEvent

#: The fields of a snapshot that are reported, and their names in Prometheus, without the prefix.
_OF_SAVE = {
    "stall_s": "stall_seconds",
    "total_s": "save_seconds",
    "stored_bytes": "stored_bytes",
    "logical_bytes": "logical_bytes",
    "ratio": "ratio",
    "depth": "depth",
}


class _Logging:
    """A hook that writes the values of each event at its step."""

    def __init__(self) -> None:
        self._failures = self._failed_saves = 0

    def __call__(self, event: CommitEvent | FailureEvent) -> None:
        """Write the values of an event."""
        values: dict[str, float] = {"commit_age_s": event.ages.commit_s}
        if (mirror_s := event.ages.mirror_s) is not None:
            values["mirror_age_s"] = mirror_s
        if isinstance(event, FailureEvent):
            self._failures += 1
            self._failed_saves += not event.will_retry
        else:
            values |= {name: getattr(event.snapshot, name) for name in _OF_SAVE}
        values |= {"failures": self._failures, "failed_saves": self._failed_saves}
        self._write(event.step, {f"snapstore/{name}": float(value) for name, value in values.items()})

    def _write(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError


class TensorBoardHook(_Logging):
    """Writes scalars for TensorBoard, at the steps of the saves.

    Args:
        writer: a folder for the events; or a SummaryWriter of torch, Lightning or tensorboardX.

    Raises:
        CapabilityError: it is a folder, and TensorBoard is not installed.
    """

    def __init__(self, writer: str | Path | Any) -> None:
        super().__init__()
        if isinstance(writer, str | Path):
            with needs("tensorboard", 'pip install "snapstore[tensorboard]"'):
                from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(str(writer))
        self._writer = writer

    def _write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandbHook(_Logging):
    """Logs to a run of Weights & Biases.

    W&B takes no value for a step that has passed, and a save may commit some steps later. So the values go into the
    next row that the training logs, with the step of the save as their own x axis, "snapstore/step". If several saves
    end between two rows, the row has the values of the last one.

    Args:
        run: what `wandb.init` returned; None: the active run.

    Raises:
        CapabilityError: wandb is not installed.
        InvalidInputError: there is no active run.
    """

    def __init__(self, run: Any = None) -> None:
        super().__init__()
        if run is None:
            with needs("wandb", 'pip install "snapstore[wandb]"'):
                import wandb
            run = wandb.run
        if run is None:
            raise InvalidInputError("WandbHook: no run of W&B is active; call wandb.init() first, or pass its run")
        self._run = run
        run.define_metric("snapstore/step", hidden=True)
        run.define_metric("snapstore/*", step_metric="snapstore/step")

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values | {"snapstore/step": step}, commit=False)


class MlflowHook(_Logging):
    """Logs metrics to a run of MLflow, at the steps of the saves.

    Args:
        run_id: of the run; None: the active one of this thread.
        tracking_uri: where the run is; None: as MLflow is configured.

    Raises:
        CapabilityError: mlflow is not installed.
        InvalidInputError: no run is active.
    """

    def __init__(self, run_id: str | None = None, *, tracking_uri: str | None = None) -> None:
        super().__init__()
        with needs("mlflow", 'pip install "snapstore[mlflow]"'):
            import mlflow
            from mlflow.entities import Metric
        if run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise InvalidInputError("MlflowHook: no run is active; call mlflow.start_run() first, or pass run_id=")
            run_id = active.info.run_id
        self._client, self._metric, self._run_id = mlflow.MlflowClient(tracking_uri), Metric, run_id

    def _write(self, step: int, values: dict[str, float]) -> None:
        now_ms = int(1000 * time.time())
        self._client.log_batch(
            self._run_id, [self._metric(name, value, now_ms, step) for name, value in values.items()]
        )


class PrometheusHook:
    """Sets metrics of Prometheus. The ages are those of the moment of a scrape: they grow while nothing is committed.

    Gauges: `snapstore_commit_age_seconds` (before the first event since this was made), `snapstore_mirror_age_seconds`
    (NaN without a mirror, and before the first event); of the last commit `snapstore_step`, `_stall_seconds`,
    `_save_seconds`, `_stored_bytes`, `_logical_bytes`, `_ratio` and `_depth`. Counters: `snapstore_commits_total`,
    `snapstore_failures_total` (events, also of attempts), `snapstore_failed_saves_total`.

    Args:
        registry: a CollectorRegistry; None: that of the process. It takes the metrics of one hook.

    Raises:
        CapabilityError: prometheus_client is not installed.
        InvalidInputError: the registry has the metrics of another hook.
    """

    def __init__(self, registry: Any = None) -> None:
        with needs("prometheus_client", 'pip install "snapstore[prometheus]"'):
            from prometheus_client import REGISTRY, Counter, Gauge
        registry = REGISTRY if registry is None else registry
        self._ages = Ages(None)

        def made(kind: Any, name: str, text: str) -> Any:
            try:
                return kind(f"snapstore_{name}", text, registry=registry)
            except ValueError as error:
                raise InvalidInputError(
                    f"PrometheusHook: the registry has a metric snapstore_{name} already; make one hook in a process, "
                    "or pass registry=CollectorRegistry()"
                ) from error

        made(Gauge, "commit_age_seconds", "Age of the newest commit").set_function(lambda: self._ages.commit_s)
        made(Gauge, "mirror_age_seconds", "Age of the newest snapshot in the mirror").set_function(self._mirror_s)
        self._step = made(Gauge, "step", "Step of the last commit")
        self._of_save = {
            field: made(Gauge, name, f"{name.replace('_', ' ')} of the last commit") for field, name in _OF_SAVE.items()
        }
        self._commits = made(Counter, "commits", "Saves that were committed")
        self._failures = made(Counter, "failures", "Saves and attempts that failed")
        self._failed_saves = made(Counter, "failed_saves", "Saves that ended without a commit")

    def _mirror_s(self) -> float:
        age_s = self._ages.mirror_s
        return math.nan if age_s is None else age_s

    def __call__(self, event: CommitEvent | FailureEvent) -> None:
        """Set the metrics that an event changes."""
        self._ages = event.ages
        if isinstance(event, FailureEvent):
            self._failures.inc()
            self._failed_saves.inc(not event.will_retry)
            return
        self._commits.inc()
        self._step.set(event.step)
        for field, gauge in self._of_save.items():
            gauge.set(getattr(event.snapshot, field))
