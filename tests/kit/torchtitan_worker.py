"""Trains with torchtitan's components on CPU, as one rank of a job with gloo: `torchtitan_worker.py JOB`.

RANK, WORLD_SIZE and so on are set. JOB is JSON: the repository, the config of checkpoints, the step to stop at, and the
step after which it kills itself, or null. The loop calls the manager as torchtitan's Trainer does. At the end it writes
its steps and a digest of its model, optimizers, scheduler and loader to `<out>.<rank>`.
"""

import hashlib
import importlib.util
import json
import os
import signal
import sys
import types
import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages' own imports
    # torchtitan's `__init__` imports models whose kernels want triton; its components do not.
    _SPEC = importlib.util.find_spec("torchtitan")
    sys.modules["torchtitan"] = types.ModuleType("torchtitan")
    sys.modules["torchtitan"].__path__ = list(_SPEC.submodule_search_locations)
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import IterableDataset
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.job_config import Checkpoint

    from snapstore.integrations.torchtitan import checkpoint_manager


class Numbers(IterableDataset):
    """A stateful data set, each rank with numbers of its own."""

    def __init__(self, rank):
        self.rank, self.at = rank, 0

    def __iter__(self):
        while True:
            self.at += 1
            yield torch.arange(8.0) * 0.1 + self.rank + self.at * 0.01

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Trainer:
    """The state of torchtitan's Trainer, and its calls of the checkpointer."""

    def __init__(self, job):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
        for part in (*self.model, self.model):
            fully_shard(part)
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 1e-2})
        self.lr_schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (1 + step))
        self.dataloader = ParallelAwareDataloader(Numbers(rank), rank, ranks, batch_size=4)
        self.step = self.ntokens_seen = 0
        make = checkpoint_manager(job["repo"], run="titan")
        self.checkpointer = make(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            checkpoint_config=Checkpoint(**job["config"]),
            sd_adapter=None,
            base_folder="unused",
        )

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state):
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, job):
        loaded, steps, data = self.checkpointer.load(step=job["load_step"]), [], None
        while self.step < job["stop"]:
            data = iter(self.dataloader) if data is None else data
            self.step += 1
            self.model(next(data)).square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.optimizers.zero_grad()
            steps.append(self.step)
            self.checkpointer.save(self.step, last_step=self.step == job["stop"])
            if self.step == job["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
        return loaded, steps

    def digest(self):
        whole = hashlib.sha256()
        states = [self.model.state_dict(), self.optimizers.state_dict(), self.lr_schedulers.state_dict()]
        for state in (*states, self.dataloader.state_dict()):
            for key, value in state.items():
                local = value.to_local() if hasattr(value, "to_local") else value
                data = local.detach().numpy().tobytes() if isinstance(local, torch.Tensor) else repr(value).encode()
                whole.update(key.encode() + data)
        return whole.hexdigest()


def main():
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(job)
    loaded, steps = trainer.train(job)
    Path(f"{job['out']}.{dist.get_rank()}").write_text(json.dumps([loaded, steps, trainer.digest()]))
    trainer.checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
