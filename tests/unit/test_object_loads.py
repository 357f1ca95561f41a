"""Objects with state_dict and load_state_dict restore: objects of torch, data loaders, and objects with faults."""

import collections
import copy
import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

from kit.states import Loader, Saved, again, net, same, train
from snapstore.errors import InvalidInputError, UnsupportedLeafError
from snapstore.state.fill.fit import Fit
from snapstore.state.tree.decode import Decoded
from snapstore.state.values.classes import Types
from snapstore.state.values.metrics import begin_read
from snapstore.state.walk.flatten import flatten

OPTIMIZERS = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def filled(model):
    """Fill the parameters with another value than those of `net()`."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    return model


def optimizer_of(kind, model, **options):
    parameters = [p for p in model.parameters() if kind.__name__ != "Muon" or p.ndim == 2]
    return kind(parameters, lr=0.01, **options)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stepped", [False, True])
def test_every_optimizer(kind, stepped):
    model = net()
    optimizer = optimizer_of(kind, model)
    train(model, optimizer)
    saved = Saved({"model": model, "optimizer": optimizer})
    want = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer)
    after = copy.deepcopy(model.state_dict())

    other = net()
    fresh = optimizer_of(kind, other)
    if stepped:
        train(other, fresh, 1)
    places = [p.data_ptr() for p in other.parameters()]
    saved.restore(into={"model": other, "optimizer": fresh})
    same(other.state_dict(), want["model"])
    same(fresh.state_dict(), want["optimizer"])
    assert [p.data_ptr() for p in other.parameters()] == places
    train(other, fresh)
    same(other.state_dict(), after)
    rebuilt = saved.restore()
    same(rebuilt, want)
    fresh.load_state_dict(rebuilt["optimizer"])


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, epoch):
        return self.factor**epoch


class WithFunctions(lrs.ExponentialLR):
    def __init__(self, optimizer):
        self.anneal = lambda x: x
        self.clamp = max
        super().__init__(optimizer, 0.9)


SCHEDULERS = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, Scale(0.9)),
    "LambdaLR-function": lambda o: lrs.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, Scale(0.9)),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lrs.ConstantLR,
    "LinearLR": lrs.LinearLR,
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 5),
    "PolynomialLR": lrs.PolynomialLR,
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.1, 0.2),
    "CyclicLR-fn": lambda o: lrs.CyclicLR(o, 0.1, 0.2, scale_fn=Scale(0.5)),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
    "SWALR-linear": lambda o: swa_utils.SWALR(o, 0.05, anneal_strategy="linear"),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], milestones=[2]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
    "functions": WithFunctions,
}


def test_every_scheduler_of_torch_is_covered():
    kinds = {n for n, k in inspect.getmembers(lrs, inspect.isclass) if issubclass(k, lrs.LRScheduler)}
    assert kinds - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_every_scheduler(name, tensor_lr):
    def make():
        optimizer = torch.optim.SGD(
            [nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1) if tensor_lr else 0.1, momentum=0.9
        )
        return {"optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    def run(both, steps):
        rates = []
        for _ in range(steps):
            both["optimizer"].step()
            both["scheduler"].step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(float(both["optimizer"].param_groups[0]["lr"]))
        return rates

    both = make()
    run(both, 3)
    saved = Saved(both)
    want = copy.deepcopy(both["scheduler"].state_dict())
    rates = run(both, 4)
    other = make()
    saved.restore(into=other)
    if name == "functions":
        assert other["scheduler"].anneal(3) == 3
        assert other["scheduler"].clamp is max
        want = {key: value for key, value in want.items() if key not in ("anneal", "clamp")}
        assert saved.restore()["scheduler"].keys() == want.keys()
        same({key: other["scheduler"].state_dict()[key] for key in want}, want)
    else:
        same(other["scheduler"].state_dict(), want)
        same(saved.restore()["scheduler"], want)
    assert run(other, 4) == rates


def test_functions_of_a_scheduler_with_its_own_load_state_dict_are_refused():
    class Loads(WithFunctions):
        def load_state_dict(self, state):
            super().load_state_dict(state)

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(UnsupportedLeafError, match=r"s\.anneal: function"):
        flatten({"s": Loads(optimizer)})


def test_grad_scaler_and_averaged_model():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = net()
    average = swa_utils.AveragedModel(model)
    average.update_parameters(model)
    saved = Saved({"scaler": scaler, "average": average})
    other = {"scaler": torch.amp.GradScaler("cpu"), "average": swa_utils.AveragedModel(filled(net()))}
    saved.restore(into=other)
    same(other["scaler"].state_dict(), scaler.state_dict())
    same(other["average"].state_dict(), average.state_dict())


def test_a_loader_without_tensors_is_not_asked_for_its_state():
    loader = Loader()
    loader.position = 7
    other = Loader()
    again({"loader": loader}, into={"loader": other})
    assert (other.position, other.asked) == (7, 0)


def test_the_root_may_be_an_object():
    model, other = net(), net()
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert again(model, into=other) is other
    same(other.state_dict(), model.state_dict())
    assert type(again(model)) is collections.OrderedDict
    assert again(model)._metadata == model.state_dict()._metadata


def test_a_module_goes_into_plain_dicts_and_back():
    model = net()
    into = {"m": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
    again({"m": model}, into=into)
    other = filled(net())
    again(into, into={"m": other})
    same(other.state_dict(), model.state_dict())


def test_names_shapes_and_dtypes_of_a_module_are_listed_before_anything_changes():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    other = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 2, bias=False), nn.Linear(1, 1)).to(torch.float64)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(InvalidInputError) as caught:
        again({"m": model}, into={"m": other})
    for line in (
        "m.0.weight: shape: expected (4, 2)",
        "m.1.weight: dtype: expected float64",
        "m.1.bias: missing in the target",
        "m.2.bias: missing in the snapshot",
    ):
        assert line in str(caught.value)
    same(other.state_dict(), before)


class History(nn.Linear):
    """A layer whose extra state is longer with each step, as in TransformerEngine."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen = []

    def get_extra_state(self):
        return torch.tensor(self.seen, dtype=torch.float64 if self.seen else torch.uint8)

    def set_extra_state(self, state):
        self.seen = state.tolist()


