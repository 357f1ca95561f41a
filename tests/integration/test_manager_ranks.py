"""SnapshotManager on several ranks keeps its promises: one snapshot, one error, one answer, at the same call on all."""

from __future__ import annotations

import math
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from kit.faults import FaultStore
from kit.local_ranks import LocalRanks
from kit.objects import keys_of
from kit.ranks import Managers as ManagersOfRanks
from kit.ranks import together
from kit.repositories import OPTIONS, created, opened, same, snapshot_of
from snapstore import (
    CapabilityError,
    IntegrityError,
    InvalidInputError,
    KeepBest,
    KeepLast,
    NotFoundError,
    PerRank,
    RanksError,
    Repository,
    SnapshotManager,
    SnapstoreError,
    StorageError,
)
from snapstore.storage.memory import MemoryStore

COUNT = 3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def state(version: int, rank: int = 0):
    """Return a state with replicated tensors, plain values and a value of each rank's own."""
    weights = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    weights[::50] += version
    return {
        "model": {"w": torch.from_numpy(weights), "b": torch.arange(3) + version},
        "own": PerRank({"rank": rank, "seen": torch.full((2000,), float(version + rank))}),
        "step": version,
    }


class Managers(ManagersOfRanks):
    """One manager on each rank; each saves a `state`."""

    def save(self, step, version=None, **options):
        version = step if version is None else version
        return self.all(lambda m, rank: m.save(step, state(version, rank), **options))


@pytest.fixture
def store():
    return created()


def test_one_snapshot_of_all_ranks(store):
    managers = Managers(store)
    for step in range(4):
        assert not any(isinstance(found, Exception) for found in managers.save(step))
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        snapshots = repository.snapshots("a")
        assert [s.step for s in snapshots] == [0, 1, 2, 3]
        assert snapshots[-1].features == ["ranks"]
        assert snapshots[-1].depth > 0
        assert repository.check("restore").ok
        assert repository.gc().deleted_objects == 0
        assert same(repository.restore("a@3", keys="model.*"), {"model": state(3)["model"]})


@pytest.mark.parametrize("changed", ["nothing", "metrics", "one rank's own", "a replica"])
def test_saves_of_a_state_that_hardly_changes(store, changed):
    """A save references a rank's unchanged manifest again, also rank 0's; each step restores as it was saved."""

    def held(step, rank):
        found = state(step if changed == "a replica" else 0, rank)
        found["own"] = PerRank({"at": step if changed == "one rank's own" and rank == 1 else 0})
        return found | {"step": 0}

    managers = Managers(store, async_save=False)
    for step in range(3):
        metrics = {"loss": float(step)} if changed == "metrics" else None
        managers.each(lambda m, rank, step=step, metrics=metrics: m.save(step, held(step, rank), metrics=metrics))
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert repository.check("restore").ok
        assert [snapshot.step for snapshot in repository.snapshots("a")] == [0, 1, 2]
        for step in range(3):
            assert same(repository.restore(f"a@{step}", keys="model"), {"model": held(step, 0)["model"]})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_rank_gets_its_own_back(store, count):
    """With as many ranks each gets its own values; with fewer, those of a chosen rank or of all, or a choice is due."""
    managers = Managers(store)
    managers.save(7)
    managers.end()
    others = Managers(store, count)

    def restored(manager, rank):
        target = state(99, 50)
        return manager.restore_into(target, per_rank="same" if count == COUNT else 2).step, target

    for rank, found in enumerate(others.all(restored)):
        assert not isinstance(found, Exception), found
        step, target = found
        assert step == 7
        assert same(target["model"], state(7)["model"])
        assert target["own"].value["rank"] == (rank if count == COUNT else 2)
    if count < COUNT:
        for error in others.all(lambda m, _: m.restore_into(state(99, 50))) + others.all(
            lambda m, _: m.restore(per_rank="same")
        ):
            assert isinstance(error, InvalidInputError)
            assert "per_rank=" in str(error)
        for found in others.all(lambda m, _: m.restore()):
            assert [found["own"][rank]["rank"] for rank in range(COUNT)] == list(range(COUNT))
        for found in others.all(lambda m, _: m.restore(per_rank="drop")):
            assert same(found["model"], state(7)["model"])
    others.end()


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("rank", range(COUNT))
def test_an_error_on_one_rank_is_raised_at_the_same_call_on_all(store, rank, async_save):
    managers = Managers(store, async_save=async_save)

    def save(manager, own):
        found = state(0, own)
        if own == rank:
            found["model"]["w"] = object()
        return manager.save(0, found)

    found = managers.all(save)
    if async_save:
        assert not any(isinstance(handle, Exception) for handle in found), found
        found = managers.save(1)
    for own, error in enumerate(found):
        assert isinstance(error, InvalidInputError), error
        assert "model.w" in str(error)
        assert (f"rank {rank}: " in str(error)) == (own != rank)
    assert not any(isinstance(handle, Exception) for handle in managers.save(2))
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [2]


