"""States that `tools/bench gpu` does not tune its engine on: Llamas and a mixture of experts, from transformers.

Random weights, then steps of torch's AdamW on random tokens; the state is what the two `state_dict` calls return, with
the step counts, which AdamW keeps in host memory. A stall is the time from the call of `save` until the tensors may
change: until the training stream has passed the copy. `tensors` counts all of them.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_limits as limits
from snapstore import KeepLast, SnapshotManager

State = dict[str, Any]
#: hidden size, intermediate size, layers: about 0.4 and 1.0 G parameters in 181 tensors and in some 1,250.
LLAMAS = {
    "5 GB, few tensors": (1216, 3328, 20), "12 GB, few tensors": (2048, 5632, 20),
    "5 GB, many tensors": (512, 1408, 138), "12 GB, many tensors": (768, 2112, 138),
}  # fmt: skip
TINY = {"few tensors": (64, 128, 2), "many tensors": (16, 32, 20)}
EXPERTS = (640, 1792, 12)  # with 8 experts a layer
STAGED = (2048, 5632, 34)  # 20 GB
SAVES, WARM, MEMORY_SAVES = 9, 2, 10


class Run:
    """A model in training."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device, *, experts: bool = False) -> None:
        import transformers

        torch.manual_seed(1)
        hidden, intermediate, layers = shape
        heads = max(1, hidden // 64)
        config: dict[str, Any] = {
            "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "vocab_size": 8192,
            "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 256,
        }  # fmt: skip
        with device:
            self.model: torch.nn.Module
            if experts:
                self.model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))
            else:
                self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)

    def train(self, steps: int = 1) -> None:
        """Steps on random tokens."""
        for _ in range(steps):
            tokens = torch.randint(8192, (1, 128), device=self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.model(tokens, labels=tokens).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def state(self) -> State:
        """Return the state that a user saves."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors of a state."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for child in state.values() if isinstance(state, dict) else state:
            yield from tensors(child)


def copy_floor_s(device: torch.device, nbytes: int) -> float:
    """Return the seconds of one copy of `nbytes` on the device."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return limits.median(device, lambda: target.copy_(source))


def stalled_s(device: torch.device, snapshots: SnapshotManager, step: int, state: State) -> float:
    """Save; return the time from the call until the training stream may change the tensors, by the device's clock."""
    limits.synchronize(device)
    if device.type != "cuda":
        began = time.perf_counter()
        snapshots.save(step, state)
        return time.perf_counter() - began
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    before.record()
    snapshots.save(step, state)
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


@contextmanager
def most_used_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Watch the device's memory by the driver's count; the function gives the most since its last call."""
    done, lock, most = threading.Event(), threading.Lock(), [0]

    def used() -> int:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
        return total - free

    def watch() -> None:
        while not done.wait(0.001):
            with lock:  # without it an old count could come after `read`
                most[0] = max(most[0], used())

    def read() -> int:
        with lock:
            found, most[0] = most[0], used()
        return found

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield read
    finally:
        done.set()
        thread.join()


def device_stalls(run: Run, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return stalls of saves with copies on the device and training in between, and the time of a bare copy."""
    run.train(2)
    limits.synchronize(run.device)
    size, count = _device_bytes(run), sum(1 for _ in tensors(run.state()))
    floor = copy_floor_s(run.device, size)
    release(run.device)
    stalls, calls = [], []
    with SnapshotManager(folder / "stalls", run="bench", **_wanted(run.device)) as snapshots:
        for step in range(SAVES):
            run.train()
            limits.synchronize(run.device)
            began = time.perf_counter()
            state = run.state()
            calls.append(time.perf_counter() - began)
            stalls.append(stalled_s(run.device, snapshots, step, state))
            snapshots.wait_until_finished()
        wrong = [] if run.device.type != "cuda" else _differing(snapshots.restore(SAVES - 1), state)
    stall, call = statistics.median(stalls[WARM:]), statistics.median(calls[WARM:])
    goal = 1.5 * floor + 0.002 + 1e-6 * count
    text = f"{count} tensors, {size / 1e9:.1f} GB: stalls {[round(1e3 * s, 1) for s in stalls]} ms, "
    say(text + f"floor {1e3 * floor:.1f}, goal {1e3 * goal:.1f}, state_dict {1e3 * call:.1f}")
    assert not wrong, wrong
    return {
        "tensors": count, "state_bytes": size, "copy_floor_s": floor, "stall_s": stall, "state_dict_s": call,
        "stalls_s": [round(s, 5) for s in stalls], "stall_over_goal": stall / goal,
    }  # fmt: skip


def device_memory(run: Run, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the device memory of each of ten saves beyond the state and the training, over the state's bytes.

    Before each save, memory that training keeps cached is released, since the driver counts it as well.
    """
    size, memory, before = _device_bytes(run), [], 0
    release(run.device)
    with (
        most_used_bytes(run.device) as most,
        SnapshotManager(folder / "memory", run="bench", **_wanted(run.device)) as snapshots,
    ):
        for step in range(MEMORY_SAVES):
            run.train()
            state = run.state()
            limits.synchronize(run.device)
            release(run.device)
            most()
            if step == 0 and run.device.type == "cuda":
                free, total = torch.cuda.mem_get_info()
                before = total - free
            snapshots.save(step, state)
            snapshots.wait_until_finished()
            memory.append((most() - before) / size)
    say(f"memory of each save / {size / 1e9:.1f} GB: {[round(m, 2) for m in memory]}")
    return {"memory_x": [round(m, 3) for m in memory]}


def _device_bytes(run: Run) -> int:
    return sum(t.nbytes for t in tensors(run.state()) if t.device.type == run.device.type)


def release(device: torch.device) -> None:
    """Give the device the memory back that no object holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wanted(device: torch.device) -> dict[str, Any]:
    """Return options of the manager; it keeps few snapshots, since the folder may be memory."""
    return {"keep": KeepLast(1)} | ({"staging": "device"} if device.type == "cuda" else {})


def _differing(got: Any, wanted: Any) -> list[str]:
    pairs = zip(tensors(got), tensors(wanted), strict=True)
    return [str(a.shape) for a, b in pairs if not torch.equal(a.to(b.device).view(-1), b.detach().view(-1))]


def host_stalls(run: Run, folder: Path, say: Callable[[str], None], begins: str) -> dict[str, Any]:
    """Stalls of the first saves with copies in pinned host memory, beside a raw copy into pinned memory.

    Args:
        begins: what the manager does first, before the loop trains for 3 s: "nothing"; "prepare"; or "restore_into", of
            the state of an earlier manager.
    """
    size = sum(t.nbytes for t in tensors(run.state()) if t.device.type == run.device.type)
    stalls = []
    if begins == "restore_into":
        with SnapshotManager(folder / "repository", run="bench", staging="host", keep=KeepLast(1)) as snapshots:
            snapshots.save(0, run.state())
    with SnapshotManager(folder / "repository", run="bench", staging="host", keep=KeepLast(1)) as snapshots:
        if begins == "prepare":
            snapshots.prepare(run.state())
        elif begins == "restore_into":
            snapshots.restore_into(run.state())
        began = time.perf_counter()
        while time.perf_counter() - began < 3:
            run.train()
            limits.synchronize(run.device)
        for step in range(1, 4):
            run.train()
            stalls.append(stalled_s(run.device, snapshots, step, run.state()))
            snapshots.wait_until_finished()
    say(f"host staging, after {begins}: stalls {[round(s, 3) for s in stalls]} s")
    return {"state_bytes": size, "stalls_s": [round(s, 4) for s in stalls]}