class Queue(nn.Module):
    """A layer with a buffer of any length, which it makes itself when it loads one."""

    def __init__(self, length=0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("queue", torch.arange(float(length)))

    def _load_from_state_dict(self, state, prefix, *args):
        self.queue = torch.empty_like(state[prefix + "queue"])
        super()._load_from_state_dict(state, prefix, *args)


class Buffer:
    """An object with arrays of any length."""

    def __init__(self, length=0):
        self.arrays = {"tensor": torch.arange(float(length)), "array": np.arange(length), "list": [torch.ones(length)]}

    def state_dict(self):
        return self.arrays

    def load_state_dict(self, state):
        self.arrays = dict(state)


class LoadsAll(nn.Linear):
    """A layer that loads weights of any shape."""

    def load_state_dict(self, state, strict=True):
        self.weight, self.bias = nn.Parameter(state["weight"]), nn.Parameter(state["bias"])


def observed():
    """Return a layer with torch's observers, whose buffers get their shapes from the first batch."""
    quantization = pytest.importorskip("torch.ao.quantization")
    layer = nn.Sequential(nn.Linear(4, 8)).train()
    layer.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(layer)


def history(length):
    made = nn.Sequential(History(), nn.Linear(4, 2))
    made[0].seen = [0.5] * length
    return made


def observed_after(length):
    made = observed()
    if length:
        made(torch.ones(length, 4))
    return made


MAKERS = {
    **{"extra state": history, "queue": Queue, "object": Buffer, "observers": observed_after},
    **{"inner queue": lambda length: nn.Sequential(Queue(length)), "loader": lambda length: LoadsAll(length + 1, 3)},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min:UserWarning")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("strict", [True, False])
def test_shapes_that_belong_to_an_object_are_its_loaders(make, strict):
    """Both ways of a resume fill a fresh object, and one whose state has grown since."""
    source = make(5)
    saved = Saved({"m": source, "w": torch.ones(1)})
    expected = copy.deepcopy(source.state_dict())
    for length in (0, 9):
        by_torch, target = make(length), make(length)
        by_torch.load_state_dict(copy.deepcopy(expected))
        same(by_torch.state_dict(), expected)
        saved.restore(into={"m": target, "w": torch.zeros(1)}, keys=Fit(strict=strict))
        same(target.state_dict(), expected)


def test_shapes_beside_them_are_compared_before_anything_changes():
    for source, target, name in (
        (history(3), nn.Sequential(History(), nn.Linear(4, 3)), "1.weight"),
        (nn.Sequential(nn.Linear(2, 2), Queue(3)), nn.Sequential(nn.Linear(2, 3), Queue(4)), "0.weight"),
    ):
        before = copy.deepcopy(target.state_dict())
        with pytest.raises(InvalidInputError, match=rf"m.{name}: shape: expected .* as in the target") as caught:
            again({"m": source}, into={"m": target})
        assert not re.search("_extra_state|queue", str(caught.value))
        same(target.state_dict(), before)
    with pytest.raises(InvalidInputError, match=r"LoadsAll\.load_state_dict failed: KeyError"):
        again({"m": {"weight": torch.ones(2)}}, into={"m": LoadsAll(1, 1)})


def test_modules_that_change_their_names_are_not_checked():
    class Renames(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))
            self.register_load_state_dict_pre_hook(self.rename)

        @staticmethod
        def rename(module, state, prefix, *_):
            if prefix + "old" in state:
                state[prefix + "w"] = state.pop(prefix + "old")

    model = Renames()
    again({"m": {"old": torch.ones(2)}}, into={"m": model})
    assert torch.equal(model.w.detach(), torch.ones(2))
    with pytest.raises(InvalidInputError, match=r"m: Renames.load_state_dict failed: [^/]*Unexpected") as caught:
        again({"m": {"w": torch.ones(2), "other": torch.ones(2)}}, into={"m": model})
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("step"), "KeyError('step')"),
        (AssertionError(), "AssertionError()"),
        (ValueError("two\n lines"), "two lines"),
    ],
)
def test_an_error_of_the_callers_code_says_what_it_is(error, text):
    """A KeyError's text is only the key, and an assert has none."""

    def fails(*_):
        raise error

    class Fails(dict):
        load_state_dict = __float__ = fails

        def state_dict(self):
            return {"a": 1}

    class Made(dict):
        def __init__(self, *plain):
            if plain:
                raise error

    with pytest.raises(InvalidInputError) as loaded:
        again({"m": {"a": 1}}, into={"m": Fails()})
    with pytest.raises(InvalidInputError) as made:
        again({"m": Made()}, decoded=Decoded(types=Types([Made])))
    with pytest.raises(InvalidInputError) as read:
        begin_read(Fails())
    assert loaded.value.args[0] == f"m: Fails.load_state_dict failed: {text}"
    assert f"of what is stored: {text}; leave it out of types" in str(made.value)
    assert str(read.value) == f"expected a number, got Fails: {text}"


