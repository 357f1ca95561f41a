"""One rank of two: `python -m kit.hugging_face_ranks FOLDER`, with the variables of a launcher such as RANK.

It trains with the Trainer and DDP, then with Accelerate and FSDP2, each once whole and once from a step in the middle.
It prints "same" for each pair that ends in the same state.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin

from kit.hugging_face import SnapshotCallback, checkpoint_dir, trainer
from kit.repositories import same
from snapstore import RngState, SnapshotManager
from snapstore.integrations.accelerate import load_state, save_state


def train_ddp(root: Path, step: int | None) -> list[Any]:
    """Train from a step with the Trainer; return the weights, the optimizer's state and the generators'."""
    made = trainer(root / "out", ddp_backend="gloo", dataloader_pin_memory=False)
    with SnapshotManager(root / "ddp", run="a") as manager:
        made.add_callback(SnapshotCallback(manager))
        with checkpoint_dir(manager, step) as path:
            is_link = path is not None and Path(path, "model.safetensors").is_symlink()
            assert is_link == (path is not None and made.args.process_index == 1)
            made.train(resume_from_checkpoint=path)
    return [dict(made.model.state_dict()), made.optimizer.state_dict(), torch.get_rng_state()]


def train_fsdp2(root: Path, step: int) -> list[Any]:
    """Train from a step with FSDP2. Accelerate enables it on GPUs only, so this sets its state by hand."""
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    state = accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_offload=False)
    state.distributed_type = DistributedType.FSDP
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.NAdam(model.parameters(), 0.1)  # torch casts a float32 number of its state
    data = torch.arange(96.0).double().reshape(24, 4) / 96
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state.distributed_type = DistributedType.FSDP  # which `prepare` has set back
    with SnapshotManager(root / "fsdp2", run="a") as manager:
        if step:
            assert load_state(accelerator, manager, step).step == step
        batches = accelerator.skip_first_batches(loader, step) if step else loader
        for number, batch in enumerate(batches, step + 1):
            if number == step + 1 and step:
                manager.restore_into({"rng": RngState()}, step, keys="rng")
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            save_state(accelerator, manager, number)
    weights = {name: value.full_tensor().detach() for name, value in model.named_parameters()}
    return [weights, torch.get_rng_state()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for train, begin, middle in ((train_ddp, None, 3), (train_fsdp2, 0, 4)):
        whole = train(folder, begin)
        print(train.__name__, "same" if same(train(folder, middle), whole) else "differs", flush=True)
