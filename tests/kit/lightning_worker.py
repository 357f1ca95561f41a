"""Trains with Lightning in forks of one process that has imported it: imports cost seconds, and a fork can be killed.

Reads lines of JSON, each with a kind of training ("one", "io", "ddp", "sharded"), the number of ranks, the step to stop
at, and the step after which it kills itself, or null. For each it forks the ranks, and prints their exit codes when
they have ended. A rank writes the steps that it made and a digest of its model and optimizers to `<out>.<rank>`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages' own imports
    import lightning.pytorch as pl
    import torch
    import torch._dynamo  # the first optimizer imports it
    import torch.distributed.fsdp
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.utils.data import TensorDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    from snapstore import KeepLast, SnapshotManager
    from snapstore.integrations.lightning import SnapshotCallback, SnapstoreCheckpointIO

SHAPE = (48, 8)


class Model(pl.LightningModule):
    """A net with dropout and normalization, so that a resume needs generators and buffers."""

    def __init__(self, *, sharded: bool, dropout: float, casts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sharded, self.casts = sharded, casts
        self.save_hyperparameters({"width": 16})
        inner = [torch.nn.Dropout(dropout), *([] if sharded else [torch.nn.BatchNorm1d(16)])]
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), *inner, torch.nn.Linear(16, 3)).double()

    def configure_model(self) -> None:
        if self.sharded and not isinstance(self.net[0], torch.distributed.fsdp.FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[-1], self.net):
                torch.distributed.fsdp.fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        # NAdam has a float32 number, which torch casts to the dtype of the parameters when it loads the state
        optimizer = (torch.optim.NAdam if self.casts else torch.optim.AdamW)(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


class Watch(pl.Callback):
    """Notes the steps that are made here, and kills the process after one of them."""

    def __init__(self, kill: int | None, wait_for: Path | None) -> None:
        self.steps: list[int] = []
        self.kill, self.wait_for = kill, wait_for

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)
        if trainer.global_step == self.kill:
            while self.wait_for is not None and not self.wait_for.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def digest(trainer: Any) -> str:
    """Return a digest of the model and the optimizers."""
    whole = hashlib.sha256()
    states = [
        trainer.strategy.lightning_module_state_dict(),
        *map(trainer.strategy.optimizer_state, trainer.optimizers),
    ]

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                whole.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            whole.update(local.detach().contiguous().numpy().tobytes())
        else:
            whole.update(repr(value).encode())

    for state in states:
        add(state)
    return whole.hexdigest()


def train(job: dict[str, Any], rank: int) -> None:
    """Train until a step, with what the job names."""
    ranks, kind, repo = job["ranks"], job["kind"], job["repo"]
    folder = Path(job["out"]).parent / "checkpoints"
    watch = Watch(job["kill"], folder / "last.ckpt" if kind == "io" else None)
    callbacks: list[Any] = [watch]
    more: dict[str, Any] = {"enable_checkpointing": False}
    fit: dict[str, Any] = {}
    if kind == "io" and repo is not None:
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=1, save_last=True))
        more = {"plugins": [SnapstoreCheckpointIO(repo, run="io")]}
        fit = {"ckpt_path": str(folder / "last.ckpt")} if (folder / "last.ckpt").exists() else {}
    elif repo is not None:
        make = partial(SnapshotManager, repo, run=kind, save_interval_steps=5, keep=[KeepLast(4)])
        callbacks.append(SnapshotCallback(make, resume=job["resume"], per_rank=job["per_rank"]))
        more = {}
    if kind == "ddp" and ranks > 1:
        more |= {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": ranks}
    elif kind == "sharded":
        more |= {"strategy": ModelParallelStrategy(ranks, 1), "devices": ranks}
    more = {"devices": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False} | more
    trainer = pl.Trainer(max_steps=job["stop"], enable_model_summary=False, callbacks=callbacks, **more)
    data = torch.arange(SHAPE[0] * SHAPE[1] * ranks).reshape(-1, SHAPE[1]).double() / 100
    sampler = None if ranks == 1 else torch.utils.data.DistributedSampler(data, ranks, rank)
    torch.manual_seed(rank)
    loader = StatefulDataLoader(TensorDataset(data), 4, shuffle=sampler is None, sampler=sampler)
    # a plain Lightning checkpoint has no generators, so a resume by it repeats no dropout, and Lightning loads it alone
    model = Model(sharded=kind == "sharded", dropout=0.0 if kind == "io" else 0.5, casts=kind != "io")
    trainer.fit(model, loader, **fit)
    Path(f"{job['out']}.{rank}").write_text(json.dumps([watch.steps, digest(trainer)]))


def main() -> None:
    """Read jobs, and run each in forks."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank in range(job["ranks"]):
            if pid := os.fork():
                pids.append(pid)
                continue
            if job["ranks"] > 1 or job["kind"] == "sharded":
                os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
                os.environ |= {"MASTER_PORT": str(job["port"])}
            code = 1
            try:
                train(job, rank)
                code = 0
            finally:
                sys.stdout.flush()
                if code:
                    traceback.print_exc()
                os._exit(code)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