def test_a_load_that_fails_says_that_the_target_may_be_partly_filled():
    model = net()
    optimizer, other = torch.optim.SGD(model.parameters(), momentum=0.9), filled(net())
    adam = torch.optim.AdamW(filled(net()).parameters())
    train(model, optimizer, 1)
    with pytest.raises(InvalidInputError, match=r"o: AdamW.load_state_dict failed") as caught:
        again({"o": optimizer, "w": torch.ones(2)}, into={"o": adam, "w": (w := torch.zeros(2))})
    assert caught.value.args[-1].startswith("the target may be partly filled by now: restore into it again")
    assert w.tolist() == [1, 1]
    with pytest.raises(InvalidInputError, match="nothing was changed") as caught:
        again({"m": model, "w": torch.ones(2)}, into={"m": other, "w": torch.zeros(3)})
    assert "partly" not in str(caught.value)


def test_tied_modules():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model, other = Tied(), Tied()
    saved = Saved({"m": model})
    assert len(saved.parts[1].specs) == 3
    saved.restore(into={"m": other})
    same(other.state_dict(), model.state_dict())
    assert other.a.weight is other.b.weight
    untied = {key: value.clone() for key, value in model.state_dict().items()}
    again({"m": untied}, into={"m": other})
    same(dict(other.state_dict()), untied)
    untied["a.weight"] += 1
    with pytest.raises(InvalidInputError, match=r"m\.[ab]\.weight: shares memory"):
        again({"m": untied}, into={"m": other})


def test_an_optimizer_that_casts_is_an_error():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    saved = Saved({"optimizer": optimizer})
    with pytest.raises(InvalidInputError, match=r"optimizer\.state\.0\.exp_avg: dtype: expected float32, got bfloat16"):
        saved.restore(into={"optimizer": torch.optim.AdamW(net(torch.bfloat16).parameters())})


@pytest.mark.parametrize(("dtype", "fits"), [(torch.uint32, True), (torch.int32, False)])
def test_an_object_may_turn_stored_tensors_into_arrays(dtype, fits):
    """A stored tensor restores into an object whose state has an array of the same dtype.

    RngState needs this for a state from a file for torch, which holds tensors instead of arrays.
    """

    class Words:
        def state_dict(self):
            return {"words": np.zeros(3, np.uint32)}

        def load_state_dict(self, state):
            self.loaded = state

    saved, words = Saved({"w": {"words": torch.ones(3, dtype=dtype)}}), Words()
    if fits:
        saved.restore(into={"w": words})
        assert words.loaded["words"].dtype == dtype
    else:
        with pytest.raises(InvalidInputError, match=r"w\.words: dtype: expected int32, got uint32"):
            saved.restore(into={"w": words})


