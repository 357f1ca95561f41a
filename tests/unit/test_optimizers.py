"""The state of an optimizer goes only to parameters that it fits, with torch.save and load_state_dict beside it."""

import copy
import logging

import pytest
import torch

from kit.states import Saved, same, through_torch
from snapstore import InvalidInputError, PerRank, Repository, SnapshotManager, UnknownFormatError
from snapstore.errors import FormatError
from snapstore.format import records
from snapstore.format.manifests import manifest
from snapstore.save.ranks.merged_trees import PartTree, merge_trees
from snapstore.state.tree.decode import decode
from snapstore.state.tree.encode import has_parameters, pack
from snapstore.state.values.tensors import StoredPart
from snapstore.state.walk.flatten import flatten, flatten_and_learn
from snapstore.state.walk.learner import DifferentStructureError
from snapstore.state.walk.stateful import node_of, parameters_of
from snapstore.storage.memory import MemoryStore

ADAM_KINDS = ({"fused": True}, {"foreach": True}, {"foreach": False})


def model(width=16, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 4)).to(dtype)


def train(net, optimizer, first, count=3):
    """Return the losses of some steps."""
    losses = []
    for number in range(first, first + count):
        torch.manual_seed(number)
        data = torch.randn(8, 8).to(next(net.parameters()).dtype)

        def closure(data=data):
            optimizer.zero_grad()
            loss = (net(data) - 1).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def trained(make, width=16, dtype=torch.float32):
    net = model(width, dtype)
    optimizer = make(net)
    train(net, optimizer, 0)
    return net, optimizer


def refused(saved, target, **options):
    """Return the error of a restore, which must leave the objects of the target as they are."""
    before = copy.deepcopy([one.state_dict() for one in target.values()])
    with pytest.raises(InvalidInputError) as error:
        saved.restore(into=target, **options)
    same([one.state_dict() for one in target.values()], before)
    return "\n".join(map(str, error.value.args))


# --- shapes ---


def test_a_lazy_module_and_its_optimizer_resume_as_with_torch():
    """The parameters of the target get their shapes when the module is loaded, before its optimizer."""

    def make():
        net = torch.nn.Sequential(torch.nn.LazyLinear(4))
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    net, optimizer = make()
    net(torch.zeros(1, 8))
    train(net, optimizer, 0)
    saved, file = Saved({"m": net, "o": optimizer}), through_torch({"m": net.state_dict(), "o": optimizer.state_dict()})
    wanted = train(net, optimizer, 3)
    net, optimizer = make()
    net.load_state_dict(file["m"])
    optimizer.load_state_dict(file["o"])
    assert train(net, optimizer, 3) == wanted
    net, optimizer = make()
    saved.restore(into={"m": net, "o": optimizer})
    assert train(net, optimizer, 3) == wanted


@pytest.mark.parametrize("options", ADAM_KINDS, ids=str)
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "running"])
def test_state_of_another_shape_is_refused_before_anything_is_written(options, steps):
    net, optimizer = trained(lambda net: torch.optim.AdamW(net.named_parameters(), **options))
    saved = Saved({"head": net[2].bias, "model": torch.nn.Linear(2, 2), "optimizer": optimizer})
    narrow = model(12)
    target = torch.optim.AdamW(narrow.named_parameters(), **options)
    train(narrow, target, 0, steps)
    into = {"model": torch.nn.Linear(2, 2), "optimizer": target}
    text = refused(saved, into, keys=["model", "optimizer"])
    assert "optimizer.state.0.exp_avg: shape: expected (12, 8) as parameter 0 (0.weight) of group 0" in text
    assert "got (16, 8); give the parameter the shape of the save, or leave the optimizer out" in text
    assert "nothing was changed" in text
    assert "optimizer.state.3" not in text
    target.load_state_dict(through_torch(optimizer.state_dict()))  # torch takes it without a word
    assert target.state[narrow[0].weight]["exp_avg"].shape == (16, 8)


