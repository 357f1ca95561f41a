"""Trains a small GPT on Python's own sources, with a snapshot every few steps. The demo and the tests run it.

The run is deterministic: weights, batches and arithmetic follow from --seed alone. If it is killed at any moment and
started again with the same arguments, it goes on from its newest committed snapshot and computes the same losses,
because the generators are part of the state. `train` below is the loop to copy.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from snapstore import KeepEvery, KeepLast, Repository, RngState, SnapshotManager

BYTES = 256  # the vocabulary: one token per byte
WIDTH, HEADS, LAYERS = 320, 5, 6  # 7.6 M parameters: a state of 91 MB with AdamW's two moments
BATCH, CONTEXT = 6, 128  # about 0.25 s a step on two cores
TEXT_BYTES = 2_000_000


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width), the same out."""
        batch, context, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        out: Tensor = mixed + self.mlp(self.norm2(mixed))
        return out


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, context) int64 to logits (batch, context, 256)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + self.place.weight)))
        return logits


def read_text() -> Tensor:  # (n,) uint8
    """Return every third file at the top of the standard library, in alphabetical order, up to TEXT_BYTES."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::3]
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_batch(text: Tensor) -> tuple[Tensor, Tensor]:  # inputs and targets, both (BATCH, CONTEXT) int64
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))  # from torch's generator, so a resumed run replays it
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def digests(tree: Any, path: str = "") -> dict[str, str]:
    """Return the SHA-256 of every tensor and plain value of a state by path: equal if and only if the bits are."""
    if hasattr(tree, "state_dict"):
        tree = tree.state_dict()
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: digest for key, value in items for name, digest in digests(value, f"{path}/{key}").items()}
    if isinstance(tree, (Tensor, np.ndarray)):
        array = tree.detach().numpy() if isinstance(tree, Tensor) else tree
        return {path: hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()}
    return {path: hashlib.sha256(f"{type(tree).__name__} {tree!r}".encode()).hexdigest()}


def train(args: argparse.Namespace) -> None:
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    os.environ.setdefault("MKL_CBWR", "AUTO")  # else MKL may add in another order on a busy machine
    torch.set_num_threads(2)  # so does another number of threads
    torch.use_deterministic_algorithms(True)

    text, model = read_text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_cosine(step / args.steps))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RngState()}
    state["extra"] = {"tokens": 0}

    repository = Repository.open(args.repo) if args.fork else args.repo  # the manager creates a missing one
    with open_snapshots(args, repository) as snapshots:
        start = 1
        if snapshots and snapshots.latest_step() is not None:
            start = snapshots.restore_into(state).step + 1
            print(f"resumed after step {start - 1}", flush=True)
        elif snapshots and args.fork:
            start = repository.restore_into(args.fork, state).step + 1
            scheduler.base_lrs = [args.lr]
            optimizer.param_groups[0]["lr"] = args.lr * warmup_then_cosine((start - 1) / args.steps)
            snapshots.save(start - 1, state, tags=["fork-point"], force=True)  # so that the run has a snapshot
            print(f"forked from {args.fork} with lr={args.lr}", flush=True)

        for step in range(start, args.steps + 1):
            began = time.perf_counter()
            inputs, targets = draw_batch(text)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            state["extra"]["tokens"] += inputs.numel()

            report(args, step, loss.item(), time.perf_counter() - began, state)
            if snapshots and snapshots.should_save(step):
                snapshots.save(step, state, metrics={"loss": loss.item()})


def warmup_then_cosine(progress: float) -> float:
    """Return the share of the top learning rate: up for a tenth of the run, then down along a cosine to a tenth."""
    return min(0.1 + 10 * progress, 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))


def open_snapshots(args: argparse.Namespace, repository: Any) -> contextlib.AbstractContextManager[Any]:
    if not repository:
        return contextlib.nullcontext()
    keep: list[KeepLast | KeepEvery] = []
    if args.keep_last:
        keep.append(KeepLast(args.keep_last))
    if args.keep_every:
        keep.append(KeepEvery(steps=args.keep_every))
    return SnapshotManager(repository, run=args.run, parent=args.fork, save_interval_steps=args.save_every, keep=keep)


def report(args: argparse.Namespace, step: int, loss: float, step_s: float, state: dict[str, Any]) -> None:
    print(f"step {step} loss {loss:.4f} {step_s * 1000:.0f} ms", flush=True)
    if args.losses:
        with args.losses.open("a") as file:
            file.write(f"{step} {loss.hex()}\n")
    if args.digests and step % args.save_every == 0:
        with args.digests.open("a") as file:
            file.write(json.dumps({"step": step, "digests": digests(state)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", metavar="URL", help="where snapshots go; without it none are taken")
    parser.add_argument("--run", metavar="NAME", default="gpt")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step (default 60)")
    parser.add_argument("--save-every", type=int, default=10, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--from", dest="fork", metavar="REF", help="start from another run's snapshot, such as gpt@30")
    parser.add_argument("--keep-last", type=int, metavar="K")
    parser.add_argument("--keep-every", type=int, metavar="N")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="append 'STEP LOSS' lines, the loss as a hex float")
    parser.add_argument(
        "--digests", type=Path, metavar="FILE", help="append the digests of the state at each N-th step"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
