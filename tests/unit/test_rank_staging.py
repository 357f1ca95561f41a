"""The staging of a rank copies the boxes that `inputs_of` gives, both of a new state and of a recognised one."""

import random

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from kit.rank_saves import as_rank, sharded
from snapstore import PerRank, RngState
from snapstore.engine.registry import Engines
from snapstore.save.inputs import inputs_of
from snapstore.save.replicas import digest_arrays, group_digests
from snapstore.save.shares import RankShares
from snapstore.save.staging import Staging
from snapstore.state.tree.encode import pack
from snapstore.state.walk.flatten import flatten

CHUNK = 1024
ENGINES = Engines(3, threads=1)


def found(inputs):
    """Return what a save would store of inputs, in a form that can be compared."""
    for part in inputs:
        digest_arrays(part.replicas, ENGINES)
    return [
        (
            part.key,
            pack(part.tree),
            (list(part.specs), list(part.plain)),
            [(t.key, t.spec, t.box_of, _bytes(t)) for t in part.tensors],
            [(one.name, one.group, one.is_buffer, one.digests().tobytes()) for one in part.replicas],
            group_digests(part.replicas),
        )
        for part in inputs
    ]


def _bytes(tensor):
    if tensor.copy is not None:
        return bytes(tensor.copy)
    room = np.empty(tensor.spec.nbytes, np.uint8)
    tensor.array.copy_into(room)
    return bytes(room)


class Twice:
    """Copies a state, and then another, as two saves of one rank do."""

    def __init__(self, first, rank=1, size=4, replicas="check"):
        self.shares = RankShares(rank, size, CHUNK, replicas=replicas)
        self.staging = Staging(ENGINES, shares=self.shares)
        self.compare(first)
        self.known = self.staging._known

    def compare(self, state):
        expected = found(inputs_of(flatten(state, of_rank=True), self.shares))
        assert found(self.staging.copy_state(state)()) == expected
        return sum(len(tensors) for _, _, _, tensors, *_ in expected)

    def again(self, state):
        self.compare(state)
        return self.known is not None and self.staging._known is self.known