def test_a_job_and_a_repository_refuse_it_too(tmp_path):
    _, optimizer = trained(lambda net: torch.optim.AdamW(net.parameters()))
    fresh = torch.optim.AdamW(model(12).parameters())
    with SnapshotManager(tmp_path / "r", run="a", async_save=False) as snapshots:
        snapshots.save(1, {"o": PerRank(optimizer)})
        snapshots.save(2, optimizer)
        for step, into in ((1, {"o": PerRank(fresh)}), (2, fresh)):
            with pytest.raises(InvalidInputError, match=r"expected \(12, 8\) as parameter 0 of group 0"):
                snapshots.restore_into(into, step)
        same(snapshots.restore(2), optimizer.state_dict())  # the forms of the parameters are not in it
    assert not fresh.state


class OwnShapes(torch.optim.Optimizer):
    """Keeps the mean of the rows, as Adafactor does, and a list of tensors."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure):
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["rows"] = parameter.grad.square().flatten(1).mean(1) if parameter.ndim > 1 else torch.ones(1)
            state.setdefault("kept", []).append(torch.full((len(state.get("kept", [])) + 1,), 2.0))
            parameter.data -= 0.1 * parameter.grad
        return loss


def test_state_of_its_own_shape_passes():
    _, optimizer = trained(lambda net: OwnShapes(net.parameters()))
    saved, (_, running) = Saved({"o": optimizer}), trained(lambda net: OwnShapes(net.parameters()))
    for state in running.state.values():
        state["kept"].append(torch.zeros(9))  # the present list is longer, and of other shapes
        state["rows"] = torch.zeros(3)
    for target in (OwnShapes(model().parameters()), OwnShapes(model(12).parameters()), running):
        saved.restore(into={"o": target})
        same(target.state_dict(), through_torch(optimizer.state_dict()))


@pytest.mark.parametrize(
    "change",
    [lambda net: setattr(net[0].weight, "data", torch.zeros(16, 9)), lambda net: net.to(torch.float64)],
    ids=["shape", "dtype"],
)
def test_a_save_that_knows_the_structure_notices_other_parameters(change):
    net, optimizer = trained(lambda net: torch.optim.SGD(net.parameters(), momentum=0.9))
    state = {"o": optimizer}
    _, (structure, _) = flatten_and_learn(state)
    structure.match(state).confirm()
    optimizer.param_groups[0]["lr"] = 0.5
    assert structure.match(state).trees["o"] == flatten(state)[1].tree  # the forms stay around what has changed
    change(net)
    with pytest.raises(DifferentStructureError):
        structure.match(state)


# --- casts ---


class Kept(torch.optim.Optimizer):
    """Keeps float32 tensors of the parameter's shape and of others, in a list, a dict and a tuple."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure):
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                values = [torch.full(shape, 0.3) for shape in (parameter.shape, (), (3,), (2, 2))]
                state.update(kept=[values[0]], deep={"a": {"b": values[1]}}, pair=(values[2], 5), one=values[3])
            state["kept"][0].mul_(0.9).add_(parameter.grad.float(), alpha=state["deep"]["a"]["b"].item())
            state["deep"]["a"]["b"].mul_(state["pair"][0].sum()).mul_(state["one"].mean())
            parameter.data.sub_(state["kept"][0].to(parameter.dtype), alpha=0.1)
        return loss


