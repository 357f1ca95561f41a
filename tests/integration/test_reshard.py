"""A snapshot of several ranks restores into any sharding and into one process.

One process plays the ranks one after the other (kit.rank_saves), so every pair of shardings is tried. Some sizes are
not divisible by the number of ranks. Chunks have 256 bytes, so most boxes begin and end within chunks. Targets hold
other bytes before a restore, so a byte that it does not write is found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import snapstore  # noqa: E402
from kit import rank_saves  # noqa: E402
from kit.rank_saves import as_rank  # noqa: E402
from kit.rank_snapshots import RankWriter, rows, strided  # noqa: E402
from snapstore import (  # noqa: E402
    FormatError,
    InvalidInputError,
    NotFoundError,
    PerRank,
    RankValues,
    Repository,
    RngState,
)
from snapstore import dcp as snap  # noqa: E402
from snapstore.chunks import reader  # noqa: E402
from snapstore.dcp.planner import Shards, state_of  # noqa: E402
from snapstore.format.manifests import boxes, manifest  # noqa: E402
from snapstore.restore.pipeline import read, read_into  # noqa: E402
from snapstore.restore.sources import AsRank  # noqa: E402
from snapstore.restore.streaming import TensorReader  # noqa: E402
from snapstore.state.fill.fit import Fit  # noqa: E402
from snapstore.state.values.sharded import local_of, sharding_of  # noqa: E402
from snapstore.storage.memory import MemoryStore  # noqa: E402

CHUNK = 256
GENERATOR = torch.Generator().manual_seed(17)
WHOLE = {
    "even": torch.randn(24, 16, generator=GENERATOR),
    "uneven": torch.randn(13, 7, 3, generator=GENERATOR).to(torch.bfloat16),
    "long": torch.randint(0, 255, (1, 3001), generator=GENERATOR, dtype=torch.uint8),
    "vector": torch.randn(101, generator=GENERATOR, dtype=torch.float64),
    "few": torch.randn(2, 500, generator=GENERATOR),
}
SHARDINGS = {
    "fsdp 4": ((4,), [Shard(0)]),
    "fsdp 3": ((3,), [Shard(0)]),
    "fsdp 1": ((1,), [Shard(0)]),
    "tp 3": ((3,), [Shard(-1)]),
    "replicated": ((3,), [Replicate()]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "fsdp x columns": ((2, 2), [Shard(0), Shard(-1)]),
    "fsdp x rows": ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
    "several boxes": ((2,), [_StridedShard(0, split_factor=3)]),
    "fully_shard x rows": ((3, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
}


def placed(whole, name):
    """Return a whole tensor in one of SHARDINGS, for the rank that is played."""
    mesh, placements = SHARDINGS[name]
    if name.startswith("fully_shard"):
        return fully_sharded(whole, mesh, placements)
    own = [Shard(whole.dim() - 1) if p == Shard(-1) else p for p in placements]
    return distribute_tensor(whole, init_device_mesh("cpu", mesh), own, src_data_rank=None)


def fully_sharded(whole, counts, placements):
    """Return a whole tensor cut as fully_shard cuts the rows that tensor parallelism has cut."""
    mesh, local = init_device_mesh("cpu", counts), whole
    for count, at in reversed([*zip(counts, mesh.get_coordinate(), strict=True)]):
        size = max(1, -(-len(local) // count))
        local = local[size * at :][:size]
    form = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local.clone(), mesh, placements, **form)


def sharded_state(name):
    return {"model": {key: placed(whole, name) for key, whole in WHOLE.items()}, "step": torch.tensor(7.5), "epoch": 3}


def spoilt(value):
    """Overwrite a DTensor's memory; return the DTensor."""
    local_of(value).view(torch.uint8).fill_(0xA5)
    return value


def expected(value, whole):
    """Return the part of the whole tensor that the played rank holds."""
    pieces = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in sharding_of(value).boxes]
    return torch.cat(pieces) if pieces else local_of(value)


@pytest.fixture
def repository():
    with Repository.create(MemoryStore(), chunk_bytes=CHUNK) as found:
        yield found


def save(repository, name, step=1):
    return rank_saves.save(repository, [lambda: sharded_state(name)] * math.prod(SHARDINGS[name][0]), step)[0]


def check_into(repository, ref, name):
    """Restore on every rank of a sharding; compare each byte."""
    world = math.prod(SHARDINGS[name][0])
    for rank in range(world):
        with as_rank(rank, world):
            into = {"model": {key: spoilt(placed(whole, name)) for key, whole in WHOLE.items()}}
            read_into(repository.context, ref, into, keys="model", as_rank=AsRank("drop", rank, world))
            for key, whole in WHOLE.items():
                value = into["model"][key]
                assert torch.equal(local_of(value), expected(value, whole)), (name, rank, key)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("saved", SHARDINGS)
