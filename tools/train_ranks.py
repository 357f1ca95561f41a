"""Trains the demo's GPT under FSDP2 on all ranks of a job, with a snapshot every few steps. tools/demo --ranks runs it.

It runs on GPUs if there is one for each rank. If torchrun starts it again, with any number of ranks, it goes on from
its newest committed snapshot. Rank 0 notes the digest of the whole state at each save and after each restore: equal
digests mean equal bits.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from train_gpt import GPT, draw_batch, read_text

from snapstore import RngState, SnapshotManager


def digest(state: Any) -> str:
    """Return the SHA-256 of all tensors of a state; all ranks call it, since sharded tensors are gathered."""
    found = hashlib.sha256()

    def add(tree: Any) -> None:
        for key in sorted(tree, key=str) if isinstance(tree, dict) else range(len(tree)):
            value = tree[key]
            if isinstance(value, dict | list | tuple):
                add(value)
            elif isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                about = f"{key}{whole.dtype}{tuple(whole.shape)}"
                found.update(about.encode() + whole.detach().cpu().numpy().tobytes())

    add(state)
    return found.hexdigest()


def note(args: argparse.Namespace, event: str, step: int, state: Any) -> None:
    """Append a line to the notes, on rank 0."""
    line = {"event": event, "step": step, "ranks": dist.get_world_size(), "digest": digest(state)}
    if dist.get_rank() == 0:
        with args.notes.open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(args: argparse.Namespace, device: torch.device) -> None:
    """The loop to copy."""
    torch.manual_seed(dist.get_rank())
    torch.set_num_threads(1)
    text, model = read_text(), GPT().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state_of_all() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "rng": RngState()}

    with SnapshotManager(args.repo, run="gpt", save_interval_steps=args.save_every) as snapshots:
        start = 1
        if (latest := snapshots.latest_step()) is not None:
            state = state_of_all()
            # another number of ranks has no generators of its own in the snapshot
            snapshots.restore_into(state, per_rank="same" if dist.get_world_size() == args.ranks_before else "drop")
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            note(args, "restored", latest, {k: state[k] for k in ("model", "optimizer")})
            start = latest + 1
        for step in range(start, args.steps + 1):
            inputs, targets = (tokens.to(device) for tokens in draw_batch(text))
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            if dist.get_rank() == 0:
                print(f"step {step} loss {mean.item():.4f}", flush=True)
            if snapshots.should_save(step):
                state = state_of_all()
                note(args, "saved", step, {k: state[k] for k in ("model", "optimizer")})
                snapshots.save(step, state, metrics={"loss": mean})


def main() -> None:
    """Parse the arguments, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True, help="folder or URL of the repository")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--notes", type=Path, required=True, help="file for the digests")
    parser.add_argument("--ranks-before", type=int, default=0, help="ranks of the job that is resumed")
    args = parser.parse_args()
    ranks, local_rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    line = f"rank {dist.get_rank()} of {dist.get_world_size()} is process {os.getpid()} on {device}\n"
    os.write(1, line.encode())  # at once, or the lines of ranks mix
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