def test_part_of_an_object():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer)
    saved = Saved({"model": model, "optimizer": optimizer})
    other = net()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.25)
    before = copy.deepcopy(other.state_dict())
    saved.restore(into={"model": other, "optimizer": fresh}, keys=["model.0.*", "optimizer.state"])
    assert torch.equal(other[0].weight, model[0].weight)
    same(other.state_dict()["3.weight"], before["3.weight"])
    assert fresh.param_groups[0]["lr"] == 0.25
    same(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    saved.restore(into={"optimizer": fresh}, keys="optimizer.param_groups.0.lr")
    assert fresh.param_groups[0]["lr"] == 0.5
    another = torch.optim.AdamW(net().parameters())
    saved.restore(into={"optimizer": another}, keys="optimizer.state.0.*")
    same(another.state_dict()["state"], {0: optimizer.state_dict()["state"][0]})
    with pytest.raises(InvalidInputError, match="missing in the target"):
        saved.restore(into={"model": nn.Sequential(nn.Linear(4, 8))}, keys="model.3.*")
    two = torch.optim.SGD([{"params": [p]} for p in net().parameters()])
    with pytest.raises(InvalidInputError, match=r"optimizer\.param_groups: `keys` selects some of it"):
        saved.restore(into={"optimizer": two}, keys="optimizer.param_groups.0.lr")


class Metric:
    """A metric whose `state_dict` returns its own arrays, and whose `load_state_dict` keeps the state that it gets."""

    def __init__(self, fill):
        self.state = {
            "array": np.full(3, fill),
            "strided": torch.full((2, 3), fill).t(),
            "note": fill,
            "long": bytes(5000),
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_objects_own_arrays_are_filled_in_place():
    saved, other = Metric(1.0), Metric(2.0)
    held = dict(other.state)
    again({"m": saved}, into={"m": other})
    same(other.state, saved.state)
    assert other.state["array"] is held["array"]
    assert other.state["strided"] is held["strided"]
    other.state["array"] = array = np.zeros(4)  # its loader takes any shape
    again({"m": saved}, into={"m": other})
    same(other.state, saved.state)
    assert not array.any()
    other.state["array"] = np.zeros(saved.state["array"].shape, np.int8)
    with pytest.raises(InvalidInputError, match=r"m\.array: dtype"):
        again({"m": saved}, into={"m": other})


def buffers(state):
    """Return the paths of the tensors in a rank's state that may differ between ranks."""
    parts = flatten(state, of_rank=True)
    return {".".join(map(str, part.specs[number].path)) for part in parts for number in part.buffers}


def test_buffers_are_known_from_a_module_and_from_names():
    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)
            self.register_buffer("table", torch.ones(2))
            self.register_buffer("unsaved", torch.ones(2), persistent=False)

        def get_extra_state(self):
            return {"table": torch.ones(5)}

        def set_extra_state(self, state):
            pass

    module, names = Inner(), {"running_mean", "running_var", "num_batches_tracked"}
    of_norm = {f"norm.{name}" for name in names}
    assert buffers(module) == of_norm | {"table"}
    assert buffers({"a": [module], "b": 1}) == {f"a.0.{name}" for name in of_norm | {"table"}}
    assert buffers({"m": module.state_dict()}) == {f"m.{name}" for name in of_norm}
    assert buffers({"m": {"norm": module.norm.state_dict()}}) == {f"m.{name}" for name in of_norm}
    assert buffers(module.norm.state_dict()) == names
    renamed = Inner()
    renamed._register_state_dict_hook(lambda self, state, prefix, _: {f"w.{key}": state[key] for key in state})
    assert buffers({"m": renamed}) == {f"m.w.{name}" for name in of_norm}
    assert buffers({"m": {"running_mean": torch.ones(3), 7: torch.ones(3)}, "running_var": torch.ones(3)}) == set()
    assert buffers({"m": {"running_mean": torch.ones(3).numpy(), "running_var": torch.ones(3).numpy()}}) == set()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_tensor_of_an_object_whose_elements_share_memory(replaces):
    """torch copies into such a tensor without an error, and it then has other values than were loaded."""

    class Holder:
        def __init__(self, values):
            self.values = values

        def state_dict(self):
            return {"values": self.values}

        def load_state_dict(self, state):
            if replaces:
                self.values = state["values"]
            else:
                self.values.copy_(state["values"])

    saved = Saved({"o": Holder(torch.arange(21.0).reshape(7, 3))})
    target = {"o": Holder(torch.zeros(23).as_strided((7, 3), (2, 1)))}
    if replaces:
        saved.restore(into=target)
        same(target["o"].values, torch.arange(21.0).reshape(7, 3))
        return
    with pytest.raises(InvalidInputError, match=r"o\.values: elements share memory .* cannot hold the stored values"):
        saved.restore(into=target)
    constant = Saved({"o": Holder(torch.ones(7, 3))})
    constant.restore(into=target)  # these it can hold
    same(target["o"].values.clone(), torch.ones(7, 3))