@pytest.mark.parametrize("rank", range(COUNT))
@pytest.mark.parametrize("call", ["save", "wait_until_finished", "close"])
def test_a_failure_in_the_background_is_raised_on_all_ranks(store, rank, call):
    stores = [FaultStore(store) for _ in range(COUNT)]
    managers = Managers(store, stores=stores)
    managers.save(0)
    managers.all(lambda m, _: m.wait_until_finished())
    stores[rank].at, stores[rank].mode = len(stores[rank].log), "outage"
    managers.save(1)
    time.sleep(0.2)
    found = managers.save(2) if call == "save" else managers.all(lambda m, _: getattr(m, call)())
    for own, error in enumerate(found):
        assert isinstance(error, StorageError), error
        assert "injected" in str(error)
        assert (f"rank {rank}: " in str(error)) == (own != rank)
    stores[rank].heal()
    if call != "close":
        assert not any(isinstance(handle, Exception) for handle in managers.save(3))
        assert managers.end() == [None] * COUNT


def test_unlike_states_and_arguments_are_errors(store):
    managers = Managers(store, async_save=False)

    def unlike_value(manager, rank):
        return manager.save(0, state(0, rank) | {"step": rank})

    def unlike_metric(manager, rank):
        return manager.save(0, state(0, rank), metrics={"loss": float(rank == 1)})

    def unlike_form(manager, rank):
        form = {
            "shape": torch.ones(3 + (rank == 1)),
            "dtype": torch.ones(3, dtype=(torch.float64, torch.int8)[rank // 2]),
        }
        return manager.save(0, state(0, rank) | form)

    def unlike_part(manager, rank):
        return manager.save(0, state(0, rank) | {"part": 5 if rank else {"a": 5}})

    forms = (
        "\nshape: tensor float32[3] on rank 0, tensor float32[4] on rank 1",
        "\ndtype: tensor float64[3] on rank 0, tensor float64[3] on rank 1, tensor int8[3] on rank 2",
    )
    for call, *all_said in (
        (unlike_value, "step"),
        (unlike_metric, "rank 1: metrics differ from rank 0's"),
        (unlike_form, *forms),
        (unlike_part, "\npart: a container or an object on rank 0, 5 on ranks 1, 2"),
    ):
        for error in managers.all(call):
            assert isinstance(error, InvalidInputError), error
            assert all(said in str(error) for said in all_said), error
            assert "replicas" not in str(error)
    managers.end()


def test_metrics_that_are_equal_as_numbers_are_equal(store):
    """The hardware decides which sign a NaN has."""
    managers = Managers(store)
    for step, values in enumerate([[math.nan, math.copysign(math.nan, -1), np.float32("nan")], [0.0, -0.0, 0]]):
        managers.each(lambda m, rank, s=step, v=values: m.save(s, state(s, rank), metrics={"loss": v[rank]}))
    assert managers.end() == [None] * COUNT


@pytest.mark.parametrize("moved", [0, -1])
def test_shards_that_the_program_has_placed_wrongly_are_refused(store, moved):
    """The shards have as many rows as the tensor, but two ranks hold one row, and no rank holds another."""
    managers = Managers(store, async_save=False)

    def save(manager, rank):
        place = (4 * rank + moved * (rank == 1), 0)
        shard = SimpleNamespace(
            key="w", data=torch.ones(4, 3), global_shape=(4 * COUNT, 3), global_offset=place, replica_id=0
        )
        return manager.save(1, {"model": {"w": shard}})

    found = managers.all(save)
    managers.end()
    with opened(store) as repository:
        assert len(repository.snapshots("a")) == (not moved)
        assert all("model.w: the shards of the ranks overlap" in str(error) for error in found if moved)


class Grid:
    """A tensor of (rows, 300) of which this rank holds some shards of any sizes, with the methods that DCP calls."""

    def __init__(self, whole, boxes):
        self.whole, self.boxes, self.dtype = whole, boxes, whole.dtype
        self.shards = [whole[r : r + m, c : c + n].clone() for r, c, m, n in boxes]

    def size(self):
        return self.whole.size()

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size([r, c]), torch.Size([m, n])) for r, c, m, n in self.boxes]

    def __get_tensor_shard__(self, index):
        return self.shards[index.index]


def grid(whole, rank, count):
    """Return shards of unlike sizes: pieces of three strips of columns, dealt to the ranks; rank 1 of 3 has none."""
    cuts = [(r, c, m, n) for c, n, step in ((0, 7, 50), (7, 200, 90), (207, 93, 400)) for r in range(0, 400, step)
            for m in [min(step, 400 - r)]]  # fmt: skip
    owners = (0, 2) if count == 3 else range(count)
    return Grid(whole, [box for i, box in enumerate(cuts) if owners[i % len(owners)] == rank])


@pytest.mark.parametrize("async_save", [True, False])
def test_several_shards_of_a_tensor_on_a_rank(store, async_save):
    """They are stored once; one process and other shards on fewer ranks restore them; the next save is a delta."""
    wholes = [torch.arange(400 * 300.0).reshape(400, 300)]
    wholes.append(wholes[0].clone())
    wholes[1][399, 299] = -1
    managers = Managers(store, async_save=async_save)
    for step, whole in enumerate(wholes):
        managers.all(lambda m, rank, step=step, whole=whole: m.save(step, {"model": {"w": grid(whole, rank, COUNT)}}))
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        for step, whole in enumerate(wholes):
            assert same(repository.restore(f"a@{step}"), {"model": {"w": whole}})
        assert repository.snapshots("a")[-1].new_chunks == 1
        assert repository.check("restore").ok
    for count in (2, 3):
        managers = Managers(store, count)

        def restored(manager, rank, count=count):
            target = grid(torch.zeros(400, 300), count - 1 - rank, count)
            into = {"model": {"w": target}}
            manager.restore_into(into, 1)
            assert into["model"]["w"] is target
            assert all(
                same(got, cut) for got, cut in zip(target.shards, Grid(wholes[1], target.boxes).shards, strict=True)
            )
            return len(target.shards)

        assert managers.all(restored) == [7, 7] if count == 2 else [7, 0, 7]
        managers.end()


