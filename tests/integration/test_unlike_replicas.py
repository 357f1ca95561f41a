"""If replicas differ between ranks, rank 0's buffers are stored with a warning, and a parameter is an error.

With replicas="rank0" all values of rank 0 are stored. The tensors are small ones, which one rank stores inline, and
ones of many chunks, of which each rank stores a share if the replicas are equal. Every element differs between ranks,
so a tensor that is mixed of several ranks is noticed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

import pytest
import torch

from kit.ranks import Managers
from kit.repositories import created, opened, same
from snapstore import InvalidInputError, SnapshotManager
from snapstore.distributed.messages import Report
from snapstore.save.inputs import SaveRequest
from snapstore.save.ranks.agreement import compare_replicas

COUNT = 3
WIDTH = 5000  # 20 chunks of a float each
NAMES = ("1.running_mean", "1.running_var", "1.num_batches_tracked", "2.running_mean", "2.running_var")


class Scale(torch.nn.Module):
    """A module with a buffer that no module of torch has, and a parameter with the name of a buffer of BatchNorm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3000))
        self.running_mean = torch.nn.Parameter(torch.ones(4))


def net():
    norms = torch.nn.BatchNorm1d(WIDTH), torch.nn.BatchNorm2d(3)
    return torch.nn.Sequential(torch.nn.Linear(2, WIDTH), *norms, Scale())