TORCH = ["SGD", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor"]
OPTIMIZERS = {name: getattr(torch.optim, name) for name in (*TORCH, "LBFGS")} | {"kept": Kept}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resume_is_exact_whatever_the_loader_casts(name, dtype):
    """Where torch.save and load_state_dict resume exactly, so does a restore; and it does where torch casts."""
    net, optimizer = trained(lambda net: OPTIMIZERS[name](net.parameters()), dtype=dtype)
    saved = Saved({"m": net, "o": optimizer})
    at_save = through_torch({"m": net.state_dict(), "o": optimizer.state_dict()})
    expected = [train(net, optimizer, 3), list(net.parameters())]
    for number in range(2):
        target = model(dtype=dtype)
        into = OPTIMIZERS[name](target.parameters())
        train(target, into, 0, number)  # a fresh one, and a running one
        saved.restore(into={"m": target, "o": into})
        same(into.state_dict(), at_save["o"])
        same([train(target, into, 3), list(target.parameters())], expected)
    target = model(dtype=dtype)
    into = OPTIMIZERS[name](target.parameters())
    into.load_state_dict(at_save["o"])
    dtypes = [_dtypes(one["state"]) for one in (into.state_dict(), at_save["o"])]
    assert (dtypes[0] != dtypes[1]) == (name in {"ASGD", "NAdam", "kept"})


def _dtypes(value):
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, dict):
        return {key: _dtypes(child) for key, child in value.items()}
    return list(map(_dtypes, value)) if isinstance(value, list | tuple) else None


def test_parameters_of_another_dtype_and_hooks_keep_what_the_loader_left():
    net, optimizer = trained(lambda net: Kept(net.parameters()), dtype=torch.bfloat16)
    saved = Saved({"o": optimizer})
    with pytest.raises(InvalidInputError, match="changed dtypes"):  # as before: the program may convert it itself
        saved.restore(into={"o": Kept(model(dtype=torch.float64).parameters())})
    hooked, seen = Kept(net.parameters()), []

    def narrow(optimizer):
        for state in optimizer.state.values():
            state["one"] = state["one"].half()
            seen.append(state["kept"][0].dtype)

    hooked.register_load_state_dict_post_hook(narrow)
    with pytest.raises(InvalidInputError, match=r"o.state.0.one: dtype: expected float32, got float16") as error:
        saved.restore(into={"o": hooked})
    assert "kept" not in str(error.value.args)
    assert set(seen) == {torch.bfloat16}
    assert hooked.state[net[0].weight]["kept"][0].dtype == torch.float32


# --- groups and names ---


def groups(lengths):
    """Return an optimizer with groups of so many parameters, after one step."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(sum(lengths))]
    rest = iter(parameters)
    optimizer = torch.optim.AdamW([{"params": [next(rest) for _ in range(length)]} for length in lengths])
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("there", "here"), [([2, 1], [2]), ([2], [2, 1]), ([2, 1], [1, 2])], ids=str)
def test_other_groups_are_refused_before_the_model_is_filled(there, here):
    saved, optimizer = Saved({"model": torch.nn.Linear(2, 2), "optimizer": groups(there)}), groups(here)
    text = refused(saved, {"model": torch.nn.Linear(2, 2), "optimizer": optimizer})
    counts = [f"{len(n)} group{'s' * (len(n) > 1)} of {', '.join(map(str, n))} parameters" for n in (here, there)]
    assert f"optimizer.param_groups: groups: expected {counts[0]} as in the target, got {counts[1]}; make" in text
    with pytest.raises(ValueError, match="loaded state dict"):
        optimizer.load_state_dict(through_torch(groups(there).state_dict()))


def test_groups_of_an_optimizer_without_state_are_compared_too():
    fresh = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1)) for _ in range(count)]) for count in (1, 2)]
    saved = Saved({"model": torch.nn.Linear(2, 2), "optimizer": fresh[0]})
    assert "expected 1 group of 2 parameters" in refused(saved, {"model": torch.nn.Linear(2, 2), "optimizer": fresh[1]})


class Twins(torch.nn.Module):
    """Two equal layers, made in an order."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            setattr(self, name, torch.nn.Linear(8, 8, bias=False))

    def forward(self, x):
        return self.a(x).tanh() + 3 * self.b(x)


def named(net, prefix=""):
    return torch.optim.AdamW([(f"{prefix}{name}", parameter) for name, parameter in net.named_parameters()])