def test_shards_of_a_rank_that_overlap_are_refused(store):
    whole = torch.arange(400 * 300.0).reshape(400, 300)
    managers = Managers(store, async_save=False)
    boxes = [(0, 0, 100, 300), (100, 0, 100, 300)], [(199, 0, 100, 300), (299, 0, 1, 300)], [(300, 0, 100, 300)]
    for error in managers.all(lambda m, rank: m.save(1, {"model": {"w": Grid(whole, boxes[rank])}})):
        assert isinstance(error, SnapstoreError), error
    managers.end()


def test_ranks_may_have_their_keys_in_another_order(store):
    managers = Managers(store, async_save=False)

    def save(manager, rank):
        model = {"w": torch.arange(5000.0), "b": torch.ones(3), "c": torch.zeros(900)}
        return manager.save(1, {"model": dict(list(model.items())[:: -1 if rank else 1])})

    managers.each(save)
    managers.end()
    with opened(store) as repository:
        restored = repository.restore("a@1")["model"]
        assert torch.equal(restored["w"], torch.arange(5000.0))
        assert (restored["b"].tolist(), restored["c"].sum()) == ([1] * 3, 0)


@pytest.mark.parametrize("rank", range(COUNT))
def test_many_plain_values_beside_a_tensor_that_one_rank_has(store, rank):
    """On the other ranks these values lie in columns."""
    managers = Managers(store)
    plain = {"losses": list(range(500)), "few": [1, 2], "names": {f"n{i}": i for i in range(500)}}

    def held(own, last):
        tensors = {"w": torch.arange(5)} if own else {}
        return {"extra": plain | {"losses": [*plain["losses"], last], "below": [plain | tensors, last]} | tensors}

    for step in range(2):
        managers.all(lambda m, r, step=step: m.save(step, held(r == rank, step)))
    assert all(same(found, held(True, 1)) for found in managers.all(lambda m, _: m.restore()))
    for error in managers.all(lambda m, r: m.save(2, held(r == rank, r)).result()):
        assert isinstance(error, InvalidInputError)
        assert all(place in str(error) for place in ("extra.losses: [0, 1, 2", "extra.below.1: 0 on rank 0"))
    managers.end()


def test_replicas_that_are_swapped_are_named(store):
    """If a rank makes its modules in another order, a broadcast by position swaps their values."""
    managers = Managers(store, async_save=False)

    def save(manager, rank):
        names = ["query", "value"][:: -1 if rank else 1]
        return manager.save(1, {"model": dict(zip(names, (torch.zeros(5000), torch.ones(5000)), strict=True))})

    assert all("model.query, model.value: differ from" in str(found) for found in managers.all(save))
    managers.end()
    with opened(store) as repository:
        assert repository.snapshots("a") == []


def test_a_rank_that_could_not_hash_one_part_agrees_with_the_others(store):
    """Its device had no memory for that part: the rank must not compare the digests of fewer parts with the others'."""
    managers = Managers(store, async_save=False)
    staging = managers[1]._staging
    saving = staging.saving

    def without_model(inputs):
        for one in [one for part in inputs if part.name == "model" for one in part.replicas]:
            one.array = one.digests = None
        return saving(inputs)

    staging.saving = without_model
    managers.each(lambda m, rank: m.save(0, state(0, rank) | {"other": {"v": torch.ones(2000)}}))
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert same(repository.restore("a@0", keys="model"), {"model": state(0)["model"]})


def test_replicas_that_differ_are_named(store):
    """After silent corruption or a forgotten broadcast the error names the tensor and the rank."""
    for async_save in (False, True):
        managers = Managers(store, async_save=async_save)

        def diverged(manager, rank):
            found = state(0, rank)
            found["model"]["w"][17] += rank == 2
            return manager.save(0, found)

        found = managers.all(diverged)
        for error in managers.all(lambda m, _: m.wait_until_finished()) if async_save else found:
            assert isinstance(error, InvalidInputError), error
            assert "rank 2: model.w: differ from the replicas on ranks 0, 1" in str(error)
            assert "name that dimension of the mesh 'pp'" in str(error)
            assert "model.b" not in str(error)
        managers.end()


def test_the_first_save_waits_for_no_other_rank(store):
    """The state may change at once: each rank has copied everything that it may have to store."""
    managers, states = Managers(store, COUNT), [state(0, rank) for rank in range(COUNT)]
    for rank in (0, 1):
        managers[rank].save(0, states[rank])  # in this thread: rank 2 has not called save
        states[rank]["model"]["w"] += 1
        states[rank]["model"]["b"] += 1
    managers[2].save(0, states[2])
    for step in (1, 2):
        managers.save(step)
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        for step in range(3):
            assert same(repository.restore(f"a@{step}", keys="model.*"), {"model": state(step)["model"]})
        assert [s.depth for s in repository.snapshots("a")] == [0, 1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_alone_failed_after_the_commit_saves_with_the_others_again(store, rank, monkeypatch):
    """It does not know any more which rank holds which tensors; the others do."""
    managers = Managers(store)
    managers.save(0)
    managers.all(lambda m, _: m.wait_until_finished())
    with monkeypatch.context() as patch:

        def fail(*_):
            raise StorageError("after the commit")

        patch.setattr(managers[rank].repository.lineage, "note_saved", fail)
        managers.save(1)
        found = managers.all(lambda m, _: m.wait_until_finished())
    assert [isinstance(one, StorageError) for one in found] == [own == rank for own in range(COUNT)]
    began = time.monotonic()
    managers.save(2)
    assert managers.end() == [None] * COUNT
    assert time.monotonic() - began < 10
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots("a")] == [0, 1, 2]
        assert repository.check("restore").ok


