"""A restore can take a part, other names, or only what both sides have; references may be words."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kit.objects import replace
from kit.rank_snapshots import RankWriter
from kit.repositories import created, opened, same
from kit.shell import invoke
from snapstore import (
    IntegrityError,
    InvalidInputError,
    KeepBest,
    KeepLast,
    Mismatches,
    NotFoundError,
    Repository,
    SnapshotManager,
)


def network(*, head: int = 3) -> nn.Module:
    torch.manual_seed(head)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, head))


class Wrapped(nn.Module):
    """A module under another name, as torch.compile and DDP wrap it."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)


@pytest.fixture
def repository() -> Iterator[Repository]:
    with opened(created()) as repository:
        yield repository


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def saved(repository: Repository, *, name: str = "") -> nn.Module:
    """Save a module and its optimizer after one step; return the module."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    kept = Wrapped(model, name) if name else model
    repository.save({"model": kept, "optimizer": optimizer, "step": 7}, run="r", step=7)
    return model


# --- part ------------------------------------------------------------------------------------------------------------


def test_a_part_alone(repository, monkeypatch):
    model = saved(repository)
    assert same(dict(repository.restore("r@7", part="model")), weights(model))
    assert repository.restore("r@7", part="step") == 7
    assert list(repository.restore("r@7", part="model", keys="2.*")) == ["2.weight", "2.bias"]
    other = network()
    nn.init.zeros_(other[0].weight)
    repository.restore_into("r@7", other, part="model")
    assert same(weights(other), weights(model))
    read = []
    get = repository.store.get
    monkeypatch.setattr(repository.store, "get", lambda key, **options: (read.append(key), get(key, **options))[1])
    repository.restore("r@7", part="model")
    assert len([key for key in read if key.startswith("manifests/")]) == 2, "the root's and the part's"


def test_a_part_whose_key_is_a_number(repository):
    repository.save({5: {"w": np.ones(3)}, "6": {"w": np.zeros(2)}}, run="r", step=0)
    assert np.array_equal(repository.restore("r@0", part="5")["w"], np.ones(3))
    repository.save({5: {"w": np.ones(3)}, "5": {"w": np.zeros(2)}}, run="r", step=1)
    assert np.array_equal(repository.restore("r@1", part="5")["w"], np.zeros(2)), "the text comes first"
    repository.save({10**5000: 1, "m": {"w": np.ones(3)}}, run="r", step=2)
    assert np.array_equal(repository.restore("r@2", part="m")["w"], np.ones(3))
    with pytest.raises(NotFoundError, match=r"part 'none': not in this snapshot; its parts are m, 0x"):
        repository.restore("r@2", part="none")


def test_parts_that_are_not_there(repository):
    saved(repository)
    with pytest.raises(NotFoundError, match=r"part 'none': not in this snapshot; its parts are .*model"):
        repository.restore("r@7", part="none")
    with pytest.raises(NotFoundError, match="keys 'model': matches nothing"):
        repository.restore("r@7", part="model", keys="model")
    with pytest.raises(InvalidInputError, match="expected the name of one, got int"):
        repository.restore("r@7", part=1)
    repository.save([np.ones(3)], run="list", step=0)
    with pytest.raises(NotFoundError, match="its parts are none"):
        repository.restore("list@0", part="0")


def test_values_of_each_rank_in_another_part():
    """With per_rank="same" they prevent a restore of the whole snapshot, but not one of another part."""
    store = created()
    RankWriter(store).save(
        {"": {}, "model": {"w": np.ones((6, 4))}, "loader": {"x": np.zeros(3)}},
        world=2, own={"loader": [7, 8]}, run="ranks",
    )  # fmt: skip
    with opened(store) as repository:
        with pytest.raises(InvalidInputError, match=r"loader\.own: each rank's own"):
            repository.restore("ranks@0", per_rank="same")
        with pytest.raises(InvalidInputError, match=r"own: each rank's own"):
            repository.restore("ranks@0", part="loader", per_rank="same")
        assert repository.restore("ranks@0", part="loader")["own"] == {0: 7, 1: 8}
        assert same(repository.restore("ranks@0", part="model"), {"w": np.ones((6, 4))})


# --- rename ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rename", [{"_orig_mod.": ""}, lambda name: name.removeprefix("_orig_mod.")], ids=["prefix", "function"]
)
def test_a_compiled_module_into_a_plain_one(repository, rename):
    model = saved(repository, name="_orig_mod")
    other = network()
    nn.init.zeros_(other[0].weight)
    with pytest.raises(InvalidInputError, match="another prefix"):
        repository.restore_into("r@7", {"model": other}, keys="model")
    with pytest.raises(InvalidInputError, match="another prefix"):  # a restore of nothing would be silent
        repository.restore_into("r@7", {"model": other}, keys="model", strict=False)
    repository.restore_into("r@7", {"model": other}, keys="model", rename=rename)
    assert same(weights(other), weights(model))
    found = repository.restore("r@7", part="model", rename=rename)
    assert found._metadata["1"]["version"] == 2 if isinstance(rename, dict) else found._metadata
    assert list(found) == list(weights(model))


def test_prefixes_inside_each_other_and_added(repository):
    model = network()
    repository.save({"model": Wrapped(Wrapped(model, "_orig_mod"), "module")}, run="r", step=1)
    assert list(repository.restore("r@1", part="model", rename={"_orig_mod.": "", "module.": ""})) == list(
        model.state_dict()
    )
    wrapped = Wrapped(network(), "net")
    repository.restore_into("r@1", wrapped, part="model", rename={"module._orig_mod.": "net."})
    assert same(list(weights(wrapped).values()), list(weights(model).values()))


def test_single_names_and_parts(repository):
    repository.save({"a": {"x": np.ones(3), "y": np.zeros(2)}, "b": {"x": 5}}, run="r", step=0)
    found = repository.restore("r@0", rename={"a": "net", "x": "z"})
    assert same(found, {"net": {"z": np.ones(3), "y": np.zeros(2)}, "b": {"z": 5}})
    assert same(repository.restore("r@0", rename={"a": "net"}, keys="net.x"), {"net": {"x": np.ones(3)}})
    target = {"net": {"x": np.zeros(3), "y": np.ones(2)}, "b": {"x": 0}}
    repository.restore_into("r@0", target, rename={"a": "net"})
    assert same(target, {"net": {"x": np.ones(3), "y": np.zeros(2)}, "b": {"x": 5}})


@pytest.mark.parametrize(
    ("rename", "error", "match"),
    [
        ({"x": "y"}, InvalidInputError, r"two names in a would become 'y'"),
        ({"none": "y", "q.": ""}, NotFoundError, r"rename: 'none', 'q\.' not among the names"),
        ({"x": 3}, InvalidInputError, "expected a mapping of str to str"),
        (lambda name: None, InvalidInputError, "returned NoneType for 'x', expected a str"),
        ("x=y", InvalidInputError, "expected a mapping of old to new names, or a function"),
    ],
)
def test_names_that_are_refused(repository, rename, error, match):
    repository.save({"a": {"x": np.ones(3), "y": np.zeros(2)}}, run="r", step=0)
    with pytest.raises(error, match=match):
        repository.restore("r@0", rename=rename)


# --- strict ----------------------------------------------------------------------------------------------------------


def test_what_both_sides_have(repository, caplog):
    """A fine-tune with another layer: the rest keeps its values, and is named."""
    model = saved(repository)
    other = nn.Sequential(OrderedDict([("0", nn.Linear(4, 8)), ("1", nn.BatchNorm1d(8)), ("3", nn.Linear(8, 2))]))
    before, found = weights(other), Mismatches()
    target = {"model": other, "epoch": 3}
    with pytest.raises(InvalidInputError, match="does not fit"):
        repository.restore_into("r@7", target)
    assert same(weights(other), before)
    with caplog.at_level(logging.WARNING, "snapstore"):
        assert repository.restore_into("r@7", target, strict=found).step == 7
    assert same(weights(other), {**{name: weights(model)[name] for name in before if name[0] in "01"},
                                 **{name: before[name] for name in before if name[0] not in "01"}})  # fmt: skip
    assert target["epoch"] == 3
    assert set(found.missing) == {"model.3.weight", "model.3.bias", "epoch"}
    assert {"model.2.weight", "model.2.bias", "step"} <= set(found.unexpected)
    assert any(name.startswith("optimizer.") for name in found.unexpected)
    assert "r@7: restored with strict=False: 3 names missing in the snapshot (" in caplog.text
    assert "missing in the target" in caplog.text


def test_arrays_that_are_left_out_are_not_read(repository, monkeypatch):
    repository.save({"a": np.arange(5000.0), "b": np.arange(9000.0)}, run="r", step=0)
    read = []
    get = repository.store.get_range
    monkeypatch.setattr(
        repository.store, "get_range", lambda *args, **options: (read.append(args[2]), get(*args, **options))[1]
    )
    target = {"a": np.zeros(5000)}
    repository.restore_into("r@0", target, strict=False)
    assert same(target, {"a": np.arange(5000.0)})
    few = sum(read)
    read.clear()
    repository.restore("r@0", keys="b")
    assert few < sum(read)


def test_other_shapes_and_dtypes_are_always_errors(repository):
    saved(repository)
    for other, match in ((network(head=5), "shape"), (network().double(), "dtype")):
        before = weights(other)
        with pytest.raises(InvalidInputError, match=match):
            repository.restore_into("r@7", other, part="model", strict=False)
        assert same(weights(other), before)
    with pytest.raises(InvalidInputError, match="nothing of the snapshot fits"):
        repository.restore_into("r@7", {"x": np.zeros(3)}, strict=False)
    with pytest.raises(InvalidInputError, match=r"expected True, False or Mismatches\(\)"):
        repository.restore_into("r@7", network(), strict="no")


def test_keys_of_what_both_sides_have(repository):
    model, found = saved(repository), Mismatches()
    other = network()
    nn.init.zeros_(other[0].weight)
    nn.init.zeros_(other[2].weight)
    repository.restore_into("r@7", other, part="model", keys="0.*", strict=found)
    assert not found
    assert str(found) == "nothing is missing"
    assert same(other[0].weight.detach(), model[0].weight.detach())
    assert not other[2].weight.any()


def test_the_manager_takes_them_too():
    with SnapshotManager(created(), run="r", async_save=False) as snapshots:
        model = network()
        snapshots.save(1, {"model": Wrapped(model, "module"), "step": 1})
        assert same(dict(snapshots.restore(part="model", rename={"module.": ""})), weights(model))
        other, found = network(), Mismatches()
        snapshots.restore_into({"model": other, "more": 1}, rename={"module.": ""}, strict=found)
        assert same(weights(other), weights(model))
        assert (found.missing, found.unexpected) == (["more"], ["step"])


# --- references ------------------------------------------------------------------------------------------------------


def test_best_and_highest():
    store = created()
    with SnapshotManager(store, run="r", async_save=False, keep=[KeepLast(9), KeepBest("loss")]) as snapshots:
        for step, loss in ((1, 3.0), (2, 0.5), (3, 0.7), (2, 0.9)):
            snapshots.save(step, {"x": np.full(3, step + loss)}, metrics={"loss": loss})
        assert snapshots.best_step() == 3
        assert snapshots.restore("best")["x"][0] == 3.7
    with opened(store) as repository:
        assert repository.snapshot("r@best").step == 3
        assert repository.snapshot("r@highest").step == 3
        assert repository.snapshot("r@latest").step == 2
        assert repository.restore("r@best")["x"][0] == 3.7
        assert repository.save({"x": 1}, run="fork", step=4, parent="r@highest").parent == repository.snapshot("r@3").id
        repository.tag("r@1", "best")
        assert repository.snapshot("r@best").step == 1, "a tag comes first"
        assert repository.snapshot("fork@highest").step == 4
        with pytest.raises(NotFoundError, match=r"'fork@best': run 'fork' has no KeepBest policy"):
            repository.snapshot("fork@best")
        repository.set_policies("fork", [KeepBest("acc", mode="max")])
        with pytest.raises(NotFoundError, match="no snapshot of run 'fork' has the metric 'acc'"):
            repository.snapshot("fork@best")
        with pytest.raises(NotFoundError, match="no run 'none'"):
            repository.snapshot("none@best")
        forgotten = repository.forget_snapshots(["fork@4"], force=True).forgotten
        assert len(forgotten) == 1
        with pytest.raises(NotFoundError, match="no such step or tag"):
            repository.snapshot("fork@highest")


@pytest.mark.parametrize("word", ["best", "highest"])
def test_no_guess_while_a_record_cannot_be_read(word):
    store = created()
    with opened(store) as repository:
        repository.set_policies("r", [KeepBest("loss")])
        for step in range(3):
            repository.save({"x": step}, run="r", step=step, metrics={"loss": step})
        key = repository.snapshot("r@1").key
    data = bytearray(store.get(key))
    data[-1] ^= 1
    replace(store, key, bytes(data))
    with opened(store) as repository, pytest.raises(IntegrityError, match=f"r@{word}: may be r@1"):
        repository.snapshot(f"r@{word}")


# --- the shell -------------------------------------------------------------------------------------------------------


def test_the_shell_writes_a_part_under_other_names(tmp_path):
    place = str(tmp_path / "r")
    with Repository.create(place) as repository:
        repository.set_policies("r", [KeepBest("loss")])
        for step in range(2):
            state = {"model": {"module.w": torch.ones(3) + step}, "epoch": step}
            repository.save(state, run="r", step=step, metrics={"loss": step})
    for name, read in (("x.pt", torch.load), ("x.safetensors", load_file)):
        output = str(tmp_path / name)
        options = ["restore", "--repo", place, "r@best", "-o", output, "--part", "model", "--rename", "module.="]
        assert invoke(options).exit_code == 0
        assert same(dict(read(output)), {"w": torch.ones(3)})
    for given, code, text in (("module.", 2, "expected OLD=NEW"), ("none.=", 1, "not among the names")):
        options = ["restore", "--repo", place, "r@best", "-o", f"{output}2.pt", "--rename", given]
        result = invoke(options)
        assert (result.exit_code, text in result.stderr) == (code, True)
