"""A metric is a tensor of one element or has `__float__`; a save takes its value at the call, and keeps no graph."""

import decimal
import fractions
import gc
import math
import weakref

import numpy as np
import pytest
import torch

from snapstore import InvalidInputError, KeepBest, Repository, SnapshotManager
from snapstore.state.values.metrics import begin_read
from snapstore.storage.memory import MemoryStore

WEIGHT = torch.full((1,), 0.5, requires_grad=True)


class Meter:
    def __float__(self):
        return 0.25


class Index:
    def __index__(self):
        return 7


class Broken:
    def __float__(self):
        raise KeyError("no values yet")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5),
        (3, 3.0),
        (True, 1.0),
        (WEIGHT, 0.5),
        ((WEIGHT * 2).sum(), 1.0),
        (torch.nn.Parameter(torch.ones(1, 1)), 1.0),
        (torch.tensor(1 / 3, dtype=torch.float64), 1 / 3),
        (torch.tensor(2.0, dtype=torch.bfloat16), 2.0),
        (torch.tensor(2**53, dtype=torch.int64), 2.0**53),
        (torch.tensor(True), 1.0),
        (torch.ones(1).to(torch.float8_e4m3fn), 1.0),
        (np.float32(0.5), 0.5),
        (np.float64(1 / 3), 1 / 3),
        (np.int8(-1), -1.0),
        (np.bool_(True), 1.0),
        (np.ones(()), 1.0),
        (np.ones((1, 1), np.float16), 1.0),
        (decimal.Decimal("0.5"), 0.5),
        (fractions.Fraction(1, 4), 0.25),
        (Meter(), 0.25),
        (Index(), 7.0),
        (torch.tensor(math.inf), math.inf),
        (np.float16(-np.inf), -math.inf),
    ],
)
def test_a_number_of_any_kind(value, number):
    """Every kind of number is read as a float, without a warning: pytest makes warnings errors."""
    found = begin_read(value)()
    assert type(found) is float
    assert found == number


def test_nan_of_any_kind():
    for value in (math.nan, torch.tensor(math.nan, requires_grad=True), np.float32("nan"), decimal.Decimal("nan")):
        assert math.isnan(begin_read(value)())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.5", "expected a number, got str"),
        (b"1", "expected a number, got bytes"),
        (None, "expected a number, got NoneType"),
        ([1.0], "expected a number, got list"),
        (1j, "expected a number, got complex"),
        (10**400, "expected a number, got int: .*too large"),
        (np.complex64(1), "expected a real number, got complex64 of complex64"),
        (np.datetime64("2020"), "expected a real number, got datetime64 of "),
        (np.str_("1"), "expected a real number, got str_ of <U1"),
        (np.ones(3), r"expected one number, got ndarray of shape \(3,\); reduce it first, such as with \.mean\(\)"),
        (torch.ones(2, 3), r"expected one number, got tensor of shape \(2, 3\); reduce it first"),
        (torch.ones(0), r"expected one number, got tensor of shape \(0,\)"),
        (torch.ones(1, dtype=torch.complex64), "expected a real number, got tensor of torch.complex64"),
        (torch.empty(1, device="meta"), "expected a number, got Tensor: .*meta"),
        (
            torch.ones(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "expected a number, got Tensor: .*not implemented for 'Float4",
        ),
        (Broken(), r"expected a number, got Broken: KeyError\('no values yet'\)"),
    ],
)
def test_what_is_no_number(value, message):
    with (
        Repository.create(MemoryStore()) as repository,
        pytest.raises(InvalidInputError, match=f"^metric 'loss': {message}"),
    ):
        repository.save({}, run="a", step=1, metrics={"lr": 0.1, "loss": value})


def test_metrics_are_those_of_the_call_and_policies_use_them():
    store = MemoryStore()
    average, array = torch.zeros(1), np.zeros(1)
    with SnapshotManager(store, run="a", keep=[KeepBest("loss")]) as snapshots:
        for step, number in enumerate([3.0, -math.inf, math.nan, math.inf]):
            average.fill_(number)
            array.fill(number)
            snapshots.save(step, {"w": torch.ones(2000) * step}, metrics={"loss": average, "array": array})
            average.fill_(77)
            array.fill(77)
        snapshots.wait_until_finished()
        assert snapshots.best_step() == 1
        assert [(s.step, s.metrics["loss"]) for s in snapshots.repository.snapshots("a")][-1] == (3, math.inf)
        assert snapshots.repository.snapshot("a@3").metrics["array"] == math.inf


def test_no_graph_is_kept():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = held = torch.ones(3)
            seen.append(weakref.ref(held))
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad

    seen = []
    with SnapshotManager(MemoryStore(), run="a") as snapshots:
        handle = snapshots.save(0, {"w": torch.ones(2)}, metrics={"loss": Function.apply(WEIGHT)})
        gc.collect()
        assert seen[0]() is None
        assert handle.result().metrics == {"loss": 0.5}


def test_a_save_that_is_skipped_reads_nothing():
    with SnapshotManager(MemoryStore(), run="a", save_interval_steps=10) as snapshots:
        assert snapshots.save(3, {}, metrics={"loss": Broken()}).skipped