class Loader:
    """An object whose state differs on each rank."""

    def __init__(self, position):
        self.position = position

    def state_dict(self):
        return {"position": self.position, "seen": torch.full((4,), self.position)}

    def load_state_dict(self, state):
        assert torch.equal(state["seen"], torch.full((4,), state["position"]))
        self.position = state["position"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loader: PerRank(loader),
        lambda loader: PerRank({"epoch": loader.position, "of": [(loader, 1)]}),
        lambda loader: PerRank((loader, loader.position)),
        lambda loader: {"below": PerRank(SimpleNamespace(loader=loader))},
    ],
    ids=["object", "dict", "tuple", "namespace"],
)
@pytest.mark.parametrize("count", [2, 1])
def test_an_object_of_each_rank_loads_its_own_state(store, wrap, count):
    """The object stays in the target, so that the next save stores its new state."""
    managers = Managers(store, count, async_save=False)

    def round_trip(manager, rank):
        manager.save(1, {"w": torch.arange(9), "own": wrap(Loader(rank + 10))})
        loader = Loader(0)
        target = {"w": torch.zeros(9, dtype=torch.int64), "own": wrap(loader)}
        manager.restore_into(target, 1)
        restored = loader.position
        manager.save(2, target)
        assert same(manager.restore(2), manager.restore(1))
        loader.position = rank + 20
        manager.save(3, target)
        manager.restore_into({**target, "own": wrap(again := Loader(0))}, 3)
        return restored, again.position

    assert managers.all(round_trip) == [(rank + 10, rank + 20) for rank in range(count)]
    managers.end()


@pytest.mark.parametrize(("async_save", "replicas"), [(True, "check"), (False, "rank0")])
@pytest.mark.parametrize("make", [lambda rank: torch.full((2000,), float(rank)), Loader, lambda rank: rank])
def test_a_whole_state_that_is_each_ranks_own(store, make, async_save, replicas):
    managers = Managers(store, async_save=async_save, replicas=replicas)

    def round_trip(manager, rank):
        for step in range(3):
            manager.save(step, PerRank(make(step + rank)))
        manager.wait_until_finished()
        target = PerRank(make(99))
        manager.restore_into(target)
        found, expected = target.value, make(2 + rank)
        return found.position == expected.position if isinstance(found, Loader) else same(found, expected)

    assert managers.all(round_trip) == [True] * COUNT
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert repository.check("restore").ok


