"""Writes the golden repository of the current format version: tests/golden/v<version>/ and its expected.json.

    .venv/bin/python tools/make_golden.py
    .venv/bin/python tools/make_golden.py --deltas   # tests/golden/v<version>-deltas/, with every kind of delta
    .venv/bin/python tools/make_golden.py --layouts   # tests/golden/v<version>-layouts/, with strides and optimizers
    .venv/bin/python tools/make_golden.py --xor   # tests/golden/v<version>-xor/, with chains of XORs and differences
    .venv/bin/python tools/make_golden.py --pages   # tests/golden/v<version>-pages/, with records joined into pages
    python3 tools/make_golden.py --gpu   # tests/golden/v<version>-gpu/: the same deltas, written by the GPU engine
    python3 tools/make_golden.py --ans   # tests/golden/ans-v<version>/, which only a GPU can read

Run all when a format version is made, and never again for that version: later releases must read the committed copies.
The states are the same in every run. Ids and times are not, and neither are the names of objects.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shutil
import sys
import tempfile
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta, timezone
from enum import Enum, IntFlag
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from snapstore import KeepEvery, KeepLast, PerRank, Repository, RngState, SaveOptions, Snapshot, SnapshotManager
from snapstore.distributed.local import local_ranks
from snapstore.errors import StorageFullError
from snapstore.format import records
from snapstore.format.keys import record_key
from snapstore.format.records import ABORTED, COMMITTED, FORGOTTEN, FORMAT_VERSION, SWEPT, Session
from snapstore.protocol.joining import join
from snapstore.state.values.tensors import TORCH_DTYPES, dim_order_of
from snapstore.storage.local import LocalStore

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / f"v{FORMAT_VERSION}"
MAX_BYTES = 448 * 1024
DELTAS = FOLDER.with_name(f"{FOLDER.name}-deltas")
MAX_DELTA_BYTES = 300 * 1000
LAYOUTS = FOLDER.with_name(f"{FOLDER.name}-layouts")
XORS = FOLDER.with_name(f"{FOLDER.name}-xor")
PAGES = FOLDER.with_name(f"{FOLDER.name}-pages")
BY_GPU = FOLDER.with_name(f"{FOLDER.name}-gpu")
ANS = FOLDER.with_name(f"ans-{FOLDER.name}")
OPTIONS = SaveOptions(restore_cost=4.0, threads=2)
#: Step of the run "job" -> how many ranks save it.
JOB = {0: 3, 1: 3, 2: 2}
#: Snapshots of the run "layouts", and ranks of the run "shares".
LAYOUT_STEPS, SHARES = 3, 2
#: A state of more leaves has only their digest in expected.json.
MANY_LEAVES = 25
#: Runs that ranks save.
JOBS = ("job", "shares")
#: Snapshots of the run "few".
FEW_STEPS = 4
#: Snapshots of the run "kinds": how each changes the elements of the one before.
KINDS = ("first", "few", "most", "far", "few", "near")
#: Snapshots of the run "long".
LONG_STEPS = 20
#: Snapshots of the run "long" of the one with XORs.
XOR_STEPS = 8
#: Snapshots of the run "paged".
PAGED_STEPS = 12
#: Snapshots of the run "ans".
ANS_STEPS = 5


def describe(value: Any) -> dict[str, list[Any]]:
    """Every leaf and container of a state by its path, in plain JSON: types, shapes, SHA-256 of bytes, reprs."""
    return dict(_described(value, ""))


def _described(value: Any, path: str) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(value, dict | list | tuple | deque) and not isinstance(value, torch.Size):
        children = value.items() if isinstance(value, dict) else enumerate(value)
        yield path, [type(value).__name__, len(value)]
        for key, child in children:
            yield from _described(child, f"{path}/{key!r}")
    elif isinstance(value, torch.Tensor):
        raw = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        dtype = str(value.dtype).removeprefix("torch.")
        yield path, [type(value).__name__, dtype, list(value.shape), value.requires_grad, _sha256(raw), *_order(value)]
    elif isinstance(value, np.ndarray):
        yield path, ["ndarray", value.dtype.str, list(value.shape), False, _sha256(value.tobytes()), *_order(value)]
    elif isinstance(value, torch.optim.Optimizer):
        yield from _described(value.state_dict(), path)
    elif isinstance(value, bytes | bytearray):
        yield path, [type(value).__name__, len(value), _sha256(bytes(value))]
    elif isinstance(value, set | frozenset):
        yield path, [type(value).__name__, sorted(map(repr, value))]
    else:
        yield path, [type(value).__name__, repr(value)]


def _order(value: Any) -> list[list[int]]:
    """Return the order of the dimensions in memory, in a list; [] for C order."""
    order = dim_order_of(value)
    return [list(order)] if order else []


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def summary(leaves: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the leaves that `describe` gives; if they are many, only their number and one SHA-256 of all."""
    text = json.dumps(leaves, sort_keys=True)
    return leaves if len(leaves) <= MANY_LEAVES else {"": ["leaves", len(leaves), _sha256(text.encode())]}


