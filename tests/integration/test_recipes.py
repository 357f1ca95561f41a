"""The scripts of docs/guides/recipes.md and of README end with the same bits whether they are interrupted or not."""

import random
import signal
import subprocess
import sys
import time

import pytest

from kit.processes import ROOT, environment, free_port
from kit.repositories import same
from kit.samples import SEED, THOROUGH


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:This DataLoader will create")
@pytest.mark.parametrize("number", [0, 1, 2], ids=["loader", "average", "gradients"])
def test_a_recipe_resumes_to_the_bit(number, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "guides" / "recipes.md").read_text()
    script = page.split("```python\n")[1 + number].split("```")[0]
    for interval in ("=100", "=30"):
        script = script.replace(f"interval_steps{interval}", "interval_steps=3")
    assert "interval_steps=3)" in script

    def end(folder, total):
        monkeypatch.setattr(sys, "argv", ["train.py", str(total)])
        names = {}
        exec(script.replace("/data/snapshots", str(tmp_path / folder)), names)
        return {name: value.state_dict() for name, value in names["state"].items()}

    whole = end("whole", 20)
    assert not same(end("parts", 11), whole)  # the last snapshot is of step 9
    assert same(end("parts", 20), whole)


#: The names that README's code takes from the reader's script: data that is drawn at random in the workers, a model
#: with dropout, and a `train` that prints the loss of each step.
OF_THE_READER = """
import random, sys, numpy as np, torch
torch.set_num_threads(1)
torch.manual_seed(0), random.seed(0), np.random.seed(0)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((8,), index / 20) + 0.1 * torch.randn(8) + random.random() + np.random.rand()

loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True, num_workers=int(sys.argv[1]))
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters())
total = 23

def train(model, optimizer, batch):
    loss = (model(batch.float()) - batch.float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step + 1, loss.item().hex(), flush=True)
    return loss
"""


def losses_of(script, workers, kill=None):
    """Run a script until it ends, or until it is killed just after so many steps; return what it printed."""
    command = [sys.executable, "-W", "ignore", str(script), str(workers)]
    printed = []
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            printed.append(line.split())
            if len(printed) == kill:
                time.sleep(random.random() / 50)
                process.kill()
                break
        printed += [parts for line in process.stdout if len(parts := line.split()) == 2 and line.endswith("\n")]
    assert process.returncode == (0 if kill is None else -signal.SIGKILL)
    return [(int(step), loss) for step, loss in printed]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2] if THOROUGH else [(0, 2)[SEED % 2]])
def test_the_code_of_readme_computes_the_same_losses_after_each_kill(workers, tmp_path):
    """It is killed before the first snapshot, within an epoch, at its end, and during saves."""
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "resumable(loader)" in code
    code = code.replace("interval_steps=100", "interval_steps=3")
    scripts = []
    for name in ("whole", "killed"):
        scripts.append(tmp_path / f"{name}.py")
        scripts[-1].write_text(OF_THE_READER + code.replace("/data/snapshots", str(tmp_path / name)))
    whole = losses_of(scripts[0], workers)
    assert [step for step, _ in whole] == [*range(1, 24)]
    expected, found, starts = dict(whole), {}, []
    for kill in (2, 5, 6, 4, 7, 6, 8, None):
        printed = losses_of(scripts[1], workers, kill)
        if printed:
            starts.append(printed[0][0])
        for step, loss in printed:
            assert loss == expected[step], (step, starts)
            found[step] = loss
        if kill is None or (printed and printed[-1][0] == 23):
            break
    assert found == expected
    assert len(set(starts)) >= 3, starts  # it has resumed, and not from one snapshot only


RANKS = """
import sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from snapstore import RngState, SnapshotManager, resumable

total, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
loader = resumable(DataLoader(torch.arange(22), 2, sampler=DistributedSampler(range(22), shuffle=True)))
extra = {"epoch": 0}
state = {"loader": loader, "extra": extra, "rng": RngState()}
with SnapshotManager(folder, run="a", save_interval_steps=4) as snapshots:
    step = snapshots.restore_into(state).step if snapshots.latest_step() is not None else 0
    while step < total:
        loader.sampler.set_epoch(extra["epoch"])
        for batch in loader:
            step += 1
            print(step, *batch.tolist(), flush=True)
            snapshots.save(step, state)
            if step == total:
                break
        extra["epoch"] += 1
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_each_rank_goes_on_with_its_own_batches(tmp_path):
    """Two ranks with a DistributedSampler; the second run begins within the second epoch."""
    (tmp_path / "train.py").write_text(RANKS)

    def batches(folder, total):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        command = [sys.executable, "-W", "ignore", str(tmp_path / "train.py"), str(total), str(tmp_path / folder)]
        ranks = [
            subprocess.Popen(command, env=environment(RANK=str(rank), **place), stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        said = [one.communicate(timeout=600)[0].splitlines() for one in ranks]
        assert [one.returncode for one in ranks] == [0, 0]
        return said

    whole = batches("whole", 15)
    assert [len(lines) for lines in whole] == [15, 15]
    assert whole[0] != whole[1]
    assert batches("parts", 10) == [lines[:10] for lines in whole]
    assert batches("parts", 15) == [lines[8:] for lines in whole]  # the last snapshot is that of step 8
