"""One rank of the worlds that `tools/bench ranks` starts: a Llama under FSDP2, saved by snapstore and by DCP.

In: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and a task as JSON in the last argument. Out: rank 0 writes what all
ranks measured, as JSON, to the task's `out`. A stall is the time from the call until the tensors may change.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from benchmarks import gpu_limits
from snapstore import Repository, SaveOptions, SnapshotManager
from snapstore.chunks.reader import ChunkReader
from snapstore.distributed import torch_ranks
from snapstore.protocol.session import SaveSession
from snapstore.save.ranks import together
from snapstore.save.ranks.writer import RankWriter

SAVES, WARM = 6, 2
STALLS = 14  # saves whose stalls are measured: on shared machines many of them are slow
SHARES = 8  # the first of them, in which each rank also saves its own share: the files of all saves are in memory
#: A core counts as undisturbed if the loop before the save took at most so many times as long as the fastest loop.
UNDISTURBED = 1.2
dcp: Any = import_module("torch.distributed.checkpoint")


class Block(torch.nn.Module):
    """A layer with the nine parameters of a Llama's: four of attention, three of the MLP, two norms."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (torch.nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, hidden, bias=False)
        self.norm1, self.norm2 = (torch.nn.RMSNorm(hidden) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, hidden)."""
        y = self.norm1(x)
        x = x + self.o(torch.nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        y = self.norm2(x)
        out: torch.Tensor = x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
        return out


class Llama(torch.nn.Module):
    """Embedding, layers, norm, head."""

    def __init__(self, hidden: int, inner: int, layers: int, words: int = 8192) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, hidden)
        self.layers = torch.nn.ModuleList(Block(hidden, inner) for _ in range(layers))
        self.norm, self.head = torch.nn.RMSNorm(hidden), torch.nn.Linear(hidden, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next token, from (batch, length)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss: torch.Tensor = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss


class Run:
    """A sharded model in training.

    Args:
        busy: train on a GPU as users do, in bfloat16 and on 8,192 tokens a rank and step, so that the GPU sets the
            pace; else on 64 tokens, so that Python does, which launches the kernels.
    """

    def __init__(self, shape: tuple[int, int, int], mesh: DeviceMesh, *, busy: bool = False) -> None:
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
        )
        torch.manual_seed(1)
        with torch.device(self.device):
            self.model = Llama(*shape)
        busy = busy and mesh.device_type == "cuda"
        self.batch = (8, 1024) if busy else (1, 64)
        policy = MixedPrecisionPolicy(torch.bfloat16 if busy else None)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)

    def train(self, steps: int = 1) -> None:
        """Steps on random tokens."""
        for _ in range(steps):
            tokens = torch.randint(8192, self.batch, device=self.device)
            self.model(tokens).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return the state that a user saves."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def leaves(state: Any) -> Iterator[torch.Tensor]:
    """All tensors of a state, the local part of sharded ones."""
    if isinstance(state, torch.Tensor):
        yield getattr(state, "_local_tensor", state)
    elif isinstance(state, dict | list | tuple):
        for child in state.values() if isinstance(state, dict) else state:
            yield from leaves(child)


def synchronize() -> None:
    """Wait for the device, then for all ranks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def all_of(value: float) -> list[float]:
    """The value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def remove(folder: Path) -> None:
    """Remove files that were measured: the folder may be in memory."""
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


def stall_of(save: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds from the call until the training stream has passed the copy; and what the call returned."""
    began = time.perf_counter()
    returned = save()
    if torch.cuda.is_available():
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()
    return time.perf_counter() - began, returned


def stalled(save: Callable[[], Any]) -> tuple[float, Any]:
    """Wait for all ranks, then return the same as `stall_of`."""
    synchronize()
    return stall_of(save)


def loop_s() -> float:
    """Return the seconds of a fixed loop: if other programs use the same core, it takes up to three times as long."""
    began = time.perf_counter()
    for _ in range(30_000):
        pass
    return time.perf_counter() - began