def test_every_sharding(repository, saved):
    """From each sharding into each other one, and as whole tensors."""
    ref = save(repository, saved).ref
    for name in SHARDINGS:
        check_into(repository, ref, name)
    state = repository.restore(ref)
    assert (state["epoch"], state["step"].item()) == (3, 7.5)
    assert all(torch.equal(state["model"][key], whole) for key, whole in WHOLE.items())
    named = dict(repository.named_tensors(ref))
    assert set(named) == {"step", *(f"model.{key}" for key in WHOLE)}
    assert all(torch.equal(named[f"model.{key}"], whole) for key, whole in WHOLE.items())


@pytest.mark.parametrize("name", SHARDINGS)
def test_from_one_process(repository, name):
    """A snapshot of one process fills every sharding."""
    check_into(repository, repository.save({"model": WHOLE}, run="r", step=1, ranks=False).ref, name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", SHARDINGS)
def test_through_dcp(repository, name):
    """DCP fills every sharding with the rows that each rank holds, with its own planner and with ours."""
    repository.save({"model": WHOLE}, run="r", step=1, ranks=False)
    world = math.prod(SHARDINGS[name][0])
    for rank, is_ours in itertools.product(range(world), (False, True)):
        with as_rank(rank, world):
            into = {"model": {key: spoilt(placed(whole, name)) for key, whole in WHOLE.items()}}
            source = snap.SnapstoreReader(repository, run="r")
            if is_ours:
                snap.load(into, source, 1)
            else:
                dcp.load(into, storage_reader=source, checkpoint_id=1, no_dist=True)
            for key, whole in WHOLE.items():
                value = into["model"][key]
                assert torch.equal(local_of(value), expected(value, whole)), (rank, is_ours, key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["fully_shard x rows", "several boxes"])
def test_tensors_that_a_planner_of_dcp_leaves_out(repository, name):
    """They keep what they held: a planner has no item for one, and the snapshot lacks another."""

    class FewTensors(DefaultLoadPlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            return dataclasses.replace(plan, items=[i for i in plan.items if i.dest_index.fqn != "model.even"])

    repository.save({"model": {k: v for k, v in WHOLE.items() if k != "uneven"}}, run="r", step=1, ranks=False)
    world = math.prod(SHARDINGS[name][0])
    for rank in range(world):
        with as_rank(rank, world):
            into = {"model": {key: spoilt(placed(whole, name)) for key, whole in WHOLE.items()}}
            planner, source = FewTensors(allow_partial_load=True), snap.SnapstoreReader(repository, run="r")
            dcp.load(into, storage_reader=source, checkpoint_id=1, planner=planner, no_dist=True)
            for key, whole in WHOLE.items():
                local = local_of(into["model"][key])
                left = torch.full_like(local.view(torch.uint8), 0xA5).view(local.dtype)
                wanted = left if key in ("even", "uneven") else expected(into["model"][key], whole)
                assert torch.equal(local.view(torch.uint8), wanted.view(torch.uint8)), (rank, key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_left_out", [True, False])
def test_rows_that_dcp_does_not_find_and_a_planner_that_renames(repository, is_left_out):
    """DCP finds no rows on the last rank, so nothing tells which tensor the planner would load, if any."""

    class Renaming(DefaultLoadPlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            items = [item for item in plan.items if item.dest_index.fqn != "a" or not is_left_out]
            names = [dataclasses.replace(item.storage_index, fqn="b") for item in items]
            items = [dataclasses.replace(item, storage_index=name) for item, name in zip(items, names, strict=True)]
            return dataclasses.replace(plan, items=items)

    rows = torch.arange(21.0).reshape(7, 3)
    repository.save({"a": rows, "b": rows + 100}, run="r", step=1, ranks=False)
    for rank, planner in itertools.product(range(6), (Renaming, DefaultLoadPlanner)):
        with as_rank(rank, 6):
            value = spoilt(fully_sharded(rows, *SHARDINGS["fully_shard x rows"]))
            state, before = {"a": value}, local_of(value).clone()
            load = functools.partial(
                dcp.load, state, storage_reader=snap.SnapstoreReader(repository, run="r"), checkpoint_id=1,
                planner=planner(), no_dist=True,
            )  # fmt: skip
            if rank == 5 and planner is Renaming:
                with pytest.raises(dcp.api.CheckpointException, match="a: this rank has rows of it"):
                    load()
                wanted = before
            else:
                load()
                left = before if is_left_out else expected(value, rows + 100)
                wanted = left if planner is Renaming else expected(value, rows)
            assert torch.equal(local_of(value).view(torch.uint8), wanted.view(torch.uint8)), (rank, planner)


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_planner_of_dcp_that_changes_values(name):
    """Each rank saves the changed values at the places of its own."""

    class Halving(DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item).half()

    world = math.prod(SHARDINGS[name][0])
    for rank in range(world):
        with as_rank(rank, world):
            given, planner = {key: placed(whole, name) for key, whole in WHOLE.items()}, Halving()
            planner.set_up_planner(given)
            changed = state_of(planner, planner.create_local_plan())
            for key, whole in WHOLE.items():
                assert sharding_of(changed[key]) == sharding_of(given[key]), (rank, key)
                assert torch.equal(local_of(changed[key]), expected(given[key], whole).half()), (rank, key)


def test_into_whole_tensors_and_arrays(repository):
    """One process restores into whole tensors, one of them not contiguous, and restores chosen keys."""
    ref = save(repository, "fsdp x columns").ref
    into = {"model": {key: torch.zeros_like(whole) for key, whole in WHOLE.items()}}
    into["model"]["even"] = torch.zeros(16, 24).t()
    repository.restore_into(ref, into, keys="model")
    assert all(torch.equal(into["model"][key], whole) for key, whole in WHOLE.items())
    assert list(repository.restore(ref, keys="model.f*")["model"]) == ["few"]
    with pytest.raises(InvalidInputError, match=r"shape: expected \(24, 15\) as in the target, got \(24, 16\)"):
        repository.restore_into(ref, {"model": {"even": torch.zeros(24, 15)}}, keys="model.even")


def test_other_shape_or_dtype(repository):
    """The whole shape and the dtype of a DTensor must be those of the snapshot; nothing is written."""
    ref = save(repository, "fsdp 4").ref
    with as_rank(1, 2):
        for whole, message in (
            (torch.zeros(26, 16), r"even: shape: expected \(26, 16\) as in the target, got \(24, 16\)"),
            (torch.zeros(24, 16, dtype=torch.float64), r"even: dtype: expected float64 as in the target, got float32"),
        ):
            value = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
            with pytest.raises(InvalidInputError, match=message):
                read_into(repository.context, ref, {"model": {"even": value}}, keys="model.even")
            assert not local_of(value).any()


def test_tied(repository):
    """Tied sharded tensors are stored once, and stay tied."""
    whole = WHOLE["even"]

    def make():
        value = placed(whole, "fsdp 4")
        return {"a": {"w": value}, "b": {"w": value}}

    ref = rank_saves.save(repository, [make] * 4, 1)[0].ref
    state = repository.restore(ref)
    assert torch.equal(state["a"]["w"], whole)
    assert state["a"]["w"].data_ptr() == state["b"]["w"].data_ptr()
    with as_rank(1, 3):
        into = {"a": {"w": spoilt(placed(whole, "fsdp 3"))}, "b": {"w": spoilt(placed(whole, "fsdp 3"))}}
        read_into(repository.context, ref, into)
        for part in into.values():
            assert torch.equal(local_of(part["w"]), expected(part["w"], whole))


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("in_parts", [False, True])
def test_one_memory_in_several_tensors(repository, in_parts, first):
    """A rank's rows may be a whole tensor, its share of a longer one and of a wider one: all are restored as they were.

    Each of them is in the state twice, and stays tied to itself.
    """

    def make(rank):
        x, mesh = torch.arange(4.0).reshape(2, 2) + 10 * rank, init_device_mesh("cpu", (2,))
        of = {"rows": Shard(0), "columns": Shard(1), "copy": Replicate()}
        made = {name: DTensor.from_local(x, mesh, [p], run_check=False) for name, p in of.items()} | {"plain": x}
        names = [*made][first:] + [*made][:first]
        found = {name: made[name] for name in names} | {f"{name} again": made[name] for name in reversed(names)}
        return {name: {"w": value} for name, value in found.items()} if in_parts else {"m": found}

    makes = [lambda rank=rank: make(rank) for rank in (0, 1)]
    ref = rank_saves.save(repository, makes, 1, replicas="rank0")[0].ref
    state = repository.restore(ref)
    found = {name: part["w"] for name, part in state.items()} if in_parts else state["m"]
    x, y = (torch.arange(4.0).reshape(2, 2) + 10 * rank for rank in (0, 1))
    expected = {"plain": x, "copy": x, "rows": torch.cat([x, y]), "columns": torch.cat([x, y], 1)}
    for name, whole in expected.items():
        assert torch.equal(found[name], whole), name
        assert found[f"{name} again"].data_ptr() == found[name].data_ptr(), name
    assert len({value.data_ptr() for value in found.values()}) == 4


def test_boxes_of_which_the_first_share_memory(repository):
    """Tensors with several local tensors are tied only if they share all of them."""
    boxes = ((0, 0), (2, 3)), ((2, 0), (2, 3))
    first, second, other = (torch.full((2, 3), float(i)) for i in range(3))

    def make():
        tensors = {"a": [first, second], "b": [first, other], "c": [first, second]}
        return {"m": {name: Shards((4, 3), boxes, of) for name, of in tensors.items()}}

    state = repository.restore(rank_saves.save(repository, [make], 1)[0].ref)["m"]
    assert [value[::2, 0].tolist() for value in state.values()] == [[0, 1], [0, 2], [0, 1]]
    assert state["a"].data_ptr() == state["c"].data_ptr()


class Counted:
    """Counts what a restore decodes: the plain bytes of the chunks that it rebuilds."""

    def __init__(self, monkeypatch):
        self.nbytes = 0
        real = reader.ChunkReader.rebuild

        def rebuild(own, wanted):
            return real(own, map(self._count, wanted))

        monkeypatch.setattr(reader.ChunkReader, "rebuild", rebuild)

    def _count(self, one):
        self.nbytes += int(one.table.lengths[one.rows].astype(np.int64).sum())
        return one


CHANGES = [
    ("fsdp 4", "fsdp 4"), ("fsdp 4", "fsdp 1"), ("fsdp 4", "fsdp 3"), ("fsdp 4", "tp 3"), ("tp 3", "fsdp 4"),
    ("fsdp 4", "hsdp"), ("fsdp x columns", "fsdp 4"), ("fsdp 4", "fsdp x columns"), ("tp 3", "tp 2"),
    ("fsdp 4", "fsdp 2"),
]  # fmt: skip
SHARDINGS["tp 2"] = ((2,), [Shard(-1)])
SHARDINGS["fsdp 2"] = ((2,), [Shard(0)])


def layers():
    """Return a model of whose tensors all are stored in chunks."""
    return {f"{i}.{name}": torch.randn(shape, generator=GENERATOR) for i in range(3) for name, shape in (
        ("attention", (240, 96)), ("up", (384, 96)), ("down", (96, 384)), ("norm", (4800,)))}  # fmt: skip


def predicted(wholes, saved, name):
    """Return (bytes decoded, bytes wanted) on all ranks, computed from the boxes and the grid of chunks alone."""
    decoded = wanted = 0
    for key, whole in wholes.items():
        stored = [box for one in shardings(whole, saved) if one.replica == 0 for box in one.boxes]
        for box in [box for one in shardings(whole, name) for box in one.boxes]:
            wanted += math.prod(box[1]) * whole.itemsize
            for offsets, sizes in stored:
                if boxes.overlap((offsets, sizes), box) is None:
                    continue
                lengths = boxes.cut(boxes.strip_start(offsets, sizes, whole.itemsize), math.prod(sizes) * 4, 1024)
                places = np.indices(sizes).reshape(len(sizes), -1).T + offsets
                inside = ((places >= box[0]) & (places < np.add(*box))).all(axis=1).repeat(4)
                ends = np.cumsum(lengths)
                decoded += sum(int(n) for n, end in zip(lengths, ends, strict=True) if inside[end - n : end].any())
        assert wanted, key
    return decoded, wanted


def shardings(whole, name):
    world = math.prod(SHARDINGS[name][0])
    found = []
    for rank in range(world):
        with as_rank(rank, world):
            found.append(sharding_of(placed(whole, name)))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("saved", "name"), CHANGES)
def test_only_overlapping_chunks_are_decoded(monkeypatch, saved, name):
    """All ranks together decode as many bytes as the boxes alone predict."""
    wholes = layers()
    world, others = math.prod(SHARDINGS[name][0]), math.prod(SHARDINGS[saved][0])

    def state(of):
        return {"model": {key: placed(whole, of) for key, whole in wholes.items()}}

    with Repository.create(MemoryStore(), chunk_bytes=1024) as repository:
        ref = rank_saves.save(repository, [lambda: state(saved)] * others, 1)[0].ref
        counted = Counted(monkeypatch)
        for rank in range(world):
            with as_rank(rank, world):
                into = state(name)
                for value in into["model"].values():
                    spoilt(value)
                read_into(repository.context, ref, into, as_rank=AsRank("same", rank, world))
                for key, value in into["model"].items():
                    assert torch.equal(local_of(value), expected(value, wholes[key])), key
    decoded, wanted = predicted(wholes, saved, name)
    print(f"{saved} -> {name}: decoded / wanted {counted.nbytes / wanted:.3f}, predicted {decoded / wanted:.3f}")
    assert abs(counted.nbytes - decoded) <= 0.02 * decoded
    if saved == name:
        assert counted.nbytes == wanted


def test_one_childs_manifest_is_enough(monkeypatch, repository):
    """A rank that restores into the sharding of the save reads its own child's manifest, and no other."""
    ref = rank_saves.save(repository, [lambda: {"w": {"w": placed(WHOLE["even"], "fsdp 4")}}] * 4, 1)[0].ref
    ranks = []
    real = manifest.read
    monkeypatch.setattr(manifest, "read", lambda store, ref, seed: ranks.append(ref.rank) or real(store, ref, seed))
    with as_rank(2, 4):
        into = {"w": {"w": spoilt(placed(WHOLE["even"], "fsdp 4"))}}
        read_into(repository.context, ref, into, as_rank=AsRank("same", 2, 4))
        assert torch.equal(local_of(into["w"]["w"]), WHOLE["even"][12:18])
    assert sorted(ranks) == [0, 0, 2]


# --- values of each rank's own


def own_state(rank):
    return {
        "loader": PerRank({"position": 100 + rank, "order": torch.arange(2000) + rank, "small": np.full(3, rank)}),
        "rng": RngState(),
        "shared": {"epoch": 5, "w": torch.ones(300)},
        "nested": {"epoch": 6, "of_rank": PerRank([rank] * 3)},
    }


@pytest.fixture
def own(repository):
    torch.manual_seed(0)
    generators = []

    def make(rank):
        torch.manual_seed(rank)
        random.seed(rank)
        generators.append((torch.get_rng_state(), random.getstate()))
        return own_state(rank)

    snapshot = rank_saves.save(repository, [lambda r=rank: make(r) for rank in range(3)], 1)[0]
    return repository.context, snapshot.ref, generators


def check_own(loader, rank):
    assert loader["position"] == 100 + rank
    assert torch.equal(loader["order"], torch.arange(2000) + rank)
    assert loader["small"].tolist() == [rank] * 3


def test_own_values_of_the_same_rank(own):
    """With as many ranks each gets its own values, also into objects; every rank gets the plain values."""
    context, ref, generators = own
    for rank in (2, 0, 1):
        state = read(context, ref, as_rank=AsRank("same", rank, 3))[1]
        check_own(state["loader"], rank)
        assert (state["shared"]["epoch"], state["nested"]) == (5, {"epoch": 6, "of_rank": [rank] * 3})
        into = own_state(9)
        read_into(context, ref, into, as_rank=AsRank("same", rank, 3))
        check_own(into["loader"].value, rank)
        assert into["nested"]["of_rank"].value == [rank] * 3
        assert torch.equal(torch.get_rng_state(), generators[rank][0])
        assert random.getstate() == generators[rank][1]


OTHERS = [(0, 1), (1, 4), (0, 2)]  # rank and number of the ranks that restore; 3 have saved


@pytest.mark.parametrize("place", OTHERS)
def test_own_values_of_other_ranks(own, place):
    """per_rank="same": with another number of ranks the error says how many saved and what to do; nothing changes."""
    context, ref, _ = own
    as_other = AsRank("same", *place)
    message = (
        rf"loader, rng, nested\.of_rank: .*: 3 ranks saved, and {as_other.world_size} restore.*per_rank=<rank> \(0"
    )
    into = own_state(9)
    for target in (None, into):
        with pytest.raises(InvalidInputError, match=message):
            read(context, ref, into=target, as_rank=as_other)
    check_own(into["loader"].value, 9)
    assert read(context, ref, keys="shared", as_rank=as_other)[1]["shared"]["epoch"] == 5
    with pytest.raises(InvalidInputError, match=r"^loader: each rank's own"):
        read(context, ref, keys=["shared", "loader"], as_rank=as_other)


@pytest.mark.parametrize("place", OTHERS)
def test_own_values_of_all_ranks(own, place):
    """Without an option another number of ranks gets the values of all, by rank; each is what its rank saved."""
    context, ref, generators = own
    as_other = AsRank(None, *place)
    state = read(context, ref, as_rank=as_other)[1]
    assert list(state) == ["loader", "rng", "shared", "nested"]
    for values in (state["loader"], state["rng"], state["nested"]["of_rank"]):
        assert isinstance(values, RankValues)
        assert isinstance(values, PerRank)
        assert (list(values), len(values), 3 in values) == ([0, 1, 2], 3, False)
        assert values.value == dict(values) if values is state["nested"]["of_rank"] else list(values.value) == [0, 1, 2]
    for rank in range(3):
        check_own(state["loader"][rank], rank)
        assert state["nested"]["of_rank"][rank] == [rank] * 3
        RngState().load_state_dict(state["rng"][rank])
        assert torch.equal(torch.get_rng_state(), generators[rank][0])
        assert random.getstate() == generators[rank][1]
    assert (state["shared"]["epoch"], state["nested"]["epoch"]) == (5, 6)
    assert repr(state["nested"]["of_rank"]) == "RankValues({0: [0, 0, 0], 1: [1, 1, 1], 2: [2, 2, 2]})"
    one = read(context, ref, keys=["loader.1.position", "rng.2"], as_rank=as_other)[1]
    assert one["loader"] == {1: {"position": 101}}
    assert torch.equal(one["rng"][2]["torch"], generators[2][0])
    of_part = read(context, ref, keys=Fit(part="nested"), as_rank=as_other)[1]
    assert of_part["of_rank"][2] == [2] * 3


def test_values_of_all_ranks_are_saved_again(own, repository):
    """A process that saves what it has restored stores them as a dict by rank, and restores that."""
    context, ref, _ = own
    state = read(context, ref)[1]
    repository.save(state, run="again", step=1)
    again = repository.restore("again@1")
    assert type(again["loader"]) is dict
    check_own(again["loader"][2], 2)
    into = {**state, "loader": RankValues({})}
    repository.restore_into("again@1", into)
    check_own(into["loader"][1], 1)


def test_only_children_with_wanted_values_are_read(own, monkeypatch):
    """Without an option a restore of shared values reads no more manifests than with per_rank="drop"."""
    context, ref, _ = own
    read_keys = []
    get = type(context.store).get
    monkeypatch.setattr(
        type(context.store), "get", lambda self, key, **how: read_keys.append(key) or get(self, key, **how)
    )
    for keys in ("shared", ["shared", "nested"], None):
        counts = []
        for per_rank in ("drop", None):
            read_keys.clear()
            read(context, ref, keys=keys, as_rank=AsRank(per_rank))
            counts.append(sum(key.startswith("manifests/") for key in read_keys))
        assert (counts[0] == counts[1]) == (keys == "shared"), (keys, counts)


@pytest.mark.parametrize("place", OTHERS)
def test_generators_stay_if_another_number_of_ranks_restores(own, place, caplog):
    """A target keeps them, with one warning on rank 0; other values of each rank's own are still to be chosen."""
    context, ref, _ = own
    as_other = AsRank(None, *place)
    into = own_state(9)
    with pytest.raises(
        InvalidInputError, match=r"^loader, nested\.of_rank: each rank's own .*per_rank=<rank> \(0 to 2"
    ):
        read_into(context, ref, into, as_rank=as_other)
    check_own(into["loader"].value, 9)
    assert not caplog.records
    torch.manual_seed(123)
    random.seed(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    into = {"shared": {"epoch": 0, "w": torch.zeros(300)}, "rng": RngState()}
    read_into(context, ref, into, keys=["shared", "rng"], as_rank=as_other)
    assert (into["shared"]["epoch"], into["shared"]["w"].sum()) == (5, 300)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])
    texts = [record.getMessage() for record in caplog.records]
    ranks = "1 rank" if place[1] == 1 else f"{place[1]} ranks"
    wanted = f"{ref}: rng: the random generators stay as they are, as 3 ranks saved and {ranks} restored; seed them"
    assert texts == ([f"{wanted}, or pass per_rank=<rank> for those of a rank"] if place[0] == 0 else [])


@pytest.mark.parametrize("count", [1, 3])
def test_generators_of_one_process_on_several_ranks(repository, count, caplog):
    """Ranks that all took the generators of one process would draw the same numbers; so they keep theirs."""
    torch.manual_seed(1)
    saved = torch.get_rng_state()
    repository.save({"epoch": 5, "rng": RngState()}, run="one", step=1)
    for rank in range(count):
        torch.manual_seed(100 + rank)
        before = torch.get_rng_state()
        into = {"epoch": 0, "rng": RngState()}
        read_into(repository.context, "one@1", into, as_rank=AsRank(None, rank, count))
        assert into["epoch"] == 5
        assert torch.equal(torch.get_rng_state(), saved if count == 1 else before)
        read_into(repository.context, "one@1", into, as_rank=AsRank(0, rank, count))
        assert torch.equal(torch.get_rng_state(), saved)
    texts = [record.getMessage() for record in caplog.records]
    wanted = "one@1: rng: the random generators stay as they are, as 1 rank saved and 3 ranks restored; seed them"
    assert texts == ([wanted] if count == 3 else [])


def test_own_values_that_only_some_ranks_have(repository):
    """A rank that has saved none gets an error that says so; `keys` restore the rest, and the others get their own."""

    def make(rank):
        return {"epoch": 5} | ({} if rank == 1 else {"loader": PerRank({"position": 100 + rank})})

    context = repository.context
    ref = rank_saves.save(repository, [lambda r=rank: make(r) for rank in range(3)], 1)[0].ref
    for one in (AsRank("same", 1, 3), AsRank(1, 0, 4)):
        with pytest.raises(InvalidInputError, match=r"^loader: .*rank 1 saved none here, other ranks did; .*keys="):
            read(context, ref, into={"epoch": 0}, as_rank=one)
        assert read(context, ref, keys="epoch", as_rank=one)[1] == {"epoch": 5}
    assert read(context, ref, as_rank=AsRank("same", 2, 3))[1] == {"epoch": 5, "loader": {"position": 102}}
    found = read(context, ref)[1]["loader"]
    assert dict(found) == {0: {"position": 100}, 2: {"position": 102}}


def test_own_values_of_a_chosen_rank(own):
    """per_rank=<rank> gives that rank's values to any reader; an unknown rank is an error."""
    context, ref, _ = own
    for one in (AsRank(2), AsRank(2, 0, 3)):
        check_own(read(context, ref, as_rank=one)[1]["loader"], 2)
    with pytest.raises(
        InvalidInputError, match="per_rank 3: 3 ranks saved this snapshot; pass a rank from 0 to 2, or 'drop'"
    ):
        read(context, ref, as_rank=AsRank(3))
    for wrong in (-1, "all", 1.0, True):
        with pytest.raises(InvalidInputError, match="expected 'same', 'drop' or the number of a rank"):
            AsRank(wrong)


def test_a_repository_takes_the_rank_that_the_error_advises(own):
    """Repository.restore and restore_into have the argument that their error names."""
    context, ref, _ = own
    with Repository.open(context.store) as repository:
        into = own_state(9)
        for call, without in (
            (lambda **which: repository.restore(ref, **which), {"per_rank": "same"}),
            (lambda **which: repository.restore_into(ref, into, **which), {}),
        ):
            with pytest.raises(InvalidInputError, match=r"pass per_rank=<rank> \(0 to 2.*'drop'"):
                call(**without)
            with pytest.raises(InvalidInputError, match="expected 'same', 'drop' or the number of a rank"):
                call(per_rank="all")
        check_own(into["loader"].value, 9)
        check_own(repository.restore(ref, keys="loader", per_rank=2)["loader"], 2)
        assert "loader" not in repository.restore(ref, per_rank="drop")
        repository.restore_into(ref, into, per_rank="drop")
        check_own(into["loader"].value, 9)
        assert repository.restore_into(ref, into, per_rank=1).ref == ref
        check_own(into["loader"].value, 1)


def test_own_values_dropped(own):
    """With per_rank="drop" a new state lacks them, and a target keeps its own."""
    context, ref, _ = own
    state = read(context, ref, as_rank=AsRank("drop"))[1]
    assert (list(state), state["nested"]) == (["shared", "nested"], {"epoch": 6})
    into = own_state(9)
    into["shared"]["epoch"] = into["nested"]["epoch"] = 0
    torch.manual_seed(123)
    before = torch.get_rng_state()
    read_into(context, ref, into, as_rank=AsRank("drop"))
    check_own(into["loader"].value, 9)
    assert (into["nested"]["epoch"], into["nested"]["of_rank"].value, into["shared"]["epoch"]) == (6, [9] * 3, 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_own_values_that_dcp_drops(own, caplog):
    """The log of a load through DCP says which values it leaves out, and why."""
    from snapstore.dcp import SnapstoreReader

    context, ref, _ = own
    run, _, step = ref.partition("@")
    reader = SnapstoreReader(Repository.open(context.store), run=run, per_rank="drop")
    reader.reset(step)
    assert "shared.epoch" in reader.read_metadata().state_dict_metadata
    assert "keys: each rank's own (PerRank, RngState), as per_rank='drop' asks" in caplog.text


def test_own_values_one_by_one(own):
    """named_tensors leaves them out unless a rank is chosen; a key that selects only them is an error."""
    context, ref, _ = own
    assert [name for name, _ in TensorReader(context, ref)] == ["shared.w"]
    named = dict(TensorReader(context, ref, as_rank=AsRank(1)))
    assert torch.equal(named["loader.order"], torch.arange(2000) + 1)
    with pytest.raises(NotFoundError):
        TensorReader(context, ref, keys="loader.order")


# --- an optimizer without state


@pytest.mark.parametrize(("kind", "dtype"), [(torch.optim.AdamW, torch.float32), (torch.optim.NAdam, torch.float64)])
def test_a_fresh_optimizer(repository, kind, dtype):
    """Restored before its first step, the optimizer gets state in the sharding of its parameters, and can continue.

    torch casts a float32 number of NAdam; the restore puts the stored one back. State of other rows is refused.
    """

    def trained(rank, world, rows=7):
        model = torch.nn.Linear(5, rows)
        for name, parameter in list(model.named_parameters()):
            whole = torch.arange(parameter.numel(), dtype=dtype).reshape(parameter.shape) / 10
            setattr(model, name, torch.nn.Parameter(distribute_tensor(
                whole, init_device_mesh("cpu", (world,)), [Shard(0)], src_data_rank=None)))  # fmt: skip
        return model, kind(model.parameters(), lr=0.1)

    def stepped(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    def make(rank):
        model, optimizer = trained(rank, 3)
        stepped(optimizer)
        return {"model": model, "optimizer": optimizer}

    ref = rank_saves.save(repository, [lambda r=rank: make(r) for rank in range(3)], 1)[0].ref
    with as_rank(1, 2):
        model, optimizer = trained(1, 2)
        read_into(repository.context, ref, {"model": model, "optimizer": optimizer})
        other, reference = trained(1, 2)
        stepped(reference)
        for one in (optimizer, reference):
            stepped(one)
        for got, wanted in itertools.zip_longest(model.parameters(), other.parameters()):
            assert torch.equal(local_of(got), local_of(wanted))
            state, expected_state = optimizer.state[got], reference.state[wanted]
            assert torch.equal(local_of(state["exp_avg_sq"]), local_of(expected_state["exp_avg_sq"]))
            assert (state["step"].item(), state["exp_avg"].placements) == (2, got.placements)
            dtypes = [{name: value.dtype for name, value in one.items()} for one in (state, expected_state)]
            assert dtypes[0] == dtypes[1]
        with pytest.raises(InvalidInputError, match=r"expected \(9, 5\) as parameter 0 of group 0 has"):
            read_into(repository.context, ref, {"optimizer": trained(1, 2, rows=9)[1]}, keys="optimizer")


# --- boxes that do not cover their tensor


def hole(shape, rank, world):
    """Cut rows, without the last one."""
    return rows((shape[0] - 1, *shape[1:]), rank, world)


def doubled(shape, rank, world):
    """Cut rows; rank 1 also has the first row of rank 0."""
    found = rows(shape, rank, world)
    return [*found, ((0, 0), (1, shape[1]))] if rank == 1 else found


def moved(shape, rank, world):
    """Cut rows; rank 1's are one too early, so a row is there twice and one is missing."""
    return [((o - (rank == 1), *rest), sizes) for (o, *rest), sizes in rows(shape, rank, world)]


ARRAY = np.arange(40 * 30, dtype=np.float32).reshape(40, 30)
STATE = {"": {}, "model": {"w": ARRAY}}


@pytest.mark.parametrize("cut", [rows, strided])
def test_arrays(cut):
    """Arrays of NumPy are restored from boxes."""
    with Repository.create(MemoryStore(), chunk_bytes=CHUNK) as repository:
        snapshot = RankWriter(repository.store).save(STATE, world=3, cut=cut)
        target = np.zeros_like(ARRAY)
        assert (repository.restore(snapshot.ref)["model"]["w"] == ARRAY).all()
        repository.restore_into(snapshot.ref, {"model": {"w": target}})
        assert (target == ARRAY).all()


@pytest.mark.parametrize(
    ("cut", "problem"),
    [(hole, "30 of its elements are missing"), (doubled, "its boxes overlap"), (moved, "its boxes overlap")],
)
def test_boxes_that_do_not_cover(cut, problem):
    """A hole or an overlap is an error: no restore returns memory that it has not filled."""
    with Repository.create(MemoryStore(), chunk_bytes=CHUNK) as repository:
        snapshot = RankWriter(repository.store).save(STATE, world=2, cut=cut)
        for restored in (repository.restore, repository.named_tensors):
            with pytest.raises(FormatError, match=f"part 'model': model.w: {problem}"):
                restored(snapshot.ref)


def test_a_missing_child():
    """A missing child is damage, and the error names its manifest."""
    with Repository.create(MemoryStore(), chunk_bytes=CHUNK) as repository:
        snapshot = RankWriter(repository.store).save(STATE, world=2)
        root = manifest.read(repository.store, snapshot.manifests[1], None)
        key = root.header.children[1].key
        repository.store.delete([key])
        with pytest.raises(snapstore.IntegrityError, match=f"{key}: manifest is missing"):
            repository.restore(snapshot.ref)
