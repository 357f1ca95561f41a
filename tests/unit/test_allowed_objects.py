"""Objects of allowed classes are stored by their attributes, such as the projectors of GaLore's optimizers.

`Projector` and `Shampoo` are written like the classes of galore_torch and pytorch_optimizer.
"""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

import pytest
import torch

from kit import rank_saves
from kit.repositories import created, opened
from kit.states import again, same, through_torch
from snapstore import InvalidInputError, Repository, SnapshotManager, UnsupportedLeafError
from snapstore.state.tree.weights_only import to_weights_only
from snapstore.state.values.objects import ALLOWED, move_beside_parameters
from snapstore.state.walk.flatten import flatten


class Projector:
    """As galore_torch has it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.kind, self.matrix = rank, "std", None

    def project(self, gradient: torch.Tensor, step: int) -> torch.Tensor:
        if self.matrix is None or step % 4 == 0:
            self.matrix = torch.linalg.svd(gradient)[0][:, : self.rank].contiguous()
        return self.matrix.t() @ gradient


class Partitioner:
    def __init__(self, shape: torch.Size) -> None:
        self.shape, self.splits = shape, [(0, [1, 2])]


class Shampoo:
    """As pytorch_optimizer has it: with lists of tensors, and an object in it."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.statistics = [torch.eye(size) for size in gradient.shape]
        self.partitioner = Partitioner(gradient.shape)


class Galore(torch.optim.Optimizer):
    """An optimizer with objects in its state, as the two libraries have it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(step=0, projector=Projector(2), shampoo=Shampoo(parameter))
            low = state["projector"].project(parameter.grad, state["step"])
            state["step"] += 1
            for statistics, one in zip(state["shampoo"].statistics, (parameter.grad, parameter.grad.t()), strict=True):
                statistics.add_(one @ one.t())
            update = state["projector"].matrix @ low / state["shampoo"].statistics[0].trace()
            parameter.data.sub_(update, alpha=self.param_groups[0]["lr"])


#: module -> name -> the class that stands for that of the library.
CLASSES = {
    "galore_torch.galore_projector": ("GaLoreProjector", Projector),
    "pytorch_optimizer.optimizer.utils.preconditioner": ("PreConditioner", Shampoo),
    "pytorch_optimizer.optimizer.utils.partition": ("BlockPartitioner", Partitioner),
}
for _module, (_name, _kind) in CLASSES.items():
    _kind.__module__, _kind.__qualname__ = _module, _name


@pytest.fixture(autouse=True)
def _libraries(monkeypatch):
    """Put the classes where the libraries have theirs."""
    for name, (qualified, kind) in CLASSES.items():
        assert qualified in ALLOWED[name]
        parts = name.split(".")
        for module in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):  # as pickle imports them
            monkeypatch.setitem(sys.modules, module, sys.modules.get(module) or types.ModuleType(module))
            sys.modules[module].__path__ = []
        setattr(sys.modules[name], qualified, kind)


@pytest.fixture
def repository():
    with opened(created()) as found:
        yield found


def trained(steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4, bias=False)
    state = {"model": model, "optimizer": Galore(model.parameters())}
    go_on(state, steps)
    return state


def go_on(state: dict[str, Any], steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
        state["optimizer"].zero_grad()
        state["model"](inputs).square().sum().backward()
        state["optimizer"].step()


def resumed(state: dict[str, Any]) -> dict[str, Any]:
    target, states = trained(0), {name: one.state_dict() for name, one in state.items()}
    for name, loaded in through_torch(states).items():
        target[name].load_state_dict(loaded)
    return target


@pytest.mark.parametrize("steps", [0, 1, 9], ids=["fresh", "another state", "rollback"])
def test_an_optimizer_goes_on_with_the_same_bits(repository, steps):
    """The first steps after it use the projector that is stored: the next one is made at step 8."""
    state, target = trained(5), trained(steps)
    expected = resumed(state)
    repository.save(state, run="a", step=0)
    repository.restore_into("a@0", target)
    (found,) = target["optimizer"].state.values()
    assert (type(found["projector"]), type(found["shampoo"].partitioner)) == (Projector, Partitioner)
    for one in (state, target, expected):
        go_on(one, 5, start=5)
        same(one["model"].weight.detach(), state["model"].weight.detach())


def test_a_program_without_the_library_gets_the_plain_form(repository, monkeypatch):
    repository.save({"o": {"p": trained(1)["optimizer"].state_dict()}, "w": torch.ones(1)}, run="a", step=0)
    monkeypatch.delitem(sys.modules, "galore_torch.galore_projector")
    found = repository.restore("a@0")["o"]["p"]["state"][0]
    assert list(found["projector"]) == ["rank", "kind", "matrix"]
    assert type(found["shampoo"]) is Shampoo


class Mine:
    """A class of the user."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_users_allow_their_own_classes(repository):
    state = {"o": {"mine": Mine([torch.ones(3), {"a": 1}])}, "w": torch.ones(2)}
    with pytest.raises(UnsupportedLeafError, match=r"o\.mine: .*Mine has no .*add_safe_globals\(\[Mine\]\)"):
        repository.save(state, run="a", step=0)
    with torch.serialization.safe_globals([Mine]):
        repository.save(state, run="a", step=0)
        found = repository.restore("a@0")["o"]["mine"]
        assert type(found) is Mine
        same(found.value, state["o"]["mine"].value)
        target = {"o": {"mine": Mine([torch.zeros(3), {"a": 2}])}, "w": torch.zeros(2)}
        mine, tensor = target["o"]["mine"], target["o"]["mine"].value[0]
        repository.restore_into("a@0", target)
        assert (target["o"]["mine"] is mine, mine.value[0] is tensor, mine.value[1]) == (True, True, {"a": 1})
    same(repository.restore("a@0")["o"]["mine"], {"value": [torch.ones(3), {"a": 1}]})
    assert type(repository.restore("a@0", types=[Mine])["o"]["mine"]) is Mine


