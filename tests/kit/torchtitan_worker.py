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
from importlib.metadata import version
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

    IS_OLDER = version("torchtitan").startswith("0.2.")
    if IS_OLDER:
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.lr_scheduler import LRSchedulersContainer
        from torchtitan.components.optimizer import OptimizersContainer
        from torchtitan.config.job_config import Checkpoint
    else:
        sys.modules["torchtitan.train"] = types.ModuleType("torchtitan.train")  # of a Trainer that wants triton
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import default_adamw
        from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    from snapstore.integrations.torchtitan import checkpoint_manager, use_by_default


class Fused(torch.nn.Linear):
    """A fused weight, which its state dict holds as two, as the attention of torchtitan 0.3 does."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    @staticmethod
    def _split(module, state, prefix, _):
        weight = state.pop(f"{prefix}weight")
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        state[f"{prefix}wq.weight"], state[f"{prefix}wk.weight"] = (part.clone() for part in whole.chunk(2))

    @staticmethod
    def _merge(module, state, prefix, *_):
        whole = torch.cat([state.pop(f"{prefix}wq.weight"), state.pop(f"{prefix}wk.weight")])
        mesh = module.weight.device_mesh
        state[f"{prefix}weight"] = torch.distributed.tensor.distribute_tensor(whole, mesh, module.weight.placements)


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
        first = torch.nn.Linear if IS_OLDER else Fused
        self.model = torch.nn.Sequential(first(8, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
        for part in (*self.model, self.model):
            fully_shard(part)
        if IS_OLDER:
            self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 1e-2})
        else:
            self.optimizers = default_adamw(lr=1e-2, fused=False, foreach=True).build(model_parts=[self.model])
        self.lr_schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (1 + step))
        self.dataloader = ParallelAwareDataloader(Numbers(rank), rank, ranks, batch_size=4)
        self.step = self.ntokens_seen = 0
        if IS_OLDER:
            make = checkpoint_manager(job["repo"], run="titan")
            config = {"checkpoint_config": Checkpoint(**job["config"])}
        else:
            use_by_default(job["repo"], run="titan")
            make, config = CheckpointManager.Config(**job["config"]).build, {}
        self.checkpointer = make(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder="unused",
            **config,
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
