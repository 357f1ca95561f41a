"""Trains with DeepSpeed on CPU, as one rank of a job with gloo: `deepspeed_worker.py JOB`.

RANK, WORLD_SIZE and so on are set. JOB is JSON: the ZeRO stage, the folder, the step to stop at, the step after
which it kills itself or null, and whether saves run in the background. It saves at every second step and resumes from
`latest`. At the end it writes its steps and a digest of the model and of its share of the optimizer to
`<out>.<rank>`.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import deepspeed
import torch

from snapstore.integrations.deepspeed import SnapstoreCheckpointEngine


def digest(value, whole):
    if isinstance(value, dict):
        for key in value:
            digest(value[key], whole)
    elif isinstance(value, list | tuple):
        for one in value:
            digest(one, whole)
    elif isinstance(value, torch.Tensor):
        whole.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        whole.update(repr(vars(value) if hasattr(value, "cur_scale") else value).encode())


def main():
    job = json.loads(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
    config = {
        "train_batch_size": 4 * ranks,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": job["stage"]},
    }
    config |= {"bf16": {"enabled": True}} if job["bf16"] else {}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=True
    )
    folder, steps = job["folder"], []
    saver = SnapstoreCheckpointEngine(job["repo"], run=f"zero{job['stage']}", async_save=job["async"])
    engine.checkpoint_engine = saver
    _, client = engine.load_checkpoint(folder)
    if client is not None:
        assert client["mine"] == (engine.global_steps, "text")
    for step in range(engine.global_steps + 1, job["stop"] + 1):
        data = torch.arange(32.0).reshape(4, 8) / 10 + rank + step / 7
        loss = engine(data.to(next(engine.module.parameters()).dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        steps.append(step)
        if step % 2 == 0:
            engine.save_checkpoint(folder, client_state={"mine": (step, "text")}, save_latest=not job["async"])
        if step == job["kill"]:
            if job["async"]:
                saver.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
    whole = hashlib.sha256()
    digest([engine.module_state_dict(), engine.optimizer.state_dict()], whole)
    Path(f"{job['out']}.{rank}").write_text(json.dumps([steps, whole.hexdigest()]))
    saver.close()
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