def save_three_steps(store, async_save, held):
    """Save the states of the ranks at steps 0 to 2; each step restores the tensors of all ranks together.

    Args:
        held: (step, rank) -> the state of that rank.
    """
    managers = Managers(store, async_save=async_save)
    for step in range(3):
        managers.each(lambda m, rank, step=step: m.save(step, held(step, rank)))
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [0, 1, 2]
        assert repository.check("restore").ok
        for step in range(3):
            expected = {name: value for rank in range(COUNT) for name, value in held(step, rank)["model"].items()}
            found = repository.restore(f"a@{step}")["model"]
            assert found.keys() == expected.keys()
            assert all(same(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("copied", ["whole", "shares"])
def test_parts_that_only_some_ranks_hold(store, async_save, copied, monkeypatch):
    """In a pipeline each rank holds its own layers, and two hold one more; one process restores all of them."""
    if copied == "shares":  # too large to be copied whole: the ranks exchange holders first
        monkeypatch.setattr("snapstore.save.staging.MAX_WHOLE_BYTES", 0)

    def staged(version, rank):
        layers = {f"layer{rank}": torch.full((3000,), float(rank + version)), "all": torch.arange(2000) + version}
        if rank:
            layers["late"] = torch.arange(9000.0) * version
        return {"model": layers, "step": version}

    save_three_steps(store, async_save, staged)


class Stage:
    """Layers of a model and their optimizer, as docs/guides/distributed.md saves and restores them."""

    def __init__(self, numbers, seed=None):
        self.model = torch.nn.ModuleDict({f"layer{number}": torch.nn.Linear(3, 3) for number in numbers})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        if seed is not None:
            for number, value in enumerate(self.model.parameters()):
                value.data.fill_(seed + number)
                value.grad = torch.full_like(value, seed + number)
            self.optimizer.step()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": model, "optimizer": optimizer, "step": 1}

    def load(self, state):
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=FLAT)


@pytest.mark.parametrize("cuts", [[(0, 1), (2,)], [(0,), (1, 2)], [(0, 1, 2)]])
def test_stages_of_a_pipeline_restore_what_they_have(store, cuts):
    """Each stage passes the keys of its own state, as in the guide; one process that has all layers passes none."""
    saved = [Stage(numbers, seed) for seed, numbers in ((1, (0, 1)), (7, (2,)))]
    states = [stage.state() for stage in saved]
    managers = Managers(store, 2, async_save=False)
    managers.each(lambda m, rank: m.save(1, states[rank]))
    managers.end()
    expected = {part: {**states[0][part], **states[1][part]} for part in ("model", "optimizer")}
    stages = [Stage(numbers) for numbers in cuts]
    targets = [stage.state() for stage in stages]

    def restored(manager, rank):
        names = [f"{part}.{name}" for part in ("model", "optimizer") for name in targets[rank][part]]
        manager.restore_into(targets[rank], keys=[*names, "step"] if len(cuts) > 1 else None)

    managers = Managers(store, len(cuts))
    assert managers.all(restored) == [None] * len(cuts)
    managers.end()
    for stage, target in zip(stages, targets, strict=True):
        stage.load(target)
        for part, values in expected.items():
            present = stage.state()[part]
            assert present
            assert all(same(value, values[name]) for name, value in present.items())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("copied", ["whole", "shares"])
@pytest.mark.parametrize("change", ["rank 1", "ranks 1, 2", "ranks 0, 2", "all", "a layer moves"])
def test_a_save_succeeds_when_ranks_come_to_hold_other_tensors(store, async_save, copied, change, monkeypatch):
    """Optimizer state appears after the first save; tensors that the others hold unchanged are stored by shares."""
    if copied == "shares":  # too large to be copied whole: the ranks exchange holders before they copy
        monkeypatch.setattr("snapstore.save.staging.MAX_WHOLE_BYTES", 0)

    def held(step, rank):
        layers = {"all": torch.arange(2000) + step, f"layer{rank}": torch.full((3000,), float(rank + step))}
        if rank:
            layers["late"] = torch.arange(9000.0) + step
        if change == "a layer moves":
            if rank == (1 if step == 0 else 2):
                layers["moved"] = torch.arange(5000.0) + step
        elif step and (change == "all" or str(rank) in change):
            layers |= {"new": torch.arange(7000.0) * step, f"new{rank}": torch.full((2000,), float(rank + step))}
        return {"model": layers, "step": step}

    save_three_steps(store, async_save, held)


@pytest.mark.parametrize("forgets", [None, 0, 1])
def test_small_tensors_that_appear_later_move_no_other_one(store, forgets):
    """Rank 0 chooses who stores them. A rank may learn the structure again, or the holders, as after an error."""

    def held(step, rank):
        sizes = {f"w{number}": 20 * (number + 1) for number in range(9)}
        if step:  # larger than all before, so that a new choice would move these
            sizes = {f"a{number}": 200 + 9 * number for number in range(4)} | sizes
        tensors = {name: torch.arange(float(size)) + step for name, size in sizes.items()}
        if step == 2 and rank == 1:
            tensors["w8"] = torch.stack([tensors["w8"]] * 2, 1)[:, 0]  # other strides
        return {"m": tensors}

    managers = Managers(store)
    for step in range(4):
        managers.each(lambda m, r, s=step: m.save(s, held(s, r)).result())
        if step == 2 and forgets is not None:
            managers[forgets]._job._holders_are_sure = False
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert all(same(repository.restore(f"a@{step}"), held(step, 0)) for step in range(4))


def test_a_synchronous_save_after_asynchronous_ones_stores_a_new_tensor(store):
    """In an exit handler, saves become synchronous; the structure that staging knows has no such tensor."""
    tensors = {"w": torch.arange(3000.0)}
    managers = Managers(store)
    for step in range(2):
        if step:
            tensors["new"] = torch.arange(2000.0)
            for manager in managers:
                manager._async = False  # as an exit handler does
        managers.each(lambda m, _, s=step: m.save(s, {"m": tensors}).result())
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert same(repository.restore("a@1"), {"m": tensors})


def test_the_first_save_uses_the_memory_that_prepare_has_allocated(monkeypatch):
    """Ranks that must not copy plain tensors whole prepare the shares that rank 0 will choose."""
    monkeypatch.setattr("snapstore.save.staging.MAX_WHOLE_BYTES", 0)
    tensors = {f"w{number}": torch.arange(2048.0 * (number % 5 + 1)) for number in range(9)}  # of 1 to 5 chunks
    managers = Managers(created(chunk_bytes=8192))
    managers.all(lambda m, _: (m.prepare({"m": tensors}), m.wait_until_finished()))
    prepared = [dict(m._staging._spare) for m in managers]
    managers.all(lambda m, _: m.save(0, {"m": tensors}).result())
    for m, memory in zip(managers, prepared, strict=True):
        assert len(memory) > 3
        assert memory.keys() == m._staging._base.keys()
        assert all(m._staging._base[key] is one for key, one in memory.items())
    assert managers.end() == [None] * COUNT


def with_x(step: int, *, has_x: bool = True) -> dict[str, Any]:
    return {"m": {"all": torch.ones(9) + step, **({"x": torch.arange(5000.0) + step} if has_x else {})}}


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_that_some_ranks_keep_and_others_drop_is_stored_by_the_next_save(store, rank, waits):
    """A rank that kept the tensor has copied only its share, and no rank copied the rest.

    A wait raises the error, which says what to do; the next save begins all the same.
    """
    managers = Managers(store)
    for step in range(3):
        managers.each(lambda m, own, step=step: m.save(step, with_x(step, has_x=own != rank or step == 0)))
        found = managers.all(lambda m, _: m.wait_until_finished()) if waits or step != 1 else []
        if step == 1 and waits:
            assert [type(error) for error in found] == [RanksError] * COUNT
            assert all(
                "m.x: the ranks that hold it have changed since the last save" in str(error) for error in found
            ), found
            assert all("save again: the next save stores it" in str(error) for error in found), found
        elif step != 1:
            assert found == [None] * COUNT
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [0, 2]
        assert same(repository.restore("a@2"), with_x(2))


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("then", ["all keep it", "only the new ones keep it"])
@pytest.mark.parametrize(
    ("first", "second"), [([0], [0, 1]), ([1], [0, 1]), ([2], [1, 2]), ([1], [0, 1, 2]), ([0, 2], [0, 1, 2])]
)
def test_a_tensor_that_more_ranks_hold_is_stored_at_once(store, first, second, then, async_save):
    """The ranks that have held it have copied all of it; they share it with the others from the next save on."""
    third = second if then == "all keep it" else [rank for rank in second if rank not in first]
    managers = Managers(store, async_save=async_save)
    for step, holders in enumerate((first, second, third)):
        managers.each(lambda m, own, s=step, of=holders: m.save(s, with_x(s, has_x=own in of)).result())
    assert [[*m._job._holders.values()] for m in managers] == [[tuple(third)] if len(third) < COUNT else []] * COUNT
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert repository.check("restore").ok
        for step in range(3):
            assert same(repository.restore(f"a@{step}"), with_x(step))


def test_another_value_of_a_rank_that_holds_a_tensor_as_well_is_an_error_of_the_next_save(store):
    managers = Managers(store)
    for step in range(3):
        states = [with_x(step, has_x=own < 2 or step > 0) for own in range(COUNT)]
        if step:
            states[2]["m"]["x"][7] += 1
        found = managers.all(lambda m, own, s=step, given=states: m.save(s, given[own]).result())
        if step < 2:
            assert not any(isinstance(one, Exception) for one in found), (step, found)
    assert [type(one) for one in found] == [InvalidInputError] * COUNT
    assert all("rank 2: m.x: differ from the replicas on ranks 0, 1" in str(one) for one in found), found
    managers.end()
    with opened(store) as repository:
        assert same(repository.restore("a@1"), with_x(1))


@pytest.mark.parametrize("async_save", [True, False])
def test_tied_tensors_of_a_stage_whose_parts_have_another_order(store, async_save):
    """Rank 0 has the head first, the last stage the embedding: both parts have their bytes, and stay tied."""
    shared = torch.arange(3000.0)

    def stage(rank):
        own = {"own": torch.ones(9)}
        return {"embed": {"w": shared}, "head": {"w": shared}} if rank == COUNT - 1 else {"head": own, "embed": {}}

    managers = Managers(store, async_save=async_save)
    managers.all(lambda m, rank: m.save(0, stage(rank)))
    assert managers.end() == [None] * COUNT
    with opened(store) as repository:
        assert repository.check("restore").ok
        whole = repository.restore("a@0")
        assert list(whole) == ["head", "embed"]
        assert whole["head"]["w"].data_ptr() == whole["embed"]["w"].data_ptr()
        assert torch.equal(whole["embed"]["w"], shared)
        assert torch.equal(repository.restore("a@0", keys="embed.*")["embed"]["w"], shared)


class Lonely:
    """A shard with the methods that DCP calls; it does not say which copy of the shard it is."""

    dtype = torch.float32

    def __init__(self, first):
        self.first = first

    def size(self):
        return torch.Size((8, 3))

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size((self.first, 0)), torch.Size((4, 3)))]

    def __get_tensor_shard__(self, index):
        return torch.full((4, 3), float(index.offset[0]))