def test_names_in_another_order_are_refused_and_other_names_are_logged(caplog):
    net = Twins("ab")
    optimizer = named(net)
    train(net, optimizer, 0)
    saved, other = Saved({"m": net, "o": optimizer}), Twins("ba")
    before = through_torch(optimizer.state_dict())
    expected = train(net, optimizer, 3)
    text = refused(saved, {"m": other, "o": named(other)})
    assert "o.param_groups: param_names: expected 'b.weight' as parameter 0, as in the target, got 'a.weight'" in text
    assert "in the snapshot 'b.weight' is parameter 1" in text
    with caplog.at_level(logging.WARNING):
        for prefix in ("", "_orig_mod.", "module."):  # of compile and DDP
            target = Twins("ab")
            into = named(target, prefix)
            saved.restore(into={"m": target, "o": into})
            assert train(target, into, 3) == expected
        assert not caplog.records
        saved.restore(into={"m": Twins("ab"), "o": named(Twins("ab"), "new.")})
    (record,) = caplog.records
    assert "o: 2 parameters have other names than in the snapshot, the first is 'new.a.weight'" in record.getMessage()
    other = named(Twins("ba"))
    other.load_state_dict(before)  # torch swaps the moments of the layers without a word
    same(other.state_dict()["state"], before["state"])


def test_a_hook_that_changes_the_state_dict_decides():
    """torch's documentation shows such a hook for parameters that have moved."""

    def by_name(optimizer, state):
        names = state["param_groups"][0]["param_names"]
        wanted = optimizer.param_groups[0]["param_names"]
        moved = {i: state["state"][names.index(name)] for i, name in enumerate(wanted)}
        return {"state": moved, "param_groups": [{**state["param_groups"][0], "param_names": wanted}]}

    net = Twins("ab")
    optimizer = named(net)
    train(net, optimizer, 0)
    saved, target = Saved({"m": net, "o": optimizer}), Twins("ba")
    expected, into = train(net, optimizer, 3), named(target)
    into.register_load_state_dict_pre_hook(by_name)
    saved.restore(into={"m": target, "o": into})
    assert train(target, into, 3) == expected


def test_part_of_a_state_is_checked_where_it_is_selected():
    _, optimizer = trained(lambda net: torch.optim.AdamW(net.parameters()))
    saved, (_, narrow) = Saved({"o": optimizer}), trained(lambda net: torch.optim.AdamW(net.parameters()), 12)
    saved.restore(into={"o": narrow}, keys="o.state.3")  # the last bias has the same shape
    same(narrow.state_dict()["state"][3], optimizer.state_dict()["state"][3])
    assert "o.state.0.exp_avg: shape" in refused(saved, {"o": narrow}, keys="o.state.0.exp_avg")


def test_advice_does_not_cut_into_the_state_of_an_optimizer():
    net, optimizer = trained(lambda net: torch.optim.AdamW(net.parameters()))
    fresh = torch.optim.AdamW(model().parameters())
    state = {"m": net, "o": optimizer, "deep": {"list": [optimizer], "a": {"x": torch.ones(1), "y": torch.ones(1)}}}
    into = {"m": model(), "o": fresh.state_dict(), "deep": {"list": [fresh.state_dict()], "a": {"x": torch.ones(1)}}}
    with pytest.raises(InvalidInputError, match="missing in the target") as error:
        Saved(state).restore(into=into)
    assert error.value.args[-1].endswith("only what the target has: restore_into(..., keys=['m', 'deep.a.x'])")
    there = {"m": net, "o": fresh.state_dict()}
    with pytest.raises(InvalidInputError) as error:
        Saved(there).restore(into={"m": model(), "o": optimizer.state_dict()})
    assert error.value.args[-1].endswith("only the parts that fit: restore_into(..., keys=['m'])")


# --- the stored form ---


def features_of(store):
    keys = [key for key in store._objects if key.startswith("manifests/")]
    found = [manifest.decode_header(store.get(key), key) for key in keys if not records.is_list(store.get(key))]
    return {header.part: list(header.features) for header in found}