def copy_floor(nbytes: int, device: torch.device) -> float:
    """Return the seconds of a copy of `nbytes` on a device."""
    source = torch.ones(max(nbytes, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return statistics.median(stalled(lambda: target.copy_(source))[0] for _ in range(5))


def save_timed(snapshots: SnapshotManager, step: int, state: Any, turns: Sequence[Sequence[int]]) -> dict[str, float]:
    """Save by each rank; return the stall and the seconds until the save is durable, of the slowest rank.

    Args:
        turns: the ranks that save at the same time, while the others wait.
    """
    found = {"stalls_s": 0.0, "durable_s": 0.0}
    for ranks in turns:
        synchronize()
        if dist.get_rank() in ranks:
            began = time.perf_counter()
            found["stalls_s"], _ = stall_of(lambda: snapshots.save(step, state))
            snapshots.wait_until_finished()
            found["durable_s"] = time.perf_counter() - began
    return {name: max(all_of(value)) for name, value in found.items()}


def measure_saves(run: Run, folder: Path, mode: dict[str, Any]) -> dict[str, Any]:
    """Stalls and durable times of snapstore, and of the ranks' own shares, each in a repository of its own.

    The shares are saved by all ranks at the same time, and once more by one rank after the other. All save the same
    values, since deltas get smaller while a model trains. Each rank runs a fixed loop right before each joint save,
    which shows whether other programs of the machine slow its core.
    """
    rank, state = dist.get_rank(), run.state()
    nbytes, count = sum(t.nbytes for t in leaves(state) if t.device == run.device), sum(1 for _ in leaves(state))
    floor = copy_floor(nbytes, run.device)
    found: dict[str, Any] = {"bytes": all_of(nbytes), "tensors": count, "floor_s": max(all_of(floor))}
    places = {"together": folder / "repository", "own_share": folder / f"own-{rank}"}
    places["own_share_in_turn"] = folder / f"turn-{rank}"
    found |= {name: {"stalls_s": [], "durable_s": []} for name in places}
    loops = found["together"]["loops_s"] = list[float]()
    ranks = range(dist.get_world_size())
    with (
        SnapshotManager(places["together"], run="bench", **mode) as job,
        SnapshotManager(places["own_share"], run="bench", ranks=False, **mode) as own,
        SnapshotManager(places["own_share_in_turn"], run="bench", ranks=False, **mode) as alone,
    ):
        for step in range(STALLS):
            run.train()
            state = run.state()
            synchronize()
            loops.append(max(all_of(loop_s())))
            took = {"together": save_timed(job, step, state, [ranks])}
            if step < SHARES:
                local = {"own": list(leaves(state))}
                took["own_share"] = save_timed(own, step, local, [ranks])
                took["own_share_in_turn"] = save_timed(alone, step, local, [[one] for one in ranks])
            for name, one in took.items():
                for kind, value in one.items():
                    found[name][kind].append(value)
    for at in places.values():
        remove(at)
    goal = 1.5 * found["floor_s"] + 0.002 + 1e-6 * count
    stalls = found["together"]["stalls_s"][WARM:]
    calm = [stall for stall, loop in zip(stalls, loops[WARM:], strict=True) if loop <= UNDISTURBED * min(loops)]
    found["stall_over_goal"] = statistics.median(stalls) / goal
    found["undisturbed"] = {"saves": len(calm), "of": len(stalls)}
    if calm:
        found["undisturbed"]["stall_over_goal"] = statistics.median(calm) / goal
    return found


def measure_dcp(run: Run, folder: Path) -> dict[str, Any]:
    """Stalls and durable times of dcp.save, and of dcp.async_save in both modes."""
    found: dict[str, Any] = {}
    group = dist.new_group(backend="gloo")
    for name, options in (
        ("save", None),
        ("async_thread", {"async_checkpointer_type": dcp.state_dict_saver.AsyncCheckpointerType.THREAD}),
        ("async_process", {"async_checkpointer_type": dcp.state_dict_saver.AsyncCheckpointerType.PROCESS}),
    ):
        stalls, durable = [], []
        try:
            for step in range(3):
                run.train()
                state, path = run.state(), folder / f"dcp-{name}-{step}"
                began = time.perf_counter()
                if options is None:
                    stall, future = stalled(lambda s=state, p=path: dcp.save(s, checkpoint_id=p))  # type: ignore[misc]
                else:
                    stall, future = stalled(
                        lambda s=state, p=path, o=options: dcp.async_save(s, checkpoint_id=p, process_group=group, **o)  # type: ignore[misc]
                    )
                    future.result()
                stalls.append(max(all_of(stall)))
                durable.append(max(all_of(time.perf_counter() - began)))
                remove(path)
            found[name] = {"stalls_s": stalls, "durable_s": durable}
        except Exception as error:  # noqa: BLE001  a mode that this release or machine lacks
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return found


def measure_restore(run: Run, folder: Path) -> dict[str, Any]:
    """Seconds to fill this world's tensors, by snapstore and by DCP; whether all ranks get equal tensors from both."""
    took: dict[str, list[float]] = {"snapstore": [], "dcp": []}
    same = True
    with Repository.open(folder / "repository") as repository:
        ways = {
            "snapstore": lambda state: repository.restore_into("bench@latest", state),
            "dcp": lambda state: dcp.load(state, checkpoint_id=folder / "dcp-reference"),
        }
        for _ in range(3):
            found = []
            for name, restore in ways.items():
                state = run.state()
                for tensor in leaves(state):
                    tensor.zero_()  # the model may have the values already
                took[name].append(max(all_of(stalled(lambda s=state, by=restore: by(s))[0])))  # type: ignore[misc]
                found.append([tensor.clone() for tensor in leaves(state)])
            same = same and all(map(torch.equal, *found)) and any(map(torch.any, found[0]))
    return {"seconds": took, "equal": all(all_of(same))}


def measure_training(run: Run, folder: Path, mode: dict[str, Any]) -> dict[str, Any]:
    """Seconds of 150 steps without saves, and with one every 50; the first three saves come before."""
    found = {}
    with SnapshotManager(folder / "trained", run="bench", **mode) as snapshots:
        for name in ("warm", "alone", "saving"):
            synchronize()
            began = time.perf_counter()
            every = 10 if name == "warm" else 50
            for step in range(1, 3 * every + 1):
                run.train()
                if step % every == 1 and name != "alone":
                    snapshots.save(step if name == "warm" else 1000 + step, run.state())
            synchronize()
            found[name] = max(all_of(time.perf_counter() - began))
            snapshots.wait_until_finished()
    return found


def measure_reads(run: Run, folder: Path) -> dict[str, Any]:
    """Bytes of chunks that each rank decodes to fill its tensors, and the bytes of these tensors."""
    state, decoded = run.state(), [0]
    real: Any = ChunkReader._decode

    def counted(reader: ChunkReader, reading: Any, decoding: Any) -> None:
        batch = reading[0].batch
        decoded[0] += int((batch.outs.lengths * batch.counts).sum())
        real(reader, reading, decoding)

    setattr(ChunkReader, "_decode", counted)  # noqa: B010
    with Repository.open(folder / "repository") as repository:
        repository.restore_into("bench@latest", state)
    return {"decoded": all_of(decoded[0]), "wanted": all_of(sum(t.nbytes for t in leaves(state)))}


def measure_commits(run: Run, folder: Path, mode: dict[str, Any]) -> dict[str, Any]:
    """Seconds of rank 0: from the call until the save has begun, from the last report to the created record.

    Also the processor time of the thread that writes rank 0's share: other processes on the machine do not count.
    """
    times: dict[str, list[float]] = {"begin_s": [], "commit_s": [], "write_processor_s": []}
    marks: dict[str, float] = {}

    def note(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            returned = real(*args, **options)
            marks[what], marks[f"{what} processor"] = time.perf_counter(), time.thread_time() - began
            return returned

        setattr(owner, name, noted)

    note(SaveSession, "__init__", "called")
    note(SaveSession, "__enter__", "begun")
    note(vars(together)["_Save"], "_collect", "reported")
    note(RankWriter, "commit", "committed")
    note(RankWriter, "write", "written")
    with SnapshotManager(folder / "repository", run="bench", **mode) as snapshots:
        for step in range(SAVES):
            run.train()
            snapshots.save(step, run.state())
            snapshots.wait_until_finished()
            if dist.get_rank() == 0:
                times["begin_s"].append(marks["begun"] - marks["called"])
                times["commit_s"].append(marks["committed"] - marks["reported"])
                times["write_processor_s"].append(marks["written processor"])
    return times | {"tensors": sum(1 for _ in leaves(run.state()))}


class CountedStore:
    """A client of the channel's TCPStore that counts the bytes of keys and values, sent and received.

    Attributes:
        counts: "messages": of all calls but looks for keys that are not there yet; "looks": of those.
    """

    counts: ClassVar = {"messages": 0, "looks": 0}  # of this process

    def __init__(self, store: Any) -> None:
        self._store = store

    def _count(self, kind: str, *data: Any) -> None:
        self.counts[kind] += sum(len(one.encode() if isinstance(one, str) else one) for one in data)

    def check(self, keys: list[str]) -> bool:
        """Count the keys."""
        found: bool = self._store.check(keys)
        self._count("messages" if found else "looks", *keys)
        return found

    def get(self, key: str) -> bytes:
        """Count key and value."""
        found: bytes = self._store.get(key)
        self._count("messages", key, found)
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Count keys and values."""
        found: list[bytes] = self._store.multi_get(keys)
        self._count("messages", *keys, *found)
        return found

    def set(self, key: str, value: Any) -> None:
        """Count key and value."""
        self._count("messages", key, value)
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, value: Any) -> bytes:
        """Count key and values, the returned one too."""
        found: bytes = self._store.compare_set(key, expected, value)
        self._count("messages", key, expected, value, found)
        return found

    def delete_key(self, key: str) -> bool:
        """Count the key."""
        self._count("messages", key)
        found: bool = self._store.delete_key(key)
        return found


def measure_wire(run: Run, folder: Path, mode: dict[str, Any]) -> dict[str, Any]:
    """Bytes of keys and values that each rank sends and receives over the job's store, for each save."""
    connect, found = torch_ranks.TorchRanks._connect, list[dict[str, list[float]]]()

    def counted(ranks: Any, place: Any) -> Any:
        return CountedStore(connect(ranks, place))

    setattr(torch_ranks.TorchRanks, "_connect", counted)  # noqa: B010
    with SnapshotManager(folder / "repository", run="bench", **mode) as snapshots:
        for step in range(SAVES):
            run.train()
            synchronize()
            before = dict(CountedStore.counts)
            snapshots.save(step, run.state())
            snapshots.wait_until_finished()
            found.append({kind: all_of(CountedStore.counts[kind] - before[kind]) for kind in before})
    return {"saves": found}


def measure_rate(mesh: DeviceMesh, folder: Path, task: dict[str, Any], mode: dict[str, Any]) -> dict[str, Any]:
    """Seconds until saves are durable, each with the same number of bytes a rank, all of them new.

    After each save, all ranks also write as many random bytes to plain files of a pack's size, with as many threads.
    """
    rows, rank = task["bytes_a_rank"] // (16 * 4096), dist.get_rank()
    generator = torch.Generator(mesh.device_type).manual_seed(rank)
    local = [torch.empty(rows, 1024, device=mesh.device_type) for _ in range(16)]
    state = {"model": [DTensor.from_local(one, mesh, [Shard(0)], run_check=False) for one in local]}
    durable, plain = [], []
    options = SaveOptions(threads=task["threads"])
    own = folder / f"plain-{rank}"
    own.mkdir(parents=True, exist_ok=True)
    with SnapshotManager(folder / "repository", run="bench", options=options, **mode) as snapshots:
        for step in range(SAVES):
            for one in local:
                one.normal_(generator=generator)
            synchronize()
            began = time.perf_counter()
            snapshots.save(step, state)
            snapshots.wait_until_finished()
            durable.append(max(all_of(time.perf_counter() - began)))
            took = gpu_limits.write_files(own, rows * 16 * 4096, task["threads"], options.pack_bytes)
            plain.append(max(all_of(took)))
    remove(folder / "repository")
    return {
        "bytes_a_rank": rows * 16 * 4096, "durable_s": durable, "plain_files_s": plain, "threads": task["threads"]
    }  # fmt: skip


def main() -> None:
    """Run a task."""
    task = json.loads(sys.argv[-1])
    cuda = torch.cuda.is_available()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    mesh = init_device_mesh("cuda" if cuda else "cpu", (size,))
    folder, mode = Path(task["folder"]), dict[str, Any]({"staging": "device"} if cuda else {})
    found: dict[str, Any] = {"ranks": size, "device": torch.cuda.get_device_name() if cuda else "CPU"}
    if task["do"] == "rate":
        found |= measure_rate(mesh, folder, task, mode)
    else:
        run = Run(tuple(task["shape"]), mesh, busy=task.get("busy", False))
        run.train(2)
        found |= measure(run, folder, task, mode)
    if rank == 0:
        Path(task["out"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(run: Run, folder: Path, task: dict[str, Any], mode: dict[str, Any]) -> dict[str, Any]:
    """Do a task with a model in training; return what was measured."""
    found: dict[str, Any] = {}
    if task["do"] == "save":
        found |= measure_saves(run, folder, mode)
        if task.get("peers", True):
            found["dcp"] = measure_dcp(run, folder)
    elif task["do"] == "reference":  # the same state by both, for restores
        state = run.state()
        with SnapshotManager(folder / "repository", run="bench", **mode) as snapshots:
            snapshots.save(0, state)
        dcp.save(state, checkpoint_id=folder / "dcp-reference")
    elif task["do"] == "again":  # the same values, by this world
        state = run.state()
        dcp.load(state, checkpoint_id=folder / "dcp-reference")
        with SnapshotManager(folder / "repository", run="bench", **mode) as snapshots:
            snapshots.restore()
            snapshots.save(1, state)
    elif task["do"] == "restore":
        found |= measure_restore(run, folder)
    elif task["do"] == "reads":
        found |= measure_reads(run, folder)
    elif task["do"] == "commit":
        found |= measure_commits(run, folder, mode)
    elif task["do"] == "wire":
        found |= measure_wire(run, folder, mode)
    elif task["do"] == "train":
        found |= measure_training(run, folder, mode)
    return found


if __name__ == "__main__":
    main()
