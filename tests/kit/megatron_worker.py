"""Saves or loads a sharded state of Megatron on CPU, as one rank of a job with gloo: `megatron_worker.py JOB`.

RANK, WORLD_SIZE and so on are set. JOB is JSON: what to do ("save", "async", "default" or "load"), the folders, and the
steps. Each rank holds its rows and columns of known tensors, so a load checks every value.
"""

import io
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from snapstore.integrations.megatron import SnapstoreLoadStrategy, SnapstoreSaveStrategy, use_by_default

ROWS, COLUMNS = 24, 16


LAYERS = 2


def whole(step, seed):
    return (torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + 1) * (seed + 1) * (step + 0.5)


def layer(step, number, *, filled):
    """Return a layer's rows of this rank, as Megatron's models name layers: all are one tensor, whose first axis is the
    number of the layer.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = whole(step, 4 + number).chunk(ranks, 0)[rank].contiguous()
    offsets = ((0, number, LAYERS), (1, rank, ranks))
    data = part if filled else torch.zeros_like(part)
    return ShardedTensor.from_rank_offsets("decoder.layers.weight", data, *offsets, replica_id=0, prepend_axis_num=1)


def state_of(job, *, filled):
    """Return row-parallel and column-parallel tensors, a tensor that all ranks hold, objects, and a plain value."""
    rank, ranks, step = dist.get_rank(), dist.get_world_size(), job["step"]

    def tensor(key, axis, seed):
        full = whole(step, seed)
        part = full.chunk(ranks, axis)[rank].contiguous() if axis is not None else full
        data = part if filled else torch.zeros_like(part)
        if axis is None:
            return ShardedTensor.from_rank_offsets(key, data, replica_id=rank)
        return ShardedTensor.from_rank_offsets(key, data, (axis, rank, ranks), replica_id=0)

    random = np.random.RandomState(rank + step).get_state() if filled else None
    extra = io.BytesIO(b"te %d" % step) if filled else None
    rng = [{"numpy": random, "rank": rank}] if filled else None
    state = {
        "model": {
            "rows": tensor("decoder.layers.0.weight", 0, 0),
            "columns": tensor("decoder.layers.1.weight", 1, 1),
            "same": tensor("decoder.norm.weight", None, 2),
            "layers": {f"{number}.weight": layer(step, number, filled=filled) for number in range(LAYERS)},
            "extra": ShardedObject("decoder._extra_state", extra, (1,), (0,), replica_id=rank),
        },
        "optimizer": {"state": {0: {"exp_avg": tensor("optimizer.state.exp_avg.weight", 0, 3)}}},
        "iteration": step,
    }
    if job["objects"]:
        state["rng"] = ShardedObject("rng_state", rng, (ranks,), (rank,), replica_id=0)
    return state


def check(job, loaded):
    expected = state_of(job, filled=True)
    for path in (("model", "rows"), ("model", "columns"), ("model", "same"), ("optimizer", "state", 0, "exp_avg")):
        found, wanted = loaded, expected
        for key in path:
            found, wanted = found[key], wanted[key]
        assert torch.equal(found, wanted.data), path
    for name, found in loaded["model"]["layers"].items():
        assert torch.equal(found, expected["model"]["layers"][name].data), name
    assert loaded["model"]["extra"].getvalue() == b"te %d" % job["step"]
    assert loaded["iteration"] == job["saved"]
    if job["objects"]:
        (own,) = loaded["rng"]
        kind, words, *rest = own["numpy"]
        wanted = np.random.RandomState(dist.get_rank() + job["step"]).get_state()
        assert (kind, rest) == (wanted[0], list(wanted[2:]))
        assert np.array_equal(words, wanted[1])


def main():
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = job["folder"]
    if job["do"] == "load":
        strategy = SnapstoreLoadStrategy()
        loaded = dist_checkpointing.load(state_of(job, filled=False), folder, strategy)
        check(job, loaded)
        metadata = dist_checkpointing.load_tensors_metadata(folder, strategy)
        assert metadata["decoder.layers.1.weight"].global_shape == (ROWS, COLUMNS)
        assert "decoder._extra_state/shard_0_1" in strategy.load_sharded_metadata(folder)
    else:
        save = SnapstoreSaveStrategy(job["repo"], run="megatron")
        if job["do"] == "default":
            use_by_default(save, SnapstoreLoadStrategy())
        for step in job["steps"]:
            job |= {"step": step, "saved": step}
            path = folder.format(step)
            Path(path).mkdir(parents=True, exist_ok=True)
            dist.barrier()
            state = state_of(job, filled=True)
            if job["do"] == "async":
                # Megatron's queue calls CUDA in two places, for which a CPU has nothing to do.
                torch.cuda.synchronize, torch.cuda.current_device = lambda: None, lambda: "cpu"
                queue = AsyncCallsQueue()
                queue.schedule_async_request(dist_checkpointing.save(state, path, save, async_sharded_save=True))
                for one in (state["model"]["rows"], state["model"]["same"]):
                    one.data.zero_()  # the copies are made
                assert not Path(path, "metadata.json").exists()
                if step == job.get("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                queue.maybe_finalize_async_calls(blocking=True)
                queue.close()
            else:
                dist_checkpointing.save(state, path, None if job["do"] == "default" else save)
            assert Path(path, "metadata.json").exists()
            assert Path(path, "snapstore.json").exists()
            if job["do"] == "default":
                check(job, dist_checkpointing.load(state_of(job, filled=False), path))
        save.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