def test_only_a_manifest_with_an_optimizer_has_the_feature(monkeypatch, caplog):
    store, optimizer = MemoryStore(), torch.optim.SGD(model().parameters(), momentum=0.9)
    with Repository.create(store) as repository:
        repository.save({"optimizer": {"lr": 1}, "m": model()}, run="a", step=1)
        assert set(map(tuple, features_of(store).values())) == {()}
        repository.save({"m": model(), "optimizer": optimizer, "n": [1]}, run="a", step=2)
        assert features_of(store) == {"": [], "m": [], "n": [], "optimizer": ["parameter_shapes"]}
        monkeypatch.setattr(records, "KNOWN_FEATURES", frozenset({records.RANKS}))  # as an older checkout
    with Repository.open(store) as older:
        assert older.restore("a@1")["optimizer"] == {"lr": 1}
        with pytest.raises(UnknownFormatError, match=r"needs 'parameter_shapes', which this snapstore .* not know"):
            older.restore("a@2")
        older.save({"m": model()}, run="a", step=3)  # newer is not damaged
    assert "base a@2 cannot be read and is not used: " in caplog.text
    assert "damaged" not in caplog.text


@pytest.mark.parametrize(
    "wrap", [lambda o: o, lambda o: [o], lambda o: {"a": ({"b": o},)}], ids=["root", "list", "deep"]
)
def test_it_is_found_wherever_it_is(wrap):
    _, optimizer = trained(lambda net: torch.optim.AdamW(net.parameters()))
    parts = flatten(wrap(optimizer))
    assert sum(has_parameters(part.tree, pack(part.tree)) for part in parts) == 1
    same(Saved(wrap(optimizer)).restore(), wrap(optimizer.state_dict()))
    narrow = wrap(torch.optim.AdamW(model(12).parameters()))
    with pytest.raises(InvalidInputError, match="as parameter 0 of group 0 has"):
        Saved(wrap(optimizer)).restore(into=narrow)


def test_ranks_with_other_parameters_leave_the_forms_out():
    trees = []
    for width in (16, 16, 12):
        (part,) = (p for p in flatten({"o": torch.optim.SGD(model(width).parameters())}) if p.name == "o")
        trees.append([PartTree("", part.tree, [])])
    alike = merge_trees([([0], trees[0]), ([1], trees[1])])
    assert alike[0].tree == trees[0][0].tree
    assert merge_trees([([0], trees[0]), ([1], trees[2])])[0].tree == trees[0][0].tree[3]


FORM = ["float32", [2]]


@pytest.mark.parametrize(
    ("forms", "numbers", "node"),
    [
        ([FORM], [1], ["dict", [], []]),
        ([FORM], [-1], ["dict", [], []]),
        ([FORM], [True], ["dict", [], []]),
        ([["float32", [-2]]], [0], ["dict", [], []]),
        ([["float32", ["2"]]], [0], ["dict", [], []]),
        ([[5, [2]]], [0], ["dict", [], []]),
        ([["float32"]], [0], ["dict", [], []]),
        ([FORM], [0], ["list", []]),
        ([FORM], [0], ["optimizer", [], [], ["dict", [], []]]),
        ([FORM], 0, ["dict", [], []]),
        (None, [0], ["dict", [], []]),
    ],
)
def test_forms_that_no_save_makes_are_refused(forms, numbers, node):
    with pytest.raises(FormatError):
        decode([StoredPart("", ["optimizer", forms, numbers, node], [])])


def test_a_parameter_whose_shape_is_not_known_yet_has_no_form():
    optimizer = torch.optim.SGD(torch.nn.LazyLinear(2).parameters())
    assert parameters_of(optimizer) is None
    assert parameters_of(model()) is None
    assert Saved(optimizer).restore() == optimizer.state_dict()
    assert node_of(parameters_of(torch.optim.SGD(model().parameters())))[2] == [0, 1, 2, 3]
