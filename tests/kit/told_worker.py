"""One rank of a job that is told to end: `python -m kit.told_worker <options>`.

Options as JSON: place (the rendezvous), repository, rank, count, parallel ("fsdp", "ddp"), every (the interval of
saves), async_save, on_busy, timeout, meets (whether each step has a collective), step_s (a step takes so long), notice
(a path or a URL), and tell: [point, delay in seconds, kind] or None. The rank tells itself so long after the point: it
sends itself the signal of that name, or makes the file `flag` for the kind "notice". Points: "handled", "restoring",
"step N", "save N". It resumes from the newest snapshot and trains until it is told. It prints a line of JSON for each
event.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kit.rank_worker import Net, expected, local_of, say
from snapstore import PerRank, SaveOptions, SnapshotManager
from snapstore.distributed import notices
from snapstore.distributed.torch_ranks import TorchRanks


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def own_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return local_of(whole, like) if isinstance(like, DTensor) else whole


def main(options: dict[str, Any]) -> None:
    rank, reached = options["rank"], set[str]()

    def tell(point: str, delay_s: float, kind: str) -> None:
        while point not in reached:
            time.sleep(0.001)
        time.sleep(delay_s)
        say(tell=kind, told_at=time.time())
        if kind == "notice":
            Path(options["flag"]).touch()
        else:
            os.kill(os.getpid(), getattr(signal, kind))

    if options["tell"]:
        threading.Thread(target=tell, args=options["tell"], daemon=True).start()
    dist.init_process_group(
        "gloo",
        init_method=options["place"],
        rank=rank,
        world_size=options["count"],
        timeout=timedelta(seconds=300),
    )
    notices.POLL_S = 0.25
    model: Any = Net()
    if options["parallel"] == "fsdp":
        fully_shard(model)
    own = PerRank({"rank": rank, "step": 0})
    state = {"model": model.state_dict(), "own": own, "step": 0}
    manager = SnapshotManager(
        options["repository"],
        run="job",
        ranks=TorchRanks(silent_s=60, total_s=120),
        save_interval_steps=options["every"],
        async_save=options["async_save"],
        on_busy=options["on_busy"],
        options=SaveOptions(threads=1),
    )
    manager.handle_preemption(
        timeout=options["timeout"], signals=[signal.SIGUSR1, signal.SIGUSR2], notice=options["notice"]
    )
    reached.add("handled")
    step = manager.latest_step() or 0
    if step:
        reached.add("restoring")
        manager.restore_into(state)
        pairs = zip(model.state_dict().values(), expected(step).values(), strict=True)
        same = all(torch.equal(local(value), own_part(whole, value)) for value, whole in pairs)
        say(restored=step, same=same and own.value == {"rank": rank, "step": step} and state["step"] == step)
    first, saves = step, 0
    try:
        while True:
            step += 1
            for value, whole in zip(model.state_dict().values(), expected(step).values(), strict=True):
                local(value).detach().copy_(own_part(whole, value))
            own.value = {"rank": rank, "step": step}
            state = {"model": model.state_dict(), "own": own, "step": step}
            if options["meets"]:
                dist.all_reduce(torch.ones(1))
            time.sleep(options["step_s"])
            reached.add(f"step {step - first}")
            if manager.should_save(step):
                say(last=step)
                saves += 1
                reached.add(f"save {saves}")
                manager.save(step, state)
    except SystemExit as end:
        say(status=end.code, ended_at=time.time())
        raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