def test_shards_whose_mesh_names_no_copies_are_stored_twice_and_refused(store):
    managers = Managers(store, 2, async_save=False)
    managers.each(lambda m, r: m.save(0, {"m": Lonely(4 * r)}))
    managers.end()
    managers = Managers(store, 4, async_save=False)
    for error in managers.all(lambda m, rank: m.save(1, {"m": Lonely(4 * (rank % 2))})):
        assert isinstance(error, IntegrityError), error
        assert "ranks 0, 1, 2, 3 stored 192 bytes of tensors, expected 96: a box was stored twice" in str(error)
        assert "snapstore.integrations.megatron" in str(error)
        assert "init_device_mesh" in str(error)
        assert "pipeline stages hold (tied weights) needs another name on each" in str(error)
    managers.end()
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [0]


def test_an_iterator_is_refused_on_all_ranks(store):
    managers = Managers(store, async_save=False)
    for error in managers.all(lambda m, _: m.save(0, iter([("w", torch.ones(3))]))):
        assert isinstance(error, InvalidInputError)
        assert "iterator" in str(error)
    managers.end()


def test_rank_0_decides_which_save_is_skipped():
    """When the store is slow, all ranks skip the same steps."""
    gate = threading.Event()

    class Slow(MemoryStore):
        def put(self, key, data):
            if key.startswith("manifests/"):
                assert gate.wait(60)
            super().put(key, data)

    store = Slow()
    Repository.create(store, chunk_bytes=1024, options=OPTIONS).close()
    managers = Managers(store, on_busy="skip")
    first, second = managers.save(0), managers.save(1)
    gate.set()
    third = managers.save(2, force=True)
    assert [handle.skipped for handle in first] == [False] * COUNT
    assert [handle.skipped for handle in second] == [True] * COUNT
    assert [handle.skipped for handle in third] == [False] * COUNT
    managers.end()
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [0, 2]


