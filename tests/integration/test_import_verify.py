"""`import --verify` never lets originals be deleted of which something is not in the snapshot."""

import argparse
import json
import os
from collections import OrderedDict, defaultdict, deque
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kit.repositories import OPTIONS
from kit.shell import invoke
from snapstore import Repository
from snapstore.convert import import_checkpoints, verifying
from snapstore.storage.memory import MemoryStore


def shell(*args, code=0):
    done = invoke([*map(str, args)])
    assert done.exit_code == code, done.output + done.stderr
    return done


def with_metadata(version):
    found = OrderedDict(a=torch.ones(2))
    found._metadata = {"": {"version": version}}
    return found


ONES = torch.ones(2, 3)
PAIR = torch.arange(4.0), torch.arange(4.0)


@pytest.mark.parametrize(
    ("imported", "in_file"),
    [
        ({"w": ONES}, {"w": torch.ones(3, 2).T}),
        ({"w": np.ones((2, 3))}, {"w": np.asfortranarray(np.ones((2, 3)))}),
        ({"w": ONES}, {"w": torch.ones(2, 3).requires_grad_()}),
        ({"w": torch.nn.Parameter(ONES)}, {"w": torch.nn.Parameter(ONES, requires_grad=False)}),
        ({"a": ONES}, {"a": ONES, "b": ONES}),
        ({"a": PAIR[0], "b": PAIR[1], "c": PAIR[0]}, {"a": PAIR[0], "b": PAIR[1], "c": PAIR[1]}),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        ({None: ONES}, {"None": ONES}),
        (with_metadata(1), with_metadata(2)),
        ({"d": defaultdict(list, a=1)}, {"d": defaultdict(dict, a=1)}),
        ({"d": deque([1], 3)}, {"d": deque([1], 4)}),
        ({"d": argparse.Namespace(a=1)}, {"d": {"a": 1}}),
        ({"d": b"x" * 5000}, {"d": bytearray(b"x" * 5000)}),
    ],
    ids=list("abcdefghijklm"),
)
def test_verify_compares_the_form_of_a_state(tmp_path, imported, in_file):
    """The same bytes and plain values are not the same state."""
    with Repository.create(MemoryStore(), options=OPTIONS) as repository:
        torch.save(imported, tmp_path / "step_1.pt")
        (one,) = import_checkpoints(repository, [tmp_path / "step_1.pt"], run="r")
        assert verifying.compare(repository, one) == ([], [])
        torch.save(in_file, tmp_path / "step_1.pt")
        assert verifying.compare(repository, one)[0]


def test_attributes_of_a_tensor_are_named(tmp_path):
    """torch.save writes them, and no snapshot keeps them."""
    tensor = torch.nn.Parameter(ONES)
    tensor.tensor_model_parallel = True
    torch.save({"a": [tensor]}, tmp_path / "step_1.pt")
    command = ("import", tmp_path / "step_1.pt", "--repo", tmp_path / "snaps", "--verify")
    assert "a.0: has attributes that no snapshot keeps: tensor_model_parallel" in shell(*command, code=3).stderr


def test_a_file_without_a_step_is_compared_whole(tmp_path):
    """It is skipped beside the file with its step; only callbacks of Lightning may have other values."""
    folder = tmp_path / "ckpts"
    folder.mkdir()
    torch.save({"w": ONES, "global_step": 2, "callbacks": {"a": 1}}, folder / "step_2.pt")
    torch.save({"w": ONES, "global_step": 2, "callbacks": {"b": 1}}, folder / "last.pt")
    command = ("import", folder, "--repo", tmp_path / "snaps", "--verify")
    shell(*command)
    torch.save({"w": ONES, "global_step": 2, "callbacks": {"b": 1}, "loss": 0.5}, folder / "last.pt")
    assert "last.pt: is not equal to ckpts@2" in shell(*command, code=3).stderr


def test_a_file_that_changes_while_it_is_verified(tmp_path, monkeypatch):
    path = tmp_path / "step_1.pt"
    torch.save({"w": ONES}, path)

    def opened(*args):
        found = monkeypatch.undo() or verifying.open_source(*args)
        (tmp_path / "new.pt").write_bytes(path.read_bytes())
        (tmp_path / "new.pt").rename(path)
        return found

    with Repository.create(MemoryStore(), options=OPTIONS) as repository:
        (one,) = import_checkpoints(repository, [path], run="r")
        monkeypatch.setattr(verifying, "open_source", opened)
        assert verifying.compare(repository, one)[0] == [f"{path}: changed while it was verified"]


def test_the_trainer_writes_while_its_checkpoints_are_verified(tmp_path, monkeypatch):
    """`rm step_*.pt` would delete a file that was not there when the import began, or has other contents now."""
    folder = tmp_path / "ckpts"
    folder.mkdir()
    for step in (1, 2):
        torch.save({"w": ONES, "step": step}, folder / f"step_{step}.pt")
    compare, command = verifying.compare, ("import", folder, "--repo", tmp_path / "snaps", "--verify")

    def meanwhile(name, repository, one):
        if one.snapshot.step == 2:
            torch.save({"w": ONES, "step": 3}, folder / name)
        return compare(repository, one)

    for name, told in (("step_3.pt", "is new, and was not imported"), ("step_1.pt", "changed while the others")):
        monkeypatch.setattr(verifying, "compare", partial(meanwhile, name))
        assert told in shell(*command, code=3).stderr
    assert shell(*command, code=3).stderr.count("keep the file") == 1


def test_a_checkpoint_that_holds_checkpoints_is_imported_itself(tmp_path):
    """A training whose output folder is a checkpoint of another one."""
    for name in ("checkpoint-500", "checkpoint-500/checkpoint-10", "checkpoint-600"):
        (tmp_path / "ckpts" / name).mkdir(parents=True)
        save_file({"w": ONES}, tmp_path / "ckpts" / name / "model.safetensors")
        step = int(name.rpartition("-")[2])
        (tmp_path / "ckpts" / name / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    done = shell("import", tmp_path / "ckpts", "--repo", tmp_path / "snaps", "--verify")
    with Repository.open(tmp_path / "snaps") as repository:
        assert [snapshot.step for snapshot in repository.snapshots("ckpts")] == [500, 600]
    assert "checkpoint-500: left out 1 file: checkpoint-10" in done.stderr


def test_a_file_with_two_states_is_refused(tmp_path):
    """torch.load reads the first one; in torch's form before archives a file may have several."""
    with (tmp_path / "step_1.pt").open("wb") as file:
        torch.save({"w": ONES}, file, _use_new_zipfile_serialization=False)
        one = file.tell()
        torch.save({"w": ONES + 1}, file, _use_new_zipfile_serialization=False)
    command = ("import", tmp_path / "step_1.pt", "--repo", tmp_path / "snaps", "--verify")
    assert "holds more behind its first state" in shell(*command, code=1).stderr
    os.truncate(tmp_path / "step_1.pt", one)
    shell(*command)
