"""One rank of a training with FSDP2 or DDP over gloo, for tests that kill it: `python -m kit.rank_worker <options>`.

Options as JSON: place (the rendezvous), repository, rank, count, parallel ("fsdp", "ddp"), steps, silent_s, and strike.
strike is [save, point, signal]: the rank sends itself the signal at a point of that save (POINTS). preempt: it saves
only when a preemption asks for it. same: whether it restores its own values. fallback: whether it skips damaged
snapshots. call: it calls collectives of each kind at the end. It resumes from the newest snapshot, and prints a line of
JSON for each event; the last one has the collectives before its first restore and after its last save. The weights
after a step are known (`expected`), so any snapshot can be compared bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from snapstore import PerRank, SaveOptions, SnapshotManager, SnapstoreError
from snapstore.distributed.torch_ranks import TorchRanks
from snapstore.save.ranks.together import RankSaves
from snapstore.save.ranks.writer import RankWriter

#: Points of a save, on rank 0 and on the others.
POINTS = (
    ("called", "begun", "written", "collected", "roots", "committed", "ended"),
    ("called", "begun", "written", "reported", "ended"),
)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(33, 70), torch.nn.Linear(70, 7)


def expected(step: int) -> dict[str, torch.Tensor]:
    """Return the whole weights after a step."""
    torch.manual_seed(0)
    return {name: value.detach() + step for name, value in Net().state_dict().items()}


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def strike_at(ranks: TorchRanks, point: str, send: str) -> None:
    """Let this process send itself a signal at a point of the next save."""

    def strike() -> None:
        os.kill(os.getpid(), getattr(signal, send))
        time.sleep(100 if send == "SIGKILL" else 0.2)

    def around(owner: Any, name: str, *, before: bool, only: str = "") -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def instead(*args: Any, **options: Any) -> Any:
            strikes = not only or any(type(arg) is str and only in arg for arg in args)
            if strikes and before:
                strike()
            found = call(*args, **options)
            if strikes and not before:
                strike()
            return found

        setattr(owner, name, instead)

    if point == "called":
        around(RankSaves, "save", before=True)
    elif point in ("begun", "written"):
        around(RankWriter, "write", before=point == "begun")
    elif point == "reported":
        around(ranks, "post", before=False, only="report/")
    elif point in ("collected", "roots"):
        around(RankWriter, "write_roots", before=point == "collected")
    elif point == "committed":
        around(RankWriter, "commit", before=False)
    else:
        around(RankSaves, "save", before=False)


def main(options: dict[str, Any]) -> None:
    rank, count = options["rank"], options["count"]
    dist.init_process_group(
        "gloo", init_method=options["place"], rank=rank, world_size=count, timeout=timedelta(seconds=300)
    )
    torch.manual_seed(0)
    model: Any = Net()
    if options["parallel"] == "fsdp":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model).module
    own = PerRank({"rank": rank, "step": 0})
    state = {"model": model.state_dict(), "own": own, "step": 0}
    ranks = TorchRanks(silent_s=options["silent_s"], total_s=60)
    every = 1000 if options.get("preempt") else 1
    manager = SnapshotManager(
        options["repository"], run="job", ranks=ranks, save_interval_steps=every, options=SaveOptions(threads=1)
    )
    before = collectives()
    if options.get("preempt"):
        manager.handle_preemption()
    step = manager.latest_step() or 0
    if step:
        per_rank = "same" if options.get("same", True) else "drop"
        step = manager.restore_into(state, per_rank=per_rank, fallback=options.get("fallback", False)).step
        say(restored=step, own=own.value)
    strike = options.get("strike")
    for number in range(options["steps"]):
        step += 1
        with torch.no_grad():
            for value, whole in zip(model.state_dict().values(), expected(step).values(), strict=True):
                local = value.to_local() if isinstance(value, DTensor) else value
                mesh = getattr(value, "device_mesh", None)
                new = whole if mesh is None else local_of(whole, value)
                local.copy_(new)
        own.value = {"rank": rank, "step": step}
        state = {"model": model.state_dict(), "own": own, "step": step}
        if strike and strike[0] == number:
            strike_at(ranks, *strike[1:])
        try:
            if options.get("preempt"):
                time.sleep(0.05 * (1 + rank))
                if not manager.should_save(step):
                    continue
                say(last=step)
            manager.save(step, state, force=True)
            manager.wait_until_finished()
            say(committed=step)
        except SnapstoreError as error:
            say(failed=step, error=str(error))
            break
    try:
        manager.close()
    except SnapstoreError as error:
        say(closed=str(error))
    ranks.close()
    say(ended=True, collectives=[before, collectives()])
    if options.get("call"):
        say(seen=call_collectives(next(iter(model.state_dict().values()))))
    sys.stdout.flush()
    os._exit(0)  # gloo waits for dead peers


def collectives() -> dict[str, int]:
    """Return how many collectives and messages between ranks each process group has had: a save has none.

    gloo itself counts them. So this also sees calls that bypass the functions of torch.distributed, as DTensor's do.
    """
    of_torch: Any = dist.distributed_c10d
    return {of_torch._world.pg_names[group]: group._get_sequence_number_for_group() for group in of_torch._world.pg_map}


def call_collectives(sharded: DTensor) -> dict[str, bool]:
    """Call collectives of each kind on two ranks; return whether `collectives` has seen each."""
    one, peer, group = torch.ones(2), 1 - dist.get_rank(), dist.GroupMember.WORLD
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
        "full_tensor": sharded.full_tensor,
        "a method of the group": lambda: group.allreduce([one]).wait(),
        "isend": lambda: (dist.isend(one, peer) if peer else dist.irecv(one, peer)).wait(),
        "new_group": lambda: dist.new_group([0, 1]),
    }
    seen = {}
    for name, call in calls.items():
        before = collectives()
        call()
        seen[name] = collectives() != before
    dist.barrier()  # the peer may still connect to the new group, and fails if this process has ended
    return seen


def local_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, sharded as FSDP does."""
    pieces = whole.chunk(like.device_mesh.size(), 0)
    at = like.device_mesh.get_local_rank()
    return pieces[at] if at < len(pieces) else whole[:0]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
