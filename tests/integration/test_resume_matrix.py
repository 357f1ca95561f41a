"""Resumed trainings get the losses of the uninterrupted one: a drawn sample of the pairs of tools/resume-matrix."""

import json
import os
from types import SimpleNamespace

import pytest

from kit.processes import ROOT, environment, run_python
from kit.samples import SEED

PAIRS = 100
#: A table of causes, as docs/reliability.md has it.
TABLE = """
## Trainings that do not resume exactly

| optimizers | layouts | dtypes | paths | snapstore | cause |
|---|---|---|---|---|---|
| `torch.Adam*`, `po.sgd` | `*` | `bfloat16` | `dcp` | differs | why |

## Next
| a | b |
"""


@pytest.fixture
def matrix(monkeypatch):
    """Return the modules of the tool."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    from resume_matrix import optimizers, paths, record, training, workers

    return SimpleNamespace(optimizers=optimizers, paths=paths, record=record, training=training, workers=workers)


def test_a_sample_of_pairs_resumes_as_torch_save_does(tmp_path):
    """snapstore resumes exactly if torch.save does; each other difference has a cause in docs/reliability.md."""
    out = tmp_path / "record.json"
    chosen = ["--sample", str(PAIRS), "--seed", str(SEED), "--only", "torch.*,transformers.*", "--workers", "2"]
    path = os.pathsep.join([str(ROOT / "tools"), environment()["PYTHONPATH"]])
    done = run_python("-m", "resume_matrix", *chosen, "--out", out, cwd=ROOT, PYTHONPATH=path)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    counts = json.loads(out.read_text())["counts"]
    assert sum(row["pairs"] for row in counts) == PAIRS
    assert sum(row["pairs"] for row in counts if row["snapstore"] == row["torch.save"] == "same") > PAIRS / 3


def test_a_path_that_loses_state_is_found(matrix, monkeypatch, tmp_path):
    """The tool sees a load without the optimizer, a tensor of another layout, and a save that raises."""

    def forgets(state, folder, stack):
        load = matrix.paths._torch_save(state, folder, stack)

        def resume(fresh):
            before = fresh["optimizer"].state_dict()
            load(fresh)
            fresh["optimizer"].load_state_dict(before)

        return resume

    def straightens(state, folder, stack):
        load = matrix.paths._torch_save(state, folder, stack)

        def resume(fresh):
            load(fresh)
            for held in fresh["optimizer"].state.values():
                held.update({name: one.contiguous() for name, one in held.items()})

        return resume

    def fails(state, folder, stack):
        raise ValueError("no\nroom")

    for name, way in (("restore", forgets), ("export", fails), ("dcp", straightens)):
        monkeypatch.setitem(matrix.paths.WAYS, name, way)
    case = matrix.training.Case("torch.AdamW fused", "channels_last", "float32")
    optimizer = matrix.optimizers.named(case.optimizer)
    found = matrix.paths.outcomes(case, optimizer, ("restore", "export", "dcp"), tmp_path, "cpu")
    assert found["restore"] == found["dcp"] == ("differs", "same")
    assert found["export"] == ("error: ValueError: no room", "same")
    pairs = [matrix.record.Pair(case, path, outcome) for path, outcome in found.items()]
    assert len(matrix.record.failures(pairs, [])) == 3


def test_a_process_that_dies_fails_its_case_alone(matrix):
    """An optimizer that does not exist ends the process with an error."""
    cases = [
        (matrix.training.Case(name, "contiguous", "float32"), ["restore"]) for name in ("no.one", "torch.Rprop foreach")
    ]
    found = {case.optimizer: outcomes["restore"] for case, outcomes, _ in matrix.workers.run(cases, 1, "cpu")}
    assert found["no.one"].snapstore == "error: the process ended with exit code 1"
    assert found["torch.Rprop foreach"].torch_save == "same"
    pair = matrix.record.Pair(cases[0][0], "restore", found["no.one"])
    every = matrix.record.Cause(["*"], ["*"], ["*"], ["*"], "error", "any")
    assert matrix.record.failures([pair], [every]), "no cause excuses a crash"


def test_a_cause_excuses_only_what_torch_save_does_not_resume(matrix):
    (cause,) = known = matrix.record.causes(TABLE)
    assert (cause.optimizers, cause.outcome, cause.text) == (["torch.Adam*", "po.sgd"], "differs", "why")

    def failed(optimizer="torch.AdamW", dtype="bfloat16", path="dcp", ours="differs", theirs="differs"):
        case = matrix.training.Case(optimizer, "contiguous", dtype)
        pair = matrix.record.Pair(case, path, matrix.paths.Outcome(ours, theirs))
        return bool(matrix.record.failures([pair], known)), bool(matrix.record.unused([pair], known))

    assert failed() == (False, False)
    assert failed(theirs="error: no") == (False, False)
    assert failed(theirs="same") == (True, False), "torch.save resumes it"
    assert failed(ours="error: no") == failed(dtype="float32") == failed(path="export") == (True, True)
    assert failed(ours="same") == failed(ours="not run: why", theirs="not run: why") == (False, True)
    with pytest.raises(ValueError, match=r"expected \| optimizers"):
        matrix.record.causes(TABLE.replace("| differs |", "| slow |"))


def test_the_causes_of_the_docs_can_be_read(matrix):
    assert all(cause.text for cause in matrix.record.causes())