class WithSlots:
    __slots__ = ("a",)


class WithGetstate(Mine):
    def __getstate__(self) -> Any:
        return {}


class WithReduce(Mine):
    def __reduce__(self) -> Any:
        return Mine, (1,)


class WithSetstate(Mine):
    def __setstate__(self, state: Any) -> None: ...


class WithNew(Mine):
    def __new__(cls, *_: Any) -> Any:
        return super().__new__(cls)


@pytest.mark.parametrize("kind", [WithSlots, WithGetstate, WithReduce, WithSetstate, WithNew, type, Exception])
def test_a_class_with_more_than_attributes_is_refused(kind):
    value = kind() if kind in (WithSlots, Exception) else kind("a", (), {}) if kind is type else kind(1)
    with torch.serialization.safe_globals([kind]), pytest.raises(UnsupportedLeafError, match=r"v: .*no stored form"):
        flatten({"v": value})


def test_an_attribute_without_a_stored_form_is_named():
    with torch.serialization.safe_globals([Mine]), pytest.raises(UnsupportedLeafError, match=r"v\.value\.a: builtin"):
        flatten({"v": Mine({"a": len})})


def test_a_stored_name_makes_no_object_of_another_kind(repository):
    with torch.serialization.safe_globals([Mine]):
        repository.save({"v": Mine(1), "w": torch.ones(1)}, run="a", step=0)
    kind = type("Mine", (), {"__module__": __name__, "__slots__": ("value",), "_fields": ("value",)})
    with pytest.raises(InvalidInputError, match=r"v: cannot make a .*Mine of what is stored: .*more than attributes"):
        repository.restore("a@0", types=[kind])


def test_a_manager_saves_each_change(repository):
    with SnapshotManager(repository, run="a") as manager:
        state = trained(1)
        for step in range(4):
            manager.save(step, state)
            go_on(state, 1, start=step)
    target = trained(0)
    for step in range(4):
        repository.restore_into(f"a@{step}", target)
        expected = trained(1)
        for number in range(step):
            go_on(expected, 1, start=number)
        (found,), (stored,) = target["optimizer"].state.values(), expected["optimizer"].state.values()
        same(vars(found["projector"]), vars(stored["projector"]))


def test_ranks_store_them_as_one_process_does(repository: Repository):
    snapshot, _ = rank_saves.save(repository, [partial(trained, 2)] * 2, 0)
    target, expected = trained(0), trained(2)
    repository.restore_into(snapshot.ref, target)
    for one in (target, expected):
        go_on(one, 2, start=2)
    same(target["model"].weight.detach(), expected["model"].weight.detach())


def test_files_have_their_attributes():
    state = again({"o": trained(1)["optimizer"].state_dict(), "w": torch.ones(1)})
    written, changed = to_weights_only(state)
    assert type(written["o"]["state"][0]["projector"]) is dict
    assert {one.path for one in changed} >= {"o.state.0.projector", "o.state.0.shampoo.partitioner"} or not changed


def test_their_tensors_lie_beside_the_parameter():
    """A restore makes them in host memory, and no load_state_dict moves them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, device="meta"))])
    mine = Mine([torch.ones(2), (torch.ones(()), {"a": Mine(torch.ones(1))})])
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"mine": mine, "step": torch.ones(())}
    with torch.serialization.safe_globals([Mine]):
        move_beside_parameters(optimizer)
    assert mine.value[0].device.type == mine.value[1][1]["a"].value.device.type == "meta"
    assert mine.value[1][0].device.type == "cpu"
