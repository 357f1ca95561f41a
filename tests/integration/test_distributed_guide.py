"""The script of docs/guides/distributed.md runs as real ranks with gloo, and goes on with other numbers of ranks."""

from __future__ import annotations

import json

import pytest
import torch

from kit.processes import ROOT, run_ranks
from kit.shell import invoke
from snapstore import RankValues, Repository, RngState

PAGE = (ROOT / "docs" / "guides" / "distributed.md").read_text()

#: The guide leaves this to its reader. All ranks train with the same batches, so the losses are those of one process.
MODEL = """
import json, sys
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(9, 33), torch.nn.Linear(33, 5)])

    def forward(self, batch):
        return self.layers[1](self.layers[0](batch).tanh())


def make_model():
    torch.manual_seed(0)
    return Net()


def batch(step):
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(step))
"""
TRAIN = """
job, losses, draws = json.loads(sys.argv[1]), {}, []
total = job["total"]


def train(model, optimizer):
    draws.append(torch.rand(1).item())
    optimizer.zero_grad()
    loss = model(batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    losses[step] = loss.item()
    return loss


torch.manual_seed(job["seed"] + dist.get_rank())
"""
END = """
print(json.dumps({"start": start, "losses": losses, "draws": draws, "next": torch.rand(1).item()}))
dist.destroy_process_group()
"""


def block(text: str, kind: str = "python") -> str:
    """Return the block of the guide that contains a text."""
    (found,) = (one for part in PAGE.split(f"```{kind}\n")[1:] if text in (one := part.split("```")[0]))
    return found


def drawn(seed: int) -> float:
    return torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()


@pytest.mark.slow
def test_the_script_of_the_guide_goes_on_with_other_numbers_of_ranks(tmp_path):
    root = str(tmp_path / "snapshots")
    place = block("dist.init_process_group").replace("nccl", "gloo").replace("interval_steps=500", "interval_steps=1")
    script = MODEL + place + block("    fully_shard(layer)\n") + TRAIN
    script += block("def state_of_all()") + END
    (tmp_path / "train.py").write_text(script.replace("/shared/snapshots", root))

    names: dict = {}
    exec(MODEL, names)
    alone = names["make_model"]()
    optimizer, wanted = torch.optim.AdamW(alone.parameters()), []
    for step in range(6):
        optimizer.zero_grad()
        loss = alone(names["batch"](step)).square().mean()
        loss.backward()
        optimizer.step()
        wanted.append((loss.item(), {name: value.clone() for name, value in alone.state_dict().items()}))

    def train(ranks, total, seed):
        log = tmp_path / f"of-{ranks}"
        codes = run_ranks(str(tmp_path / "train.py"), {"total": total, "seed": seed}, ranks, log, OMP_NUM_THREADS="1")
        logs = [log.with_name(f"{log.name}.{rank}").read_text() for rank in range(ranks)]
        assert codes == [0] * ranks, logs
        kept = [text.count("rng: the random generators stay as they are") for text in logs]
        said = [json.loads(text.splitlines()[-1]) for text in logs]
        for one in said:
            assert list(one["losses"].values()) == pytest.approx([wanted[int(step)][0] for step in one["losses"]])
        return said, kept, logs[0]

    def same_model(found, step):
        for name, value in wanted[step][1].items():
            torch.testing.assert_close(found["model"][name], value)

    of_two, kept, _ = train(2, 2, seed=10)
    assert ([one["start"] for one in of_two], kept) == ([0, 0], [0, 0])

    lines = block("with Repository.open").strip().splitlines()
    assert len([line for line in lines if line.strip()]) == 3
    exec("\n".join(lines).replace("/shared/snapshots", root), names)
    (command,) = (line for line in block("exp1@latest", "console").splitlines() if line.startswith("$ snapstore"))
    file = tmp_path / "state.pt"
    words = command.removeprefix("$ snapstore ").replace("/shared/snapshots", root).replace("state.pt", str(file))
    result = invoke(words.split())
    assert result.exit_code == 0, result.output
    for state, kind in ((names["state"], RankValues), (torch.load(file), dict)):
        same_model(state, 1)
        assert type(state["rng"]) is kind
        for rank in range(2):
            RngState().load_state_dict(state["rng"][rank])
            assert torch.rand(1).item() == of_two[rank]["next"]

    (of_one,), kept, log = train(1, 4, seed=20)
    assert (of_one["start"], list(of_one["losses"]), kept) == (2, ["2", "3"], [1])
    assert "as 2 ranks saved and 1 rank restored; seed them" in log
    assert of_one["draws"][0] == drawn(20)
    of_three, kept, log = train(3, 6, seed=30)
    assert ([one["start"] for one in of_three], kept) == ([4] * 3, [1, 0, 0])
    assert "as 1 rank saved and 3 ranks restored; seed them" in log
    assert [one["draws"][0] for one in of_three] == [drawn(30 + rank) for rank in range(3)]
    with Repository.open(root) as repository:
        same_model(repository.restore("exp1@5"), 5)
        assert [snapshot.step for snapshot in repository.snapshots("exp1")] == list(range(6))