def model_of(rank, version=0):
    """Return a model as after some steps on one rank: the parameters are equal on all ranks, the buffers differ."""
    model, generator = net(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            own = 1 + rank if name.endswith(NAMES) or "seen" in name else 0
            value.copy_((torch.rand(value.shape, generator=generator) + version + own * 10).to(value.dtype))
        model[2].num_batches_tracked.fill_(7)  # this one is the same on all
    return model


def saved(managers, state_of, step=0):
    """Save on all ranks; return the error of each rank's save, or None."""
    found = managers.all(lambda m, rank: m.save(step, state_of(rank)))
    waited = managers.all(lambda m, _: m.wait_until_finished())
    return [a if isinstance(a, Exception) else b for a, b in zip(found, waited, strict=True)]


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("as_module", [True, False])
def test_buffers_are_rank_0s_with_one_warning(caplog, as_module, async_save):
    """A module lists its buffers; in a state dict the buffers of BatchNorm are known by their names."""

    def state(rank, version=0):
        model = model_of(rank, version)
        if not as_module:  # in a state dict any other buffer must be equal
            model[3].seen = torch.zeros(3000)
        return {"model": model if as_module else model.state_dict(), "step": version}

    store = created()
    managers = Managers(store, async_save=async_save)
    for step in range(3):
        assert saved(managers, lambda rank, step=step: state(rank, step), step) == [None] * COUNT
    (warning,) = warnings(caplog)
    assert "buffers on ranks 1, 2 differ from those on rank 0, which are stored" in warning
    for name in NAMES:
        assert f"model.{name}" in warning
    assert ("model.3.seen" in warning) == as_module
    assert "2.num_batches_tracked" not in warning
    assert "weight" not in warning

    def restored(manager, rank):
        target = state(rank, 50)
        manager.restore_into(target)
        return target["model"].state_dict() if as_module else target["model"]

    expected = state(0, 2)["model"]
    for found in managers.all(restored):
        assert same(dict(found), dict(expected.state_dict() if as_module else expected))
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert repository.check("restore").ok
        assert repository.gc().deleted_objects == 0
        assert repository.snapshots("a")[-1].depth > 0


def test_buffers_of_stages(caplog):
    """Each stage has two ranks and stores the buffers of its first; one warning names the buffers of all stages."""

    def state(rank):
        stage = rank // 2
        return {"model": {f"{stage}.{key}": value for key, value in model_of(rank)[1].state_dict().items()}}

    store = created()
    managers = Managers(store, 4)
    for step in range(2):
        assert saved(managers, state, step) == [None] * 4
    managers.end()
    (warning,) = warnings(caplog)
    assert "buffers on ranks 1, 3 differ from those on ranks 0, 2" in warning
    assert all(f"model.{stage}.{key}" in warning for stage in (0, 1) for key in ("running_mean", "running_var"))
    with opened(store) as repository:
        assert same(repository.restore("a@1")["model"], state(0)["model"] | state(2)["model"])


def test_other_buffers_are_warned_of_again(caplog):
    managers = Managers(created())
    for step, names in enumerate([("1",), ("1",), ("1", "2"), ("1",)]):

        def state(rank, names=names):
            layers = {name: model_of(rank)[int(name)].state_dict() for name in names}
            return {"model": OrderedDict((f"{n}.{key}", v) for n, of in layers.items() for key, v in of.items())}

        assert saved(managers, state, step) == [None] * COUNT
    managers.end()
    first, second = warnings(caplog)
    assert "model.1.running_mean" in first
    assert "2.running_mean" not in first
    assert "model.2.running_mean" in second


@pytest.mark.parametrize(
    "diverged",
    [
        {"0.weight": torch.ones(WIDTH, 2)},
        {"1.weight": torch.ones(WIDTH)},
        {"3.running_mean": torch.ones(4)},  # without running_var it is not a statistic of a layer
        {"x.running_mean": torch.ones(4), "x.running_var": torch.ones(5)},
        {"x.running_mean": torch.ones(4, 4), "x.running_var": torch.ones(4, 4)},
        {"x.running_mean": torch.nn.Parameter(torch.ones(4)), "x.running_var": torch.nn.Parameter(torch.ones(4))},
        {"my_running_mean": torch.ones(4), "my_running_var": torch.ones(4)},
    ],
)
def test_a_parameter_that_differs_is_an_error_beside_buffers_that_do(caplog, diverged):
    """This holds also for a parameter with the name of a buffer; the error names it, and no buffer."""

    def state(rank):
        model = model_of(rank)
        model[3].seen = torch.zeros(3000)
        found = model.state_dict() | {name: value.detach() * 2 + rank for name, value in diverged.items()}
        grads = {name: found[name].requires_grad_() for name in diverged if diverged[name].requires_grad}
        return {"model": found | grads}

    managers = Managers(created())
    for error in saved(managers, state):
        assert isinstance(error, InvalidInputError), error
        assert all(f"model.{name}" in str(error) for name in diverged)
        assert not any(name in str(error) for name in NAMES)
        assert "differ from the replicas on rank" in str(error)
    assert not [text for text in warnings(caplog) if "buffers" in text]
    managers.end()


def test_a_parameter_of_a_module_is_no_buffer():
    """`running_mean` is a parameter of this module, as torch lists it."""

    class Odd(torch.nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.running_mean = torch.nn.Parameter(torch.full((4,), float(rank)), requires_grad=False)
            self.running_var = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    managers = Managers(created())
    for error in saved(managers, lambda rank: {"model": Odd(rank)}):
        assert "model.running_mean: differ from the replicas" in str(error)
    managers.end()


def test_optimizer_state_that_differs_is_an_error():
    """This holds also for the moments of a parameter that is named like a buffer."""

    def state(rank):
        moments = {f"{name}.{key}": torch.ones(9) + rank for name in NAMES[:2] for key in ("exp_avg", "step")}
        return {"model": model_of(0), "optimizer": {"state": moments}}

    managers = Managers(created())
    for error in saved(managers, state):
        assert "optimizer.state.1.running_mean.exp_avg" in str(error)
    managers.end()


def diverged(rank, version=0):
    """Return tensors of which no element is equal on two ranks."""
    shapes = {"scalar": (), "small": (3,), "chunk": (256,), "rows": (40, 300), "long": (20_001,), "wide": (3, 5000)}
    return {name: torch.full(shape, rank * 100.0 + version) for name, shape in shapes.items()}


@pytest.mark.parametrize("async_save", [True, False])
def test_rank_0s_values_are_stored_whole(caplog, async_save):
    """All ranks restore them, and one process too; there is no warning."""
    store = created()
    managers = Managers(store, async_save=async_save, replicas="rank0")
    for step in range(3):
        assert saved(managers, lambda rank, s=step: {"model": diverged(rank, s), "n": s}, step) == [None] * COUNT
    assert not warnings(caplog)

    def restored(manager, rank):
        target = {"model": diverged(rank, 70), "n": 0}
        manager.restore_into(target)
        return target

    for found in managers.all(restored):
        assert same(found, {"model": diverged(0, 2), "n": 2})
    managers.end()
    with opened(store) as repository:
        assert same(repository.restore("a@1"), {"model": diverged(0, 1), "n": 1})
        assert repository.check("restore").ok


def test_of_stages_the_first_rank_that_holds_a_tensor_stores_it():
    def state(rank):
        layers = {"all": torch.full((9000,), float(rank))}
        return {"model": layers | ({"late": torch.full((9000,), float(rank))} if rank else {})}

    store = created()
    managers = Managers(store, replicas="rank0")
    assert saved(managers, state) == [None] * COUNT
    managers.end()
    with opened(store) as repository:
        found = repository.restore("a@0")["model"]
    assert same(found, {"all": torch.full((9000,), 0.0), "late": torch.full((9000,), 1.0)})


def test_the_ranks_pass_the_same():
    mode = {"of_rank": lambda rank: {"replicas": "rank0" if rank == 1 else "check"}}
    said = "replicas='rank0', .*, and rank 0 has asked for open, replicas='check'"
    with pytest.raises(InvalidInputError, match=said):
        Managers(created(), silent_s=1.0, **mode)


def test_no_other_value_is_taken():
    with pytest.raises(InvalidInputError, match="replicas 'rank1': expected one of check, rank0"):
        SnapshotManager(created(), run="a", replicas="rank1")


@pytest.mark.parametrize("held", [(["a", "b"], ["a", "c"]), (["a"], ["a", "b", "c"]), (["a", "b", "c"], ["a"])])
def test_a_tensor_that_one_rank_of_a_group_lacks_has_not_diverged(held):
    """The ranks are stages of a pipeline whose mesh dimension has another name: to broadcast would destroy layers."""
    reports = {rank: Report(0, [], b"", b"", {"group": bytes([rank])}) for rank in range(2)}
    digests = {rank: dict.fromkeys(names, b"same") for rank, names in enumerate(held)}
    with pytest.raises(InvalidInputError, match=r"b, c: .*name that dimension of the mesh 'pp'") as caught:
        compare_replicas(reports, SaveRequest("r", 0), lambda *_: digests, set())
    assert "broadcast" not in str(caught.value)
    assert "a, b" not in str(caught.value)