def weights(step: int) -> dict[str, Any]:
    """Return a part whose chunks change a little at every step, so that deltas are stored."""
    rng = np.random.default_rng(1)
    part: dict[str, Any] = OrderedDict()
    for name, count, dtype in (("w", 2500, torch.float32), ("h", 3000, torch.bfloat16), ("d", 600, torch.float64)):
        values, change = rng.normal(0, 0.02, count), rng.normal(0, 1e-5, count)
        part[name] = torch.from_numpy(values + step * change).to(dtype).reshape(-1, 10)
    part["w"] = torch.nn.Parameter(part["w"])
    part["tied"] = part["w"]
    return part


def every_dtype() -> dict[str, Any]:
    """One inline tensor of every torch dtype, and some that are cut into chunks."""
    rng = np.random.default_rng(2)
    part: dict[str, Any] = {}
    for name, (itemsize, _, _) in TORCH_DTYPES.items():
        if hasattr(torch, name):
            raw = torch.from_numpy(rng.integers(0, 2 if name == "bool" else 256, 6 * itemsize, np.uint8))
            part[name] = raw.view(getattr(torch, name)).reshape(2, 3)
    part["long"] = torch.arange(700) * 12345678901
    part["flags"] = torch.from_numpy(rng.integers(0, 2, 4500, np.uint8)).bool()
    part["waves"] = torch.polar(torch.ones(600), torch.arange(600.0))
    part["eighths"] = torch.linspace(-2, 2, 4200).to(torch.float8_e4m3fn)
    part["scalar"] = torch.tensor(1.5)
    part["empty"] = torch.empty(0, 3)
    part["nan"] = torch.tensor([0x7FC00123, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    part["expanded"] = torch.tensor([1.0, 2.0]).expand(3, 2)
    part["grad"] = torch.zeros(3, requires_grad=True)
    return part


def arrays() -> dict[str, Any]:
    """NumPy: either byte order, strings, times, and more than a chunk."""
    return {
        "big_endian": np.arange(1200, dtype=">i4"),
        "halves": np.linspace(0, 1, 2500).astype("<f2"),
        "words": np.array(["snap", "store", "größe"] * 80),
        "raw": np.array([b"ab", b"c"]),
        "times": np.arange("2026-01", "2026-05", dtype="M8[M]"),
        "complex": np.array([1 + 2j, -0.0]),
        "scalar": np.array(7, np.uint16),
        "bools": np.array([[True], [False]]),
    }


def plain() -> dict[Any, Any]:
    """Every kind of plain value and container."""
    return {
        "none": None, "yes": True, "int": -3, "huge": 2**100, "float": 0.1, "inf": -math.inf, "nan": math.nan,
        "minus": -0.0, "text": "größe \U0001f600", "lone": "\ud800", "bytes": b"\0\xff", "long": bytes(range(256)) * 20,
        "array": bytearray(b"xyz"), "complex": 1 - 2j, "list": [1, [2, []]], "tuple": (1, (2,), ()), "set": {1, 2, 3},
        "frozen": frozenset({"a"}), "deque": deque([1, 2], 5), "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({3: 4}), "default": defaultdict(list, {"k": [1]}), "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]), "device": torch.device("cuda:1"), "np": np.float32(0.1), "npstr": np.str_("s"),
        "npdtype": np.dtype("<f4"), 7: "int key", (1, "a"): "tuple key", None: "none key", 1.5: "float key",
    }  # fmt: skip


def state(step: int) -> dict[str, Any]:
    """Return the state of a step."""
    model = weights(step)
    return {
        "model": model,
        "frozen": {"table": torch.from_numpy(np.random.default_rng(3).normal(0, 1, 1200).astype(np.float32))},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "ref": model["w"]}}, "lr": 0.1 / (step + 1)},
        "extra": {"step": step, "name": f"step {step}"},
        **({"dtypes": every_dtype(), "arrays": arrays(), "plain": plain()} if step == 0 else {}),
    }