def test_rank_0_alone_forgets_and_collects(store):
    stores = [FaultStore(store) for _ in range(COUNT)]
    managers = Managers(store, stores=stores, keep=[KeepLast(2)])
    for step in range(5):
        managers.save(step)
    managers.end()
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [3, 4]
        assert repository.policies("a") == [KeepLast(2)]
    for rank in range(1, COUNT):
        verbs = {name for name, _ in stores[rank].log}
        assert "delete" not in verbs
        assert "lock" not in verbs
        assert not [key for name, key in stores[rank].log if name == "put" and not key.startswith(("packs/", "manif"))]


@pytest.mark.parametrize("with_policies", [1, 0])
def test_the_policies_of_rank_0_tell_the_best_step(store, with_policies):
    managers = Managers(store, of_rank=lambda rank: {"keep": KeepBest("loss")} if rank < with_policies else {})
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        managers.save(step, metrics={"loss": loss})
    managers.all(lambda m, _: m.wait_until_finished())
    for found in managers.all(lambda m, _: m.best_step()):
        assert found == 1 if with_policies else "no KeepBest among the policies" in str(found)
    assert managers.all(lambda m, _: m.latest_step()) == [2] * COUNT
    assert managers.end() == [None] * COUNT


def test_the_other_ranks_list_nothing_and_read_no_manifest_of_their_last_save(store):
    stores = [FaultStore(store) for _ in range(COUNT)]
    managers = Managers(store, stores=stores)
    managers.save(0)
    managers.all(lambda m, _: m.wait_until_finished())
    before = [len(each.log) for each in stores]
    managers.save(1)
    managers.all(lambda m, _: m.wait_until_finished())
    assert snapshot_of(store, "a@1").depth > 0
    for rank in range(1, COUNT):
        done = stores[rank].log[before[rank] :]
        assert not [key for name, key in done if name == "list" or (key.startswith("manifests/") and name != "put")], (
            done
        )
    before = [len(each.log) for each in stores]
    managers.all(lambda m, rank: m.restore_into(state(5, rank)))
    for rank in range(1, COUNT):
        assert "list" not in {name for name, _ in stores[rank].log[before[rank] :]}
    managers.end()


def test_all_ranks_hear_one_answer(store):
    managers = Managers(store, keep=[KeepBest("loss"), KeepLast(9)])
    assert managers.all(lambda m, _: m.latest_step()) == [None] * COUNT
    for error in managers.all(lambda m, _: m.restore()):
        assert isinstance(error, NotFoundError)
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        managers.save(step, metrics={"loss": loss})
    managers.all(lambda m, _: m.wait_until_finished())
    assert managers.all(lambda m, _: m.latest_step()) == [2] * COUNT
    assert managers.all(lambda m, _: m.best_step()) == [1] * COUNT

    def unlike(manager, rank):
        return manager.latest_step() if rank == 0 else manager.best_step()

    found = managers.all(unlike)
    assert found[0] == 2
    for error in found[1:]:
        assert isinstance(error, InvalidInputError)
        assert "best_step, and rank 0 has asked for latest_step" in str(error)
    managers.end()


def test_ranks_restore_the_snapshot_that_rank_0_means(store):
    """A save by another process between the restores of two ranks does not make them restore different snapshots."""
    managers = Managers(store)
    managers.save(1)
    managers.all(lambda m, _: m.wait_until_finished())
    late = threading.Event()

    def restored(manager, rank):
        if rank:
            assert late.wait(60)
            return manager.restore()["step"]
        try:
            return manager.restore()["step"]
        finally:
            with opened(store) as repository:
                repository.save({"step": 50}, run="a", step=50)
            late.set()

    assert managers.all(restored) == [1] * COUNT
    managers.end()


def test_the_next_save_goes_on_from_what_was_restored(store):
    managers = Managers(store)
    for step in range(3):
        managers.save(step)
    first = managers.all(lambda m, _: m.restore_into(state(9), 0))[0]
    managers.save(10)
    managers.end()
    assert snapshot_of(store, "a@10").parent == first.id


def test_a_rank_that_does_not_come_is_an_error_for_the_others(store):
    ranks = LocalRanks(2, silent_s=0.3, total_s=0.6)
    error = together([lambda: SnapshotManager(store, run="a", ranks=ranks[1], options=OPTIONS)])[0]
    assert isinstance(error, RanksError)
    assert "rank 0 of 2" in str(error)


def test_an_error_at_opening_is_raised_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("x")
    ranks = LocalRanks(2)
    for error in together([lambda r=r: SnapshotManager(tmp_path / "file", run="a", ranks=r) for r in ranks]):
        assert isinstance(error, SnapstoreError), error


def test_close_gives_a_save_up_in_time():
    """A scheduler leaves a few seconds: close ends in time, and the save is committed on no rank."""
    gate = threading.Event()

    class Slow(MemoryStore):
        def put(self, key, data):
            if key.startswith("packs/"):
                time.sleep(0.05)
            super().put(key, data)

        def get_range(self, *args, **options):
            assert gate.wait(60)
            return super().get_range(*args, **options)

    store = Slow()
    Repository.create(store, chunk_bytes=1024, options=OPTIONS).close()
    managers = Managers(store)
    managers.all(lambda m, rank: m.save(0, {f"{i}": torch.randn(3000, generator=seeded(i)) for i in range(200)}))
    began = time.monotonic()
    for error in managers.all(lambda m, _: m.close(timeout=0.2)):
        assert isinstance(error, SnapstoreError), error
        assert "close(timeout=0.2) has given it up" in str(error)
    assert time.monotonic() - began < 30
    with opened(store) as repository:
        assert repository.snapshots() == []
        gate.set()
        repository.gc()
    assert keys_of(store, "packs/") == []