def whole(version, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(version * 1000 + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def training(version):
    """Return a state as HSDP and tensor parallelism make it: DTensors, plain tensors, plain values, PerRank values."""
    hybrid, rows = [Replicate(), Shard(0)], [Shard(0), Shard(1)]
    plain = whole(version, (600, 4))
    return {
        "model": {
            "hybrid": sharded(whole(version, (999, 8)), [2, 2], hybrid),
            "rows": sharded(whole(version, (40, 80)), [2, 2], rows),
            "empty": sharded(whole(version, (1, 8)), [4], [Shard(0)]),
            "half": sharded(whole(version, (64, 64), torch.bfloat16), [4], [Shard(0)]),
            "turned": sharded(whole(version, (64, 64)), [2, 2], hybrid).t(),
            "plain": plain,
            "tied": plain,
            "norm.running_mean": whole(version, (700,)),
            "norm.running_var": whole(version, (700,)),
        },
        "optimizer": {
            "state": {"step": torch.tensor(float(version)), "grid": np.arange(5000) + version},
            "lr": 0.1 * version,
        },
        "rng": RngState(),
        "loader": {
            "seen": PerRank(version),
            "buffer": PerRank({"x": torch.arange(3000) + version, "y": [version, "a"]}),
        },
        "step": version,
    }


def test_a_state_of_a_rank_is_recognised():
    with as_rank(1, 4):
        twice = Twice(training(1))
        assert twice.known is not None
        random.random()
        assert twice.again(training(2))
        assert twice.again(training(3))
        assert twice.compare(training(4)) >= 10, "the number of boxes"


@pytest.mark.parametrize("replicas", ["check", "rank0"])
@pytest.mark.parametrize("rank", range(4))
def test_every_rank(rank, replicas):
    """Every rank recognises a state with new values, with replicas="check" and replicas="rank0"."""
    with as_rank(rank, 4):
        assert Twice(training(1), rank, replicas=replicas).again(training(2))


def test_a_rank_that_hears_of_other_holders_copies_other_boxes():
    """A plain tensor that only ranks 1 and 2 hold is cut into two shares, not four."""
    with as_rank(1, 4):
        state = {"m": {"w": torch.arange(4000.0), "v": torch.ones(3)}}
        twice = Twice(state)
        twice.shares = RankShares(1, 4, CHUNK, {("m", ("m", "w"), 0): (1, 2)})
        twice.staging.use_shares(twice.shares)
        assert not twice.again(state)
        twice.known = twice.staging._known
        assert twice.again(state)
        (tensor,) = [t for part in inputs_of(flatten(state, of_rank=True), twice.shares) for t in part.tensors]
        assert tensor.spec.shape == (2048,)


def test_plain_tensors_of_unknown_holders_are_copied_whole_and_cut_later():
    """The state may change as soon as `copy_state` returns, although the ranks do not know the holders yet."""
    with as_rank(1, 4):
        state = training(1)
        own = state["model"]["late"] = whole(3, (900, 8))
        name = ("model", ("model", "late"), 0)
        unknown = RankShares(1, 4, CHUNK, None)
        known = RankShares(1, 4, CHUNK, {name: (1, 2)})
        expected = found(inputs_of(flatten(state, of_rank=True), known))
        staging = Staging(ENGINES, shares=unknown)
        give = staging.copy_state(state)
        own += 1
        state["model"]["plain"] += 1
        assert found(staging.use_holders(give(), known)) == expected
        held = sum(t.spec.nbytes for part in inputs_of(flatten(state, of_rank=True), known) for t in part.tensors)
        assert sum(len(memory) for memory in staging._spare.values()) <= held, "the rest of whole tensors is freed"
        structure = staging._known
        expected = found(inputs_of(flatten(state, of_rank=True), known))
        assert found(staging.copy_state(state)()) == expected
        assert staging._known is structure, "the next state is recognised"


def test_large_plain_tensors_are_not_copied_whole(monkeypatch):
    monkeypatch.setattr("snapstore.save.staging.MAX_WHOLE_BYTES", 16_000)
    with as_rank(1, 4):
        for count, asks in ((4000, False), (4001, True)):
            state, asked = {"m": {"w": torch.arange(float(count))}}, []
            staging = Staging(ENGINES, shares=RankShares(1, 4, CHUNK, None))

            def learn(inputs, staging=staging, asked=asked):
                asked.append(inputs)
                return staging.use_holders(inputs, RankShares(1, 4, CHUNK))

            inputs = staging.copy_state(state, learn)()
            assert len(asked) == asks
            copied = sum(t.spec.nbytes for t in inputs[-1].tensors)
            assert copied < 4 * count if asks else copied == 4 * count
            staging.prepare(flatten(state, of_rank=True))()


def of(local, mesh, placements, **options):
    return {"m": {"w": DTensor.from_local(local, mesh, placements, run_check=False, **options), "v": torch.ones(3)}}


def test_another_sharding_is_not_recognised():
    with as_rank(1, 4):
        mesh, other = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        local = whole(1, (8, 8))
        twice = Twice(of(local, mesh, [Shard(0)]))
        assert twice.again(of(local + 1, mesh, [Shard(0)]))
        for different in (
            of(local, mesh, [Shard(1)]),
            of(local, mesh, [Replicate()]),
            of(local, other, [Replicate(), Shard(0)]),
            of(local, mesh, [Shard(0)], shape=(31, 8), stride=(8, 1)),
            {"m": {"w": torch.nn.Parameter(of(local, mesh, [Shard(0)])["m"]["w"]), "v": torch.ones(3)}},
            {"m": {"w": of(local, mesh, [Shard(0)])["m"]["w"].requires_grad_(), "v": torch.ones(3)}},
            {"m": {"w": local, "v": torch.ones(3)}},
        ):
            assert not Twice(of(local, mesh, [Shard(0)])).again(different)


def test_values_of_its_own_are_read_again():
    """A PerRank with new plain values, or new values in its arrays, is recognised.

    It is a new structure if it gets an array, or if an array changes its shape.
    """
    with as_rank(0, 2):

        def state(value):
            return {"m": {"w": torch.ones(2000)}, "own": PerRank(value), "rng": RngState()}

        twice = Twice(state([1, 2]), 0, 2)
        assert twice.again(state([2, 3, "x"]))
        assert not twice.again(state([torch.ones(3)]))
        twice = Twice(state({"a": torch.ones(2)}), 0, 2)
        assert twice.again(state({"a": torch.zeros(2)}))
        assert not twice.again(state({"a": torch.zeros(3)}))


def test_a_sharded_model_and_its_optimizer_are_recognised():
    """A sharded model is recognised, although its state_dict has new DTensors at each save."""
    with as_rank(1, 4):
        net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 7))
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)

        def train():
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()

        train()
        state = {"model": net, "optimizer": optimizer, "rng": RngState()}
        twice = Twice(state)
        for _ in range(3):
            train()
            assert twice.again(state)