def few_changes(step: int) -> dict[str, Any]:
    """Return weights of which each step changes few, by one unit in the last place: sparse deltas, and skips later."""
    part = {}
    for name, count, dtype, bits in (("h", 3500, torch.bfloat16, torch.int16), ("w", 1700, torch.float32, torch.int32)):
        rng = np.random.default_rng(count)
        part[name] = torch.from_numpy(rng.normal(0, 0.02, count)).to(dtype)
        for _ in range(step):
            part[name].view(bits)[torch.from_numpy(rng.integers(0, count, count // 60))] += 1
    return {"model": part}


def delta_kinds(step: int) -> dict[str, Any]:
    """Return arrays of each element size and layout; see `KINDS` for the deltas of a step."""
    part: dict[str, Any] = {}
    names = ("bool", "int8", "float8_e4m3fn", "int16", "bfloat16", "int32", "float32", "complex64", "int64", "float64")
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        dtype = getattr(torch, name)
        size = min(8, dtype.itemsize) // (2 if dtype.is_complex else 1)
        values = torch.from_numpy(rng.normal(0, 40, 8192 // size))
        if dtype.is_complex:
            values = torch.view_as_complex(values.reshape(-1, 2))
        values = (values > 0) if name == "bool" else values.to(dtype)
        bits = values.view(torch.uint8).numpy().view(f"i{size}")
        flat = torch.view_as_real(values) if dtype.is_complex else values
        small = np.flatnonzero((flat.reshape(-1).double().abs() < 8).numpy())
        for kind in KINDS[1 : step + 1]:
            change_elements(bits, kind, rng, small, is_bool=name == "bool")
        part[name] = values
    part["big_endian"] = part["int32"].numpy().astype(">i4")
    return {"model": part}


def change_elements(
    bits: np.ndarray[Any, Any], kind: str, rng: np.random.Generator, small: np.ndarray[Any, Any], *, is_bool: bool
) -> None:
    """Change elements in place: most or few by one unit, few by far more, or few and all `small` ones by some more."""
    count, signs = len(bits), np.array([-1, 1], bits.dtype)
    if kind == "most" and not is_bool:
        bits[rng.random(count) < 0.8] += rng.choice(signs)
        return
    first = int(count * 0.6)  # nearly all changes lie before it, so the gap behind them is far longer than the others
    at = np.append(np.sort(rng.choice(first, first // 6, replace=False)), count - 2)
    if is_bool:
        bits[at] ^= 1
    elif kind == "near":
        at = np.union1d(at, small)
        sizes = rng.integers(2, 60, len(at))
        sizes[::60] = 100 if bits.itemsize == 1 else 1000
        bits[at] += sizes.astype(bits.dtype)
    elif kind == "far":
        most = 1 << (8 * bits.itemsize - 2)
        sizes = rng.integers(4, min(most, 60_000), len(at))
        sizes[::9] = rng.integers(1, most, len(sizes[::9]))
        bits[at] += sizes.astype(bits.dtype)
    else:
        bits[at] += rng.choice(signs, len(at))


def long_chain(step: int) -> dict[str, Any]:
    """Return weights in which some elements change often: long chains, in which a delta may replace several ones."""
    part = {}
    for name, dtype, bits in (("h", torch.bfloat16, torch.int16), ("n", torch.int32, torch.int32)):
        rng = np.random.default_rng(9)
        part[name] = torch.from_numpy(rng.normal(0, 1000, 8192 // dtype.itemsize)).to(dtype)
        often = rng.choice(part[name].numel(), 120, replace=False)
        for _ in range(step):
            part[name].view(bits)[torch.from_numpy(rng.choice(often, 90, replace=False))] += 1
    return {"model": part}


class Momentum(torch.optim.Optimizer):
    """An optimizer without arguments, whose state is the same in every release of torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


def layouts(step: int) -> dict[str, Any]:
    """Return arrays whose dimensions lie in other orders than C's, and an optimizer with momenta like them."""
    rng = np.random.default_rng(11)
    images = torch.from_numpy(rng.normal(0, 0.02, (24, 16, 3, 3)).astype(np.float32))
    images.view(-1)[: 40 * step] += 1e-7
    model = {
        "channels_last": torch.nn.Parameter(images.to(memory_format=torch.channels_last)),
        "1x1": torch.nn.Parameter(images[:, :, :1, :1].clone(memory_format=torch.channels_last)),
        "transposed": torch.from_numpy(rng.normal(0, 1, (60, 40))).to(torch.bfloat16).t(),
        "permuted": torch.from_numpy(rng.normal(0, 1, (10, 12, 14))).permute(2, 0, 1),
        "inline": torch.arange(6).reshape(3, 2).t(),
        "in order": torch.nn.Parameter(torch.arange(1200.0).reshape(30, 40) + step),
        "gaps": torch.zeros(5, 12, dtype=torch.int64)[:, ::2].copy_(torch.arange(60).reshape(6, 10)[:, ::2].t()),
    }
    optimizer = Momentum([p for p in model.values() if isinstance(p, torch.nn.Parameter)])
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {"momentum": parameter.detach() / 3, "step": torch.tensor(float(step))}
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))], "lr": 0.2})
    arrays = {"fortran": np.asfortranarray(rng.normal(0, 1, (30, 40))), "axes": np.zeros((2, 3, 4)).transpose(1, 2, 0)}
    return {"model": model, "optimizer": optimizer, "arrays": arrays, "nested": {"optimizers": [optimizer]}}


def layouts_of_rank(rank: int) -> dict[str, Any]:
    """Return a rank's rows: of a matrix that all ranks have column by column, and of one that one rank has so."""
    whole = torch.arange(48.0 * 40).reshape(48, 40)
    both, one = (part_of(whole, 0, rank, SHARES) for _ in range(2))
    both.data = both.data.t().contiguous().t()
    if rank:
        one.data = one.data.t().contiguous().t()
    found = layouts(0)
    return {
        "both": both,
        "one": one,
        "plain": found["model"]["channels_last"],
        "optimizer": found["optimizer"],
        "own": PerRank({"optimizer": Momentum([torch.nn.Parameter(torch.ones(4 + rank, 2))]), "t": whole[rank:].t()}),
    }


def restored_of_rank(rank: int) -> dict[str, Any]:
    """Return a rank's state of the run "shares" as a restore gives it."""
    whole, found = torch.arange(48.0 * 40).reshape(48, 40), layouts_of_rank(rank)
    return found | {"both": whole.t().contiguous().t(), "one": whole, "own": found["own"].value}


def ans(step: int) -> dict[str, Any]:
    """Return weights that change a little at every step, and others that change at the fourth step only."""
    part = {}
    for name, count, dtype, bits in (
        ("w", 12_000, torch.float32, torch.int32),
        ("h", 24_000, torch.bfloat16, torch.int16),
        ("f", 9_000, torch.float32, torch.int32),
    ):
        rng = np.random.default_rng(count)
        part[name] = torch.from_numpy(rng.normal(0, 0.02, count)).to(dtype)
        for at in range(1, step + 1):
            if name != "f" or at == 3:
                part[name].view(bits).add_(torch.from_numpy(rng.integers(-2, 3, count)).to(bits))
    return {"model": part}


@dataclass
class Settings:
    """A user's class, which a reader does not import."""

    rate: float
    names: list[str]


class Phase(Enum):
    """A user's Enum."""

    WARMUP = 1
    DECAY = "decay"


class Access(IntFlag):
    """A user's flags."""

    READ = 1
    WRITE = 2


class Named(dict[str, int]):
    """A user's dict."""


Point = namedtuple("Point", "x y")
for _class in (Settings, Phase, Access, Named, Point):
    _class.__module__ = "golden"  # without this, that of this script, which may be __main__


def values(step: int) -> dict[str, Any]:
    """Plain values in columns and pages, and of classes; only the first part differs between two steps."""
    zone = timezone(timedelta(hours=-3, minutes=-30), "there")
    return {
        "step": step,
        "columns": {
            "ints": list(range(300)),
            "texts": tuple(f"n{i % 7}" for i in range(300)),
            "map": {f"k{i}": i / 8 for i in range(300)},
            "list rows": [[i, None, str(i)] for i in range(280)],
            "lists": [list(range(i % 4)) for i in range(280)],
            "tuples": [tuple(range(i % 3)) for i in range(280)],
            "dicts": [dict.fromkeys(range(i % 3), i) for i in range(280)],
            "mixed": [None, 1, 2.5, "x", [1, 2], (3,), {"a": ()}] * 40,
            "bytes": [b"a" * (i % 3) for i in range(280)],
        },
        "dict rows": {"all": [{"id": i, "loss": 1 / (i + 1), "tags": [i % 2]} for i in range(280)]},
        "tuple rows": {"all": [(i, True) for i in range(280)]},
        "classes": [
            Settings(0.1, ["a", "b"]), Phase.DECAY, Access.READ | Access.WRITE, Named(a=1), Point(1, [2]),
            SimpleNamespace(a=1), Namespace(lr=0.5), Path("/data/x"), PureWindowsPath("C:/x"), PurePosixPath("a/b"),
            date(2026, 2, 28), time(1, 2, 3, fold=1), datetime(2026, 2, 28, 1, tzinfo=zone), timedelta(1, 2, 3), zone,
            UTC,
        ],
        "pages": {"log": [bytes([i]) * 3600 for i in range(20)], "blob": {"x": torch.arange(2000)}},
    }  # fmt: skip


def part_of(whole: torch.Tensor, dim: int, rank: int, world: int) -> SimpleNamespace:
    """Return a rank's rows or columns as Megatron's sharded tensor; empty if there are too few."""
    step = -(-whole.shape[dim] // world)
    first = min(rank * step, whole.shape[dim])
    offsets = [0] * whole.ndim
    offsets[dim] = first
    data = whole.detach().narrow(dim, first, min(step, whole.shape[dim] - first)).clone()
    return SimpleNamespace(
        key="", data=data, global_shape=tuple(whole.shape), global_offset=tuple(offsets), replica_id=0
    )


def whole_of_job(step: int) -> dict[str, Any]:
    """Return what the ranks of a job hold together at a step, without the values that each rank has for itself."""
    rng = np.random.default_rng(5)
    model: dict[str, Any] = {}
    for name, count, dtype in (("w", 3100, torch.float32), ("h", 6240, torch.bfloat16), ("d", 600, torch.float64)):
        values, change = rng.normal(0, 0.02, count), rng.normal(0, 1e-5, count)
        model[name] = torch.from_numpy(values + step * change).to(dtype).reshape(-1, 24 if name == "h" else 10)
    model["tied"] = model["w"]
    return {
        "model": model,
        "buffers": {
            "table": torch.from_numpy(np.random.default_rng(4).normal(0, 1, (40, 40)).astype(np.float32)),
            "few": torch.arange(6).reshape(2, 3) + step,
            "steps": torch.tensor(float(step)),
            "empty": torch.empty(0, 3),
            "array": np.arange(1500, dtype=">i4") * (step + 1),
            "weight": torch.nn.Parameter(torch.linspace(0, 1, 1100)),
            # A tree of more than 64 KiB lies in pages of the root; one of them changes from step to step.
            "seen": [bytes([i]) * 3600 + bytes([step] * (i == 9)) for i in range(20)],
        },
        "stages": {"first": torch.full((5, 7), float(step)), "last": torch.arange(2000)},
        "optimizer": {"ref": model["w"], "lr": 0.1 / (step + 1)},
    }


def state_of_rank(step: int, rank: int, world: int) -> dict[str, Any]:
    """Return one rank's state: sharded rows and columns, replicas, tensors of one stage, and its own values."""
    found = whole_of_job(step)
    model, stages = found["model"], found["stages"]
    for name, dim in (("w", 0), ("h", 1), ("d", 0)):
        model[name] = part_of(model[name], dim, rank, world)
    model["tied"] = found["optimizer"]["ref"] = model["w"]
    found["buffers"]["few"] = part_of(found["buffers"]["few"], 0, rank, world)
    found["stages"] = {name: tensor for name, tensor in stages.items() if rank == (0 if name == "first" else world - 1)}
    return found | {"own": PerRank(own_of_rank(step, rank))} | ({"rng": RngState()} if step == 0 else {})


def own_of_rank(step: int, rank: int) -> dict[str | int, Any]:
    """Return the values of a rank's own: inline, and of more than a chunk."""
    return {"at": (rank, step), "seen": torch.arange(1100) * (rank + 1) + step, "log": f"rank {rank}", 3: None}


def on_all(managers: Sequence[SnapshotManager], call: Callable[[SnapshotManager, int], Any]) -> list[Any]:
    """Call a function with the manager and the number of each rank, all at once."""
    with ThreadPoolExecutor(len(managers)) as pool:
        return list(pool.map(call, managers, range(len(managers))))


def save_rank(step: int, world: int, manager: SnapshotManager, rank: int) -> Snapshot | None:
    """Save one rank's state, and return the snapshot of all."""
    return manager.save(step, state_of_rank(step, rank, world)).result()


def save_job(folder: Path, first: int, steps: int, world: int) -> list[Snapshot | None]:
    """Save steps of the run "job" by so many ranks; each is a thread."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    ranks = local_ranks(world)
    with ThreadPoolExecutor(world) as pool:
        manager_of = partial(SnapshotManager, folder, run="job", async_save=False, options=OPTIONS)
        managers = list(pool.map(lambda rank: manager_of(ranks=rank), ranks))
    saved = [on_all(managers, partial(save_rank, step, world))[0] for step in range(first, first + steps)]
    on_all(managers, lambda manager, _: manager.close())
    return saved


def restored_job(repo: Repository, step: int, rank: int) -> Any:
    """Restore a step of the run "job" with the own values of one of its ranks."""
    with SnapshotManager(repo, run="job", read_only=True) as manager:
        return manager.restore(step, per_rank=rank)


def write(folder: Path) -> None:
    """Write it: committed, tagged, resaved, forgotten and swept snapshots, policies, a gc, a run of ranks."""
    with Repository.create(folder, chunk_bytes=4096, options=OPTIONS) as repo:
        for step, version in enumerate((0, 1, 1)):  # only the first snapshot needs most of the first pack
            noise = torch.from_numpy(np.random.default_rng(version).normal(0, 1, 600))
            repo.save({"model": {"kept": torch.arange(600), "noise": noise}}, run="compacted", step=step)
        repo.forget([KeepLast(2)], run="compacted")
        repo.gc()
        assert repo.compact().rewritten
        repo.gc()
        for step in range(5):
            repo.save(state(step), run="main", step=step, metrics={"loss": 1 / (step + 1)}, metadata={"step": step})
        repo.save(state(2), run="main", step=2, tags=["again"])
        repo.tag("main@0", "start")
        repo.save({"only": {"w": torch.arange(1500.0)}}, run="gone", step=0)
        repo.save({"only": {"w": torch.arange(2500.0)}}, run="gone", step=1)
        repo.forget([KeepLast(1)], run="gone")
        repo.gc()
        for step in range(FEW_STEPS):
            repo.save(few_changes(step), run="few", step=step)
        for step, version in enumerate((0, 0, 1)):  # the second shares all manifests of the first, the third some
            repo.save(values(version), run="values", step=step)
        repo.save(state(6), run="fork", step=6, parent="main@3", metadata="forked")
        repo.forget_snapshots(["main@1"])
        repo.set_policies("main", [KeepLast(3), KeepEvery(steps=2)])
    save_job(folder, 0, 2, JOB[0])
    save_job(folder, 2, 1, JOB[2])


def write_layouts(folder: Path) -> None:
    """Write a repository with dimension orders and optimizers, of one process and of ranks."""
    with Repository.create(folder, chunk_bytes=4096, options=OPTIONS) as repo:
        for step in range(LAYOUT_STEPS):
            repo.save(layouts(step), run="layouts", step=step)
    ranks = local_ranks(SHARES)
    with ThreadPoolExecutor(SHARES) as pool:
        manager_of = partial(SnapshotManager, folder, run="shares", async_save=False, options=OPTIONS)
        managers = list(pool.map(lambda rank: manager_of(ranks=rank), ranks))
    on_all(managers, lambda manager, rank: manager.save(0, layouts_of_rank(rank)).result())
    on_all(managers, lambda manager, _: manager.close())


def write_deltas(folder: Path, device: str = "cpu") -> None:
    """Write a repository with the kinds of deltas and chains that `write` does not make, from tensors on `device`."""
    with Repository.create(folder, chunk_bytes=8192, options=replace(OPTIONS, restore_cost=100.0)) as repo:
        for step in range(len(KINDS)):
            repo.save(on_device(delta_kinds(step), device), run="kinds", step=step)
    with Repository.open(folder, options=replace(OPTIONS, restore_cost=2.0)) as repo:  # so skips are due early
        for step in range(LONG_STEPS):
            repo.save(on_device(long_chain(step), device), run="long", step=step)


def write_xors(folder: Path) -> None:
    """Write chains in which XORs, differences in planes and sparse deltas alternate."""
    Repository.create(folder, chunk_bytes=8192).close()
    for run, steps, period in (("kinds", len(KINDS), 2), ("long", XOR_STEPS, 3)):
        for step in range(steps):
            options = replace(OPTIONS, restore_cost=100.0, delta="xor" if step % period else "difference")
            with Repository.open(folder, options=options) as repo:
                repo.save(STATES[run](step), run=run, step=step)


class _FullStore(LocalStore):
    """A local store without room for packs."""

    def put(self, key: str, data: Any) -> None:
        """Put an object, unless it is a pack."""
        if key.startswith("packs/"):
            raise StorageFullError(f"{key}: no room")
        super().put(key, data)


def write_pages(folder: Path) -> None:
    """Write a run of two pages and loose records, some of them void, and a fork of one page."""
    with Repository.create(folder, chunk_bytes=4096, options=OPTIONS) as repo:
        for step in range(6):
            options: dict[str, Any] = {
                "metrics": {"loss": 1 / (step + 1)},
                "metadata": {"step": step},
                "tags": ["start"][step:],
            }
            repo.save(few_changes(step), run="paged", step=step, **options)
        fence_a_save(repo, "paged", 6)
        repo.forget_snapshots(["paged@1"])
        repo.gc()
        repo.forget_snapshots(["paged@2"])
    copy_in_vain(folder, "paged", 7)
    with Repository.open(folder, options=OPTIONS) as repo:
        assert join(repo.context, "paged", at_least=1).pages == 1
        for step in range(8, PAGED_STEPS):
            options = {"metrics": {"loss": 1 / step}, "metadata": [step, None]}
            options |= {"parent": "paged@0"} if step == 9 else {}  # of another page
            repo.save(few_changes(step), run="paged", step=step, **options)
        repo.tag("paged@8", "best")
        repo.unforget("paged@2")
        alive = repo.snapshot("paged@3")
        repo.forget_snapshots(["paged@3", "paged@9"])
        repo.gc()
        repo.forget_snapshots(["paged@4"])
        loose = {info.key: repo.store.get(info.key) for info in repo.store.list("snapshots/paged/")}
        assert join(repo.context, "paged", at_least=1).pages == 1
        for step in range(2):
            repo.save(few_changes(step), run="second", step=step, parent="paged@10", tags=["start"])
        assert join(repo.context, "second", at_least=1).pages == 1
        repo.save(few_changes(PAGED_STEPS), run="paged", step=PAGED_STEPS, tags=["best"])  # takes it from a joined one
        repo.forget_snapshots(["paged@10"])
        put_void_records(repo, loose, alive)


def fence_a_save(repo: Repository, run: str, step: int) -> None:
    """Leave the session of a save that has died, and fence it: an aborted record that is no copy's."""
    name = records.new_id()
    session = Session(id=name, key=record_key(run, step, name, 0), host="gone", boot_id="", pid=1, started=0.0)
    repo.store.put(records.key_of(session), records.encode(session))
    assert repo.gc(fence_after_s=0.0).fenced == [name]


def copy_in_vain(folder: Path, run: str, step: int) -> None:
    """Begin a copy of a snapshot, and fail: the record that announces a copy stays whole in a page."""
    with tempfile.TemporaryDirectory() as parent, Repository.open(folder, options=OPTIONS) as repo:
        other = Path(parent) / "other"
        repo.copy([f"{run}@0"], to=other)
        with Repository.open(other, options=OPTIONS) as source:
            saved = source.save({"w": torch.arange(1500.0)}, run=run, step=step)
            with suppress(StorageFullError):
                source.copy([saved.ref], to=_FullStore(folder))


def put_void_records(repo: Repository, loose: dict[str, bytes], alive: Snapshot) -> None:
    """Put loose records that pages make void: as a join leaves that died, and as an un-forget that came too late.

    Args:
        loose: some that were joined.
        alive: a record of a snapshot that was swept later, and joined.
    """
    (dead,) = (s for s in repo.view().snapshots(alive.run, (SWEPT,)) if s.id == alive.id)
    late = msgspec.structs.replace(alive, revision=dead.revision, write_id=records.new_id())
    left = [(key, data) for key, data in loose.items() if "/000000000004-" in key or "/000000000009-" in key]
    for key, data in (*left, (late.key, records.encode(late))):
        repo.store.put(key, data)


def write_ans(folder: Path) -> None:
    """Write a repository with full chunks and differences in nvCOMP's ANS; it needs a GPU."""
    options = replace(OPTIONS, restore_cost=100.0, codec="ans")
    with Repository.create(folder, chunk_bytes=32_768, options=options) as repo:
        for step in range(ANS_STEPS):
            repo.save(on_device(ans(step), "cuda"), run="ans", step=step)


def on_device(state: dict[str, Any], device: str) -> dict[str, Any]:
    """Move the tensors of the part "model"; arrays of NumPy stay where they are."""
    return {"model": {name: x.to(device) if torch.is_tensor(x) else x for name, x in state["model"].items()}}


#: Run -> the state of a step.
STATES = {
    "layouts": layouts,
    "main": state,
    "fork": state,
    "few": few_changes,
    "paged": few_changes,
    "second": few_changes,
    "kinds": delta_kinds,
    "long": long_chain,
    "ans": ans,
}


def expectations(folder: Path) -> dict[str, Any]:
    """Describe what a reader must find."""
    snapshots = []
    with Repository.open(folder) as repo:
        for s in repo.view().snapshots(states=(COMMITTED, FORGOTTEN, SWEPT, ABORTED)):
            readable = s.state in (COMMITTED, FORGOTTEN)
            found = {
                "id": s.id, "run": s.run, "step": s.step, "seq": s.seq, "state": s.state, "parent": s.parent,
                "tags": s.tags, "metrics": s.metrics, "depth": s.depth, "logical_bytes": s.logical_bytes,
                "leaves": summary(describe(repo.restore(f"id:{s.id}"))) if readable and s.run not in JOBS else None,
            }  # fmt: skip
            if s.run == "job":
                found["ranks"] = [summary(describe(restored_job(repo, s.step, rank))) for rank in range(JOB[s.step])]
                require_job(repo, s.step)
            elif s.run == "shares":
                with SnapshotManager(repo, run="shares", read_only=True) as manager:
                    ranks = [describe(manager.restore(s.step, per_rank=rank)) for rank in range(SHARES)]
                assert ranks == [describe(restored_of_rank(rank)) for rank in range(SHARES)]
                found["ranks"] = list(map(summary, ranks))
            elif readable and s.run in STATES:
                assert found["leaves"] == summary(describe(STATES[s.run](s.step))), s.ref
            snapshots.append(found)
        assert {LAYOUTS: 1, PAGES: 2}.get(folder, 3) in {s["depth"] for s in snapshots}
        assert repo.check("restore").ok
    return {"format": FORMAT_VERSION, "snapshots": snapshots}


def require_job(repo: Repository, step: int) -> None:
    """Compare a step of the run "job" with what its ranks have saved."""
    for rank in range(JOB[step]):
        restored = restored_job(repo, step, rank)
        assert describe(restored.pop("own")) == describe(own_of_rank(step, rank))
        assert step or restored.pop("rng").keys() >= {"python", "numpy", "torch"}
        assert describe(restored) == describe(whole_of_job(step))


def main() -> int:
    """Make a golden repository of a new version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--deltas", action="store_true", help="make the one with every kind of delta")
    which.add_argument("--layouts", action="store_true", help="make the one with strides and optimizers")
    which.add_argument("--xor", action="store_true", help="make the one with XORs")
    which.add_argument("--pages", action="store_true", help="make the one with pages of records")
    which.add_argument("--gpu", action="store_true", help="make the same deltas on a GPU")
    which.add_argument("--ans", action="store_true", help="make the one with nvCOMP's ANS, on a GPU")
    chosen = parser.parse_args()
    folder, make, most = FOLDER, write, MAX_BYTES
    if chosen.deltas:
        folder, make, most = DELTAS, write_deltas, MAX_DELTA_BYTES
    elif chosen.layouts:
        folder, make, most = LAYOUTS, write_layouts, MAX_DELTA_BYTES
    elif chosen.xor:
        folder, make, most = XORS, write_xors, MAX_DELTA_BYTES
    elif chosen.pages:
        folder, make, most = PAGES, write_pages, MAX_DELTA_BYTES
    elif chosen.gpu:
        folder, make, most = BY_GPU, partial(write_deltas, device="cuda"), MAX_DELTA_BYTES
    elif chosen.ans:
        folder, make, most = ANS, write_ans, MAX_DELTA_BYTES
    if folder.exists():
        print(f"{folder} is there: the golden repository of a frozen version never changes", file=sys.stderr)
        return 2
    make(folder)
    expected = expectations(folder)
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    (folder / "expected.json").write_text(json.dumps(expected, indent=0) + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size} bytes, {len(expected['snapshots'])} snapshots")
    return 0 if size < most else 1


if __name__ == "__main__":
    raise SystemExit(main())