def seeded(number):
    return torch.Generator().manual_seed(number)


def test_two_managers_use_one_channel(store):
    ranks = LocalRanks(2)
    made = together([
        lambda r=r: [SnapshotManager(store, run=run, ranks=r, options=OPTIONS) for run in ("a", "b")] for r in ranks
    ])  # fmt: skip

    def save(managers, rank):
        for step in range(3):
            for manager in managers:
                manager.save(step, state(step, rank))
        for manager in managers:
            manager.close()

    assert together([lambda m=m, r=r: save(m, r) for r, m in enumerate(made)]) == [None, None]
    with opened(store) as repository:
        assert sorted((s.run, s.step) for s in repository.snapshots()) == [(r, s) for r in "ab" for s in range(3)]


def test_a_job_of_one_rank(store):
    """It saves as ranks do, since its tensors may be sharded on a mesh of one; but it can also save an iterator."""
    with SnapshotManager(store, run="a", ranks=LocalRanks(1)[0], options=OPTIONS) as manager:
        manager.save(0, state(0))
        manager.save(1, iter([("w", torch.ones(3000))]))
        manager.save(2, state(2))
        assert manager.restore(2)["own"]["rank"] == 0
    with opened(store) as repository:
        assert [s.features for s in repository.snapshots("a")] == [["ranks"], [], ["ranks"]]
        assert repository.check("restore").ok


class Copies:
    """An object that takes weak references."""


@pytest.mark.parametrize("place", ["alone", "in a job", "in the caller's thread"])
def test_an_error_holds_no_copies_through_the_errors_that_led_to_it(store, monkeypatch, place):
    held = []

    def fill():
        copies = Copies()
        held.append(weakref.ref(copies))
        raise MemoryError

    def fail(*_, **__):
        copies = Copies()
        held.append(weakref.ref(copies))
        try:
            try:
                fill()
            except MemoryError as error:
                raise CapabilityError("out of memory") from error
        except CapabilityError as error:
            told = StorageError("no place")
            told.__context__ = error
            raise told from None

    ranks = False if place == "alone" else LocalRanks(1)[0]
    with SnapshotManager(store, run="a", ranks=ranks, options=OPTIONS) as manager:
        if place == "alone":
            monkeypatch.setattr("snapstore.save.pipeline.write", fail)
        elif place == "in a job":
            monkeypatch.setattr("snapstore.save.ranks.writer.RankWriter.write", fail)
        else:
            monkeypatch.setattr(manager._staging, "copy_state", fail)
        try:
            raise KeyError("of the program")
        except KeyError:
            handle = manager.save(1, state(1))
            assert handle._finished.wait(60)
        assert [copies() for copies in held] == [None, None]
        with pytest.raises(StorageError, match="no place") as raised:
            handle.result()
        assert isinstance(raised.value.__context__.__cause__, MemoryError)
        with pytest.raises(StorageError):
            manager.wait_until_finished()


def test_a_choice_that_is_none_is_refused_before_the_ranks_meet(store):
    """Else the thread of the rank stays, and the others wait for the rank."""
    before = threading.enumerate()
    for options in ({"staging": "gpu"}, {"replicas": "rank1"}, {"on_busy": "fail"}):
        with pytest.raises(InvalidInputError, match="expected one of"):
            SnapshotManager(store, run="a", ranks=LocalRanks(2)[0], options=OPTIONS, **options)
    assert [thread for thread in threading.enumerate() if thread not in before] == []


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("error", [ValueError("the shard is unreadable"), KeyboardInterrupt()])
def test_the_error_of_an_iterator_is_raised_by_its_save_in_a_job_of_one_rank(store, async_save, error):
    def tensors():
        yield "a", torch.zeros(10_000)
        raise error

    manager = SnapshotManager(store, run="a", ranks=LocalRanks(1)[0], async_save=async_save, options=OPTIONS)
    with pytest.raises(type(error)) as raised:
        manager.save(1, tensors())
    assert raised.value is error
    manager.check_for_errors()  # it is raised once
    assert manager.save(2, state(2)).result().step == 2
    manager.close()
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots("a")] == [2]


def test_a_mirror_that_cannot_be_read_by_rank_0_is_an_error_on_all_ranks(store, monkeypatch):
    """Only rank 0 reads the mirror: the others get its error at once, and do not wait for an answer."""
    managers = Managers(store, of_rank=lambda rank: {"mirror": MemoryStore()} if rank == 0 else {})
    managers.save(1)

    def fails(name):
        raise StorageError("the mirror does not answer")

    monkeypatch.setattr(managers[0]._mirror, "nearest", fails)
    found = managers.all(lambda m, _: m.restore(1))
    assert [type(one) for one in found] == [StorageError] * COUNT, found
    assert all("the mirror does not answer" in str(one) for one in found)
    managers.end()


def test_a_first_state_that_one_rank_cannot_save_is_found_before_a_save_is_due():
    """No save begins, so the ranks go on in step if that rank goes on."""
    managers = Managers(MemoryStore(), save_interval_steps=10)
    good, bad = {"model": {"w": torch.ones(3)}}, {"model": {"w": torch.ones(3), "code": print}}
    found = managers.all(lambda m, rank: m.save(1, bad if rank == 1 else good))
    assert [getattr(one, "skipped", None) for one in found] == [True, None, True]
    assert "model.code: " in str(found[1])
    assert [one.result(30).step for one in managers.save(10)] == [10] * COUNT
    managers.end()
