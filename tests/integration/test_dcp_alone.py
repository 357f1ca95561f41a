"""In one process, snapstore's storage for DCP keeps what DCP's own tests check of writers, readers and planners.

DCP is torch.distributed.checkpoint. Each test states a promise of DCP's own tests, or one of ours: nothing is left of a
failed save, a load gives the bits that were saved, and a snapshot of the manager and one of DCP are the same.
docs/design/dcp-tests.md says which of DCP's cases is checked where.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import pickle
import re
import resource
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kit.faults import FaultStore
from kit.objects import flip
from kit.processes import run_python
from kit.ranks import together
from kit.states import same
from snapstore import InvalidInputError, KeepLast, NotFoundError, PerRank, Repository, RngState, SnapshotManager
from snapstore.protocol.session import SaveSession
from snapstore.storage.memory import MemoryStore

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType  # noqa: E402
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402

from snapstore import dcp as snap  # noqa: E402
from snapstore.dcp.names import refs_of, step_of  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is")]


class Pair(NamedTuple):
    left: int
    right: int


def state_of(seed: int = 0) -> dict[str, Any]:
    """Return a state of a model and its optimizer, with plain values of every sort."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 40)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": seed,
        "rate": 0.5 + seed,
        "names": ["a", "b"][: seed + 1],
        "mixed": [{"deep": [torch.full((2, 2), float(seed)), 7]}, torch.arange(5) + seed],
        "pair": (seed, torch.ones(3) * seed),
        "array": np.arange(6.0) + seed,
        "bytes": bytes([seed]) * 5000,
        "path": PurePosixPath("/a/b"),
        "none": None,
        "scalar": torch.tensor(3.5 + seed),
        "empty": torch.empty(0, 4),
        "half": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) + seed,
    }


def blank(value: Any) -> Any:
    """Return a state of the same keys and tensors, with other values."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 9)
    if isinstance(value, dict):
        return {str(key): blank(child) for key, child in value.items()}  # DCP's keys are text
    if isinstance(value, list) and any(isinstance(child, dict | list | torch.Tensor) for child in value):
        return [blank(child) for child in value]
    return "blank"


def plain(value: Any) -> Any:
    """Return a state with dicts and text as keys, which is all that DCP's flat keys keep."""
    if isinstance(value, dict):
        return {str(key): plain(child) for key, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, list) else value


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def repository(store: MemoryStore) -> Any:
    with Repository.create(store) as one:
        yield one


@pytest.fixture
def writer(repository: Repository) -> Any:
    one = snap.SnapstoreWriter(repository, run="r")
    yield one
    one.close()


@pytest.fixture
def reader(repository: Repository) -> Any:
    return snap.SnapstoreReader(repository, run="r")


@contextlib.contextmanager
def unloadable(caplog: Any, text: str) -> Iterator[None]:
    """Require an error with `text`; DCP before torch 2.13 drops the error of `read_metadata`, which is logged."""
    with pytest.raises(dcp.CheckpointException) as caught:
        yield
    assert any(re.search(text, record.getMessage()) for record in caplog.records if record.name == "snapstore")
    assert re.search(text, str(caught.value)) or torch.__version__ < (2, 13)


def loaded(reader: Any, checkpoint_id: Any, like: Any) -> dict[str, Any]:
    """Return what DCP loads into a state like another one."""
    state: dict[str, Any] = blank(like)
    dcp.load(state, storage_reader=reader, checkpoint_id=checkpoint_id)
    return state


def sessions(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list("sessions/")]


# --- names ---


@pytest.mark.parametrize(
    ("checkpoint_id", "step"),
    [(7, 7), ("7", 7), ("step-100", 100), ("/out/run-3/step-12/", 12), (PurePosixPath("/out/ckpt_5"), 5), (0, 0)],
)
def test_a_checkpoint_id_ends_in_its_step(checkpoint_id: Any, step: int) -> None:
    assert step_of(checkpoint_id) == step
    assert refs_of("r", checkpoint_id)[-1] == f"r@{step}"


@pytest.mark.parametrize("checkpoint_id", [None, "", "best", "step-", 1.0, True, b"7", "9" * 40, -1, "step-٣"])
def test_a_checkpoint_id_without_a_step_is_refused(checkpoint_id: Any, writer: Any, store: MemoryStore) -> None:
    with pytest.raises(dcp.CheckpointException if checkpoint_id is None else BaseException) as caught:
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id=checkpoint_id)
    assert "step" in str(caught.value)
    assert not sessions(store)


def test_a_reader_takes_tags_and_the_newest(writer: Any, reader: Any, repository: Repository, caplog: Any) -> None:
    for step in (1, 2):
        snap.save({"a": torch.full((3,), float(step))}, writer, step)
    repository.tag("r@1", "good")
    for name, value in ((None, 2), ("latest", 2), ("/out/latest", 2), ("good", 1), ("x/good", 1), (1, 1)):
        state = {"a": torch.zeros(3)}
        snap.load(state, reader, name)
        assert state["a"].tolist() == [value] * 3, name
        assert reader.snapshot.step == value
    for name in ("bad", 3, "none"):
        with unloadable(caplog, "no such step or tag"):
            snap.load({"a": torch.zeros(3)}, reader, name)


def test_a_tag_that_ends_in_digits_is_no_step(writer: Any, reader: Any, repository: Repository) -> None:
    for step in (2, 5):
        snap.save({"a": torch.full((3,), float(step))}, writer, step)
    for tag in ("v2", "step-2"):
        repository.tag("r@5", tag)
    repository.tag("r@2", "epoch_5")
    for name, value in (("v2", 5), ("/out/step-2", 5), ("epoch_5", 2), ("step-5", 5), ("v2/2", 2), ("02", 2), (2, 2)):
        state = {"a": torch.zeros(3)}
        snap.load(state, reader, name)
        assert (state["a"].tolist(), reader.snapshot.step) == ([value] * 3, value), name


class Slow(snap.SnapstoreReader):
    """Between the metadata and the data of its first loads, another process saves a step, and collects the others."""

    later = (2, 3)

    def prepare_local_plan(self, plan: Any) -> Any:
        if self.later:
            step, *self.later = self.later
            with Repository.open(self.repository.context.store) as other:
                other.save(numbered(step), run="r", step=step, tags=["good"])
                other.forget(KeepLast(1), run="r")
                other.gc()
        return plan


def numbered(step: int) -> dict[str, Any]:
    return {"a": torch.randn(100_000, generator=torch.Generator().manual_seed(step)), "n": step}


@pytest.mark.parametrize("name", [None, "latest", "good"])
def test_the_newest_is_taken_again_if_it_is_collected_meanwhile(name: Any, writer: Any, repository: Repository) -> None:
    snap.save(numbered(1), writer, 1)
    repository.tag("r@1", "good")
    target = numbered(0)
    snap.load(target, Slow(repository, run="r"), name)
    same(target, numbered(3))


def test_a_step_that_is_collected_meanwhile_is_an_error(writer: Any, repository: Repository, caplog: Any) -> None:
    snap.save(numbered(1), writer, 1)
    with unloadable(caplog, "no such step or tag; last steps: 2"):
        snap.load(numbered(0), Slow(repository, run="r"), 1)


@pytest.mark.parametrize("step", [-1, 1.5, True, None, 10**12, [1]])
def test_what_is_no_step_is_not_taken_for_another_one(step: Any, writer: Any, reader: Any) -> None:
    """Text may end with a step, as "step-1" does; a number is a step or none."""
    for number in (1, 5):
        snap.save({"n": number}, writer, number)
    with pytest.raises(dcp.api.CheckpointException, match=r"expected (a step|0 to 9+)"):
        snap.save({"n": 9}, writer, step)
    with pytest.raises(dcp.api.CheckpointException, match=r"expected (a step|0 to 9+)"):
        snap.async_save({"n": 9}, writer, step).result()
    assert [found.step for found in writer.repository.snapshots("r")] == [1, 5]
    state = {"n": 0}
    if step is not None:
        with pytest.raises(dcp.api.CheckpointException):
            snap.load(state, reader, step)
        assert state == {"n": 0}
    snap.save({"n": 7}, writer, np.int64(7))
    snap.load(state, reader, np.int64(7))
    assert state == {"n": 7}


def test_validate_checkpoint_id() -> None:
    for kind in (snap.SnapstoreWriter, snap.SnapstoreReader):
        assert kind.validate_checkpoint_id("step-5")
        assert not kind.validate_checkpoint_id("")


def test_a_save_without_a_checkpoint_id_does_not_take_the_last_one(writer: Any) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id=1)
    with pytest.raises(dcp.CheckpointException, match="checkpoint_id None"):
        dcp.save({"a": torch.ones(2)}, storage_writer=writer)


@pytest.mark.filterwarnings("ignore:`(save|load)_state_dict` is deprecated:FutureWarning")
def test_the_older_functions_keep_the_checkpoint_id_that_was_set(writer: Any, reader: Any) -> None:
    """They call reset without an id, which DCP's own storages take as the one that they have."""
    for step in (1, 2):
        writer.reset(step)
        dcp.save_state_dict({"a": torch.full((3,), float(step))}, writer, no_dist=True)
    state = {"a": torch.zeros(3)}
    reader.reset(1)
    dcp.load_state_dict(state, reader, no_dist=True)
    assert state["a"].tolist() == [1] * 3
    with pytest.raises(dcp.CheckpointException, match="checkpoint_id None"):
        dcp.save_state_dict(state, writer, no_dist=True)


# --- what is saved is loaded ---


@pytest.mark.parametrize("way", ["save", "async_save", "snap.save", "snap.async_save"])
def test_what_is_saved_is_loaded(way: str, writer: Any, reader: Any) -> None:
    state = state_of(1)
    if way == "save":
        dcp.save(state, storage_writer=writer, checkpoint_id="step-1")
    elif way == "async_save":
        dcp.async_save(state, storage_writer=writer, checkpoint_id="step-1").result()
    elif way == "snap.save":
        snap.save(state, writer, 1)
    else:
        snap.async_save(state, writer, 1).result()
    same(loaded(reader, "step-1", state), plain(state))


@pytest.mark.parametrize("state", [{}, {"a": {}}, {"a": {"b": []}, "c": ()}])
def test_states_without_a_tensor_or_a_value(state: Any, writer: Any, reader: Any) -> None:
    dcp.save(state, storage_writer=writer, checkpoint_id=1)
    dcp.async_save(state, storage_writer=writer, checkpoint_id=2).result()
    for step in (1, 2):
        assert loaded(reader, step, state) == state


def test_dicts_are_loaded_in_place_and_objects_are_not_replaced(writer: Any, reader: Any) -> None:
    """The dicts and tensors of a state stay the same objects; an object with no state of its own loads too."""

    class Watched(dict):
        def __setitem__(self, key: str, value: Any) -> None:
            was_set.append(key)
            super().__setitem__(key, value)

    class Empty:
        loaded: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    was_set: list[str] = []
    empty, model, nested = Empty(), torch.nn.Linear(2, 3), {"w": {"deep": torch.ones(2)}, "n": [1, 2]}
    dcp.save({"empty": empty, "model": model, "nested": nested}, storage_writer=writer, checkpoint_id=1)
    for own in (False, True):
        target = {"w": {"deep": torch.zeros(2)}, "n": [9]}
        inner, deep = target["w"], target["w"]["deep"]
        state = Watched(empty=empty, model=torch.nn.Linear(2, 3), nested=target)
        snap.load(state, reader, 1) if own else dcp.load(state, storage_reader=reader, checkpoint_id=1)
        assert empty.loaded == {}
        assert was_set == ([] if own else ["nested"])  # DCP sets it again, as the object it was
        assert state["nested"] is target
        assert target["w"] is inner
        assert inner["deep"] is deep
        same(target, nested)
        same(dict(state["model"].state_dict()), dict(model.state_dict()))
        empty.loaded = None
        was_set.clear()


def test_the_metadata_names_the_snapshot(writer: Any, reader: Any) -> None:
    saved = dcp.save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id="out/step-1").storage_meta
    reader.reset("out/step-1")
    read = reader.read_metadata().storage_meta
    assert saved.checkpoint_id == read.checkpoint_id == "out/step-1"
    assert saved.save_id == read.save_id == writer.snapshot.id
    assert read.load_id == reader.snapshot.id


def test_the_metadata_has_one_chunk_a_tensor_and_dcps_keys(writer: Any, reader: Any) -> None:
    state = state_of()
    dcp.save(state, storage_writer=writer, checkpoint_id=1)
    reader.reset(1)
    metadata = reader.read_metadata()
    flat, paths = flatten_state_dict(state)
    assert metadata.planner_data == paths
    assert metadata.state_dict_metadata.keys() == flat.keys()
    for key, value in flat.items():
        found = metadata.state_dict_metadata[key]
        if isinstance(value, torch.Tensor):
            assert isinstance(found, TensorStorageMetadata)
            assert (found.size, found.properties.dtype, len(found.chunks)) == (value.size(), value.dtype, 1)
            assert (found.chunks[0].sizes, sum(found.chunks[0].offsets)) == (value.size(), 0)
        else:
            assert isinstance(found, BytesStorageMetadata)
    assert len(pickle.dumps(metadata)) < 400 * len(flat)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1, "c": {}}, "d": []},
        {"a": [1, [2, 3]], "b": [[torch.ones(2)], 4], "c": [[], {}]},
        {"a": {1: torch.ones(1), "x": {2.5: 3}}},
        {"a": (torch.ones(1), 2), "b": [(torch.ones(1),), (1, 2)]},
        {"a": OrderedDict(b=[{"c": [torch.ones(1)]}, None, ["d"]])},
        {"a": np.ones(3), "b": {"c": b"x" * 6000}, "d": [np.ones(2)]},
        {"a": {"b.c": 1}, "a.b": 2},
    ],
)
def test_dcp_makes_the_same_keys_of_the_state(state: Any, repository: Repository, reader: Any) -> None:
    repository.save(state, run="r", step=1)
    reader.reset(1)
    _, paths = flatten_state_dict(state)
    assert reader.read_metadata().planner_data == paths


def test_two_values_with_one_key_are_refused(repository: Repository, reader: Any, caplog: Any) -> None:
    repository.save({"a": {"b": 1}, "a.b": 2}, run="r", step=1)
    with unloadable(caplog, r"two values have the key 'a\.b'"):
        dcp.load({"a": {"b": 1}}, storage_reader=reader, checkpoint_id=1)


def test_a_state_that_is_no_dict_is_refused(repository: Repository, reader: Any, caplog: Any) -> None:
    repository.save([torch.ones(2)], run="r", step=1)
    with unloadable(caplog, "not a dict, so DCP cannot load it"):
        dcp.load({}, storage_reader=reader, checkpoint_id=1)


def test_objects_of_classes_are_one_leaf(repository: Repository) -> None:
    repository.save({"pair": Pair(1, 2), "list": [Pair(3, 4)], "t": torch.ones(2)}, run="r", step=1)
    for types, pair in (((), (1, 2)), ((Pair,), Pair(1, 2))):
        state = {"pair": None, "list": None, "t": torch.zeros(2)}
        dcp.load(state, storage_reader=snap.SnapstoreReader(repository, run="r", types=types), checkpoint_id=1)
        assert state["pair"] == pair
        assert type(state["pair"]) is type(pair)
        assert state["t"].tolist() == [1, 1]


# --- the manager's snapshots and DCP's are the same ---


def test_dcp_saves_and_loads_what_the_manager_saves(writer: Any, reader: Any, repository: Repository) -> None:
    """The same parts, trees and chunks: nothing is stored again, and the restored states are equal to the type."""
    state = state_of(1)
    with SnapshotManager(repository, run="r") as manager:
        manager.save(1, state).result()
        same(loaded(reader, 1, state), plain(state))
        snap.save(state, writer, 2)
        snap.async_save(state, writer, 3).result()
        of_manager = manager.restore(1)
        for step in (2, 3):
            assert repository.snapshot(f"r@{step}").new_chunks == 0
            same(manager.restore(step), of_manager)
        dcp.save(plain(state), storage_writer=writer, checkpoint_id=4)
        same(manager.restore(4), plain(of_manager))
        assert repository.snapshot("r@4").parent == repository.snapshot("r@3").id


def test_a_model_and_its_optimizer_go_from_dcp_to_the_manager(writer: Any, repository: Repository) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    snap.save({"model": model, "optimizer": optimizer, "step": 5}, writer, 5)
    other = torch.nn.Linear(30, 40)
    target = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "step": 0}
    repository.restore_into("r@5", target)
    same(target["model"].state_dict(), model.state_dict())
    same(target["optimizer"].state_dict(), optimizer.state_dict())
    assert target["step"] == 5


def test_stateful_and_other_values_load(writer: Any, repository: Repository, reader: Any) -> None:
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    dcp.save({"model": model, "plain": model.state_dict(), "n": 3}, storage_writer=writer, checkpoint_id=1)
    state = {"model": other, "plain": torch.nn.Linear(3, 4).state_dict(), "n": 0}
    dcp.load(state, storage_reader=reader, checkpoint_id=1)
    assert state["model"] is other
    same(dict(other.state_dict()), dict(model.state_dict()))
    same(dict(state["plain"]), dict(model.state_dict()))
    assert state["n"] == 3


# --- async saves ---


class Loader:
    """An object with a state; its tensor is new in each state."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": torch.arange(self.position, self.position + 3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["order"].tolist() == list(range(state["position"], state["position"] + 3))
        self.position = state["position"]


def test_objects_below_the_top_level_load_into_their_own_shape(writer: Any, reader: Any) -> None:
    """A tensor, a dict and an object in `PerRank`; objects in dicts and lists; they stay the objects that they are."""

    def made(factor: int) -> dict[str, Any]:
        return {
            "own": {
                "tensor": PerRank(torch.full((4,), float(factor))), "dict": PerRank({"a": torch.ones(2) * factor}),
                "value": PerRank([factor]), "loader": PerRank(Loader(factor)), "rng": RngState(),
            },
            "loaders": {"list": [torch.ones(2) * factor, Loader(2 * factor)], "one": Loader(3 * factor)},
            "n": factor,
        }  # fmt: skip

    state, target = made(7), made(1)
    snap.save(state, writer, 1)
    drawn = torch.rand(3)
    objects = dict(target["own"]) | {"list": target["loaders"]["list"][1], "one": target["loaders"]["one"]}
    memory = target["own"]["tensor"].value
    snap.load(target, reader, 1)
    found = dict(target["own"]) | {"list": target["loaders"]["list"][1], "one": target["loaders"]["one"]}
    assert all(found[key] is one for key, one in objects.items())
    assert memory.tolist() == [7.0] * 4
    assert found["tensor"].value is memory
    assert (found["dict"].value["a"].tolist(), found["value"].value) == ([7.0, 7.0], [7])
    assert [found["loader"].value.position, found["list"].position, found["one"].position] == [7, 14, 21]
    assert target["n"] == 7
    assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(dcp.CheckpointException, match="Missing key"):
        snap.load(target | {"gone": {"loader": (gone := Loader(4))}, "own": objects}, reader, 1)
    assert (gone.position, target["own"]["loader"]) == (4, found["loader"])


@dataclasses.dataclass
class Held:
    loader: Any


class Members(NamedTuple):
    loader: Any


@pytest.mark.parametrize(
    "hold",
    [
        lambda one: (one,),
        lambda one: [torch.ones(1), (1, {"deep": one})],
        lambda one: {"b": deque([one])},
        lambda one: {"b": Held(one)},
        lambda one: {"b": PerRank(Members(one))},
        lambda one: PerRank({"b": (PerRank(one),)}),
    ],
)
def test_an_object_that_cannot_load_is_refused_before_anything_is_written(hold: Any, writer: Any, reader: Any) -> None:
    """For DCP a tuple and an object of a class are one value, which a load would replace, with the objects in it."""
    snap.save({"0": torch.ones(2), "a": hold(Loader(7)), "z": Loader(7)}, writer, 1)
    loader, other = Loader(1), Loader(1)
    target = {"0": torch.zeros(2), "a": hold(loader), "z": other}
    with pytest.raises(InvalidInputError, match=r"^a\S*: .*object.*restore_into"):
        snap.load(target, reader, 1)
    assert (target["0"].tolist(), loader.position, other.position) == ([0, 0], 1, 1)
    assert repr(target) == repr({"0": torch.zeros(2), "a": hold(loader), "z": other})


def test_an_object_may_have_a_tuple_of_objects_in_its_state(writer: Any, reader: Any) -> None:
    """It loads their states itself, as in `restore_into`."""

    class Outer(Loader):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"pair": (Loader(self.position), 5)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            assert state["pair"][0]["position"] == self.position

    target = {"a": Outer(1), "b": [Outer(2)]}
    snap.save({"a": Outer(7), "b": [Outer(8)]}, writer, 1)
    snap.load(target, reader, 1)
    assert (target["a"].position, target["b"][0].position) == (7, 8)


class ItsOwnState(dict[str, Any]):
    """An object that is its own state, as a config may be."""

    def state_dict(self) -> dict[str, Any]:
        return self

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


def test_a_container_at_two_places_keeps_its_objects(writer: Any, reader: Any) -> None:
    """A dict is loaded in place. DCP makes a list for each place, so one of them would lose its objects."""

    def hold(number: int) -> tuple[Loader, dict[str, Any]]:
        loader = Loader(number)
        return loader, {"in": [loader, {"n": number}], "own": loader}

    _, shared = hold(3)
    snap.save({"a": shared, "b": shared}, writer, 1)
    loader, shared = hold(0)
    state = {"a": shared, "b": shared}
    snap.load(state, reader, 1)
    assert state["a"] is state["b"] is shared
    assert shared == {"in": [loader, {"n": 3}], "own": loader}
    assert loader.position == 3
    _, shared = hold(4)
    snap.save({"a": shared["in"], "b": {"c": shared["in"]}}, writer, 2)
    loader, shared = hold(0)
    state = {"a": shared["in"], "b": {"c": shared["in"]}}
    with pytest.raises(InvalidInputError, match=r"b\.c: is the same list as a.* nothing was loaded"):
        snap.load(state, reader, 2)
    assert state == {"a": [loader, {"n": 0}], "b": {"c": [loader, {"n": 0}]}}
    assert loader.position == 0


@pytest.mark.parametrize("key", ["a.b", "a/b", "", " ", "\ud800", "a\0b", 1, None, True, 2.5, (1, 2), b"x"])
def test_keys_of_every_type_load(key: Any, writer: Any, reader: Any) -> None:
    state = {"z": 1, key: torch.ones(2), "m": {key: torch.ones(1), "v": {key: 5}}}
    snap.save(state, writer, 1)
    target = {"z": 0, key: torch.zeros(2), "m": {key: torch.zeros(1), "v": {key: 0}}}
    snap.load(target, reader, 1)
    same(target, state)
    snap.async_save(state, writer, 2).result()
    with pytest.raises(InvalidInputError, match="two of its keys have the same text"):
        snap.load({key: 1, Text(key): 2}, reader, 1)


class Text:
    """A key with the text of another one."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __str__(self) -> str:
        return str(self.key)


@pytest.mark.timeout(60)
def test_a_state_that_contains_itself_is_refused(writer: Any, reader: Any) -> None:
    snap.save({"a": {"b": {"c": 1}}}, writer, 1)
    own, cycle = ItsOwnState(c=0), dict[str, Any]()
    cycle["c"] = cycle
    for state in ({"a": {"b": own}}, {"a": own}, {"a": [own]}, {"a": {"b": cycle}}):
        with pytest.raises(InvalidInputError, match=r"^a\S*: .*contains itself"):
            snap.load(state, reader, 1)
        with pytest.raises(dcp.CheckpointException, match=r"contains itself|recursion"):
            snap.save(state, writer, 2)
    assert own == {"c": 0}


class Level:
    """An object whose state has a numeric key, as those of optimizers and of MultiStepLR have."""

    def __init__(self, value: int) -> None:
        self.levels = Counter({30: value, 80: value})

    def state_dict(self) -> dict[str, Any]:
        return {"levels": self.levels, "name": f"of {self.levels[30]}"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.levels = state["levels"]


def test_values_and_objects_below_numeric_keys_load(writer: Any, reader: Any) -> None:
    """DCP's paths have all keys as text: its own planner adds a second key, and the first one keeps its old value."""

    def made(factor: int) -> dict[str, Any]:
        return {
            "top": Level(factor),
            "objects": {0: Level(2 * factor), "one": [{1: Level(3 * factor), "t": torch.ones(1)}]},
            "values": {7: {"step": factor, True: [factor]}, "7": {"other": factor}, 8: torch.ones(2) * factor},
        }

    state, target = made(5), made(1)
    snap.save(state, writer, 1)
    level, deep = target["objects"][0], target["objects"]["one"][0][1]
    snap.load(target, reader, 1)
    assert [one.levels for one in (target["top"], level, deep)] == [Counter({30: n, 80: n}) for n in (5, 10, 15)]
    assert (target["objects"][0], target["objects"]["one"][0][1]) == (level, deep)
    assert [list(target[key]) for key in ("objects", "values")] == [[0, "one"], [7, "7", 8]]
    same(target["values"], state["values"])
    snap.save(target, writer, 2)  # a second key would be refused: it has the same name in DCP
    mapped = made(1)["values"]
    dcp.load({"values": mapped}, storage_reader=reader, checkpoint_id=2, planner=snap.SnapstoreLoadPlanner())
    same(mapped, state["values"])


def test_the_steps_of_an_optimizer_load(writer: Any, reader: Any) -> None:
    """SparseAdam's state has an int below the number of each parameter."""

    def trained(steps: int) -> tuple[Any, Any]:
        model = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
        for _ in range(steps):
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(5)
    other, target = trained(1)
    snap.save({"model": model, "optimizer": optimizer}, writer, 5)
    snap.load({"model": other, "optimizer": target}, reader, 5)
    same(target.state_dict(), optimizer.state_dict())


def in_training(kind: Any, steps: int, dtype: torch.dtype = torch.float32, width: int = 4) -> tuple[Any, Any]:
    """Return a model and its optimizer after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)).to(dtype)
    optimizer = kind(model.parameters())
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model: Any, optimizer: Any, steps: int) -> list[float]:
    """Train, and return the losses."""
    losses = []
    for step in range(steps):
        data = torch.full((2, 3), step + 1.0, dtype=next(model.parameters()).dtype)

        def closure(data: Any = data) -> Any:
            optimizer.zero_grad()
            loss = model(data).square().sum()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


SAVES = {
    "snapstore": lambda state, repository, writer: snap.save(state, writer, 1),
    "staged": lambda state, repository, writer: snap.async_save(state, writer, 1).result(),
    "dcp": lambda state, repository, writer: dcp.save(state, storage_writer=writer, checkpoint_id=1),
    "repository": lambda state, repository, writer: repository.save(state, run="r", step=1),
}


@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "LBFGS", "SGD", "Adafactor"])
def test_a_new_optimizer_gets_its_state(way: str, name: str, writer: Any, repository: Repository, reader: Any) -> None:
    """DCP loads only what the state has already, and a new optimizer has nothing. torch.save resumes exactly."""
    kind = getattr(torch.optim, name)
    model, optimizer = in_training(kind, 3)
    SAVES[way]({"model": model, "deep": {"optimizer": optimizer}}, repository, writer)
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    expected = go_on(model, optimizer, 3)
    for steps in (0, 1, 6):
        other, target = in_training(kind, steps)
        snap.load({"model": other, "deep": {"optimizer": target}}, reader, 1)
        same([other.state_dict(), target.state_dict()], states)
        assert go_on(other, target, 3) == expected
    other, target = in_training(kind, 0)
    other.load_state_dict(states[0])
    target.load_state_dict(states[1])
    assert go_on(other, target, 3) == expected


def test_what_torch_casts_keeps_its_dtype_and_what_does_not_fit_is_refused(writer: Any, reader: Any) -> None:
    model, optimizer = in_training(torch.optim.NAdam, 3, torch.bfloat16)
    snap.save({"optimizer": optimizer}, writer, 1)
    other, target = in_training(torch.optim.NAdam, 0, torch.bfloat16)
    snap.load({"optimizer": target}, reader, 1)
    same(target.state_dict(), optimizer.state_dict())
    for steps in (0, 1):
        other, target = in_training(torch.optim.NAdam, steps, torch.bfloat16, width=5)
        before = copy.deepcopy(target.state_dict())
        with pytest.raises(
            dcp.CheckpointException, match=r"optimizer.state.0.exp_avg: shape: expected \(5, 3\) as param"
        ):
            snap.load({"model": other, "optimizer": target}, reader, 1)
        same(target.state_dict(), before)
    groups = torch.optim.NAdam([{"params": [parameter]} for parameter in model.parameters()])
    with pytest.raises(dcp.CheckpointException, match="expected 4 groups of 1, 1, 1, 1 parameters"):
        snap.load({"optimizer": groups}, reader, 1)


@pytest.mark.parametrize("way", SAVES)
def test_dcps_own_load_does_not_leave_the_state_of_an_optimizer_out(
    way: str, writer: Any, repository: Repository, reader: Any
) -> None:
    """It cannot be completed there: DCP asks the optimizer for its state, and gives only that to the reader."""
    model, optimizer = in_training(torch.optim.AdamW, 2)
    SAVES[way]({"model": model, "optimizer": optimizer}, repository, writer)
    other, target = in_training(torch.optim.AdamW, 0)
    before = copy.deepcopy(other.state_dict())
    for planner in (None, snap.SnapstoreLoadPlanner()):
        state = {"model": other, "optimizer": target}
        with pytest.raises(
            dcp.CheckpointException, match=r"optimizer.state.0.step: .*call snapstore.dcp.load"
        ) as caught:
            dcp.load(state, storage_reader=reader, checkpoint_id=1, planner=planner)
        assert "get_optimizer_state_dict(model, optimizer)" in str(caught.value)
    with pytest.raises(dcp.CheckpointException, match="with the optimizer itself in `state`"):
        snap.load({"model": other, "optimizer": target.state_dict()}, reader, 1)
    same(other.state_dict(), before)
    dcp.load({"model": other}, storage_reader=reader, checkpoint_id=1)  # all of the optimizer may be left out
    same(other.state_dict(), model.state_dict())


class Log:
    """An object whose state grows: dicts, lists and tuples of tensors and values, and arrays."""

    def __init__(self, count: int) -> None:
        self.state = {number: {"mean": torch.ones(2) * number, "names": ["a"] * number} for number in range(count)}
        self.more: Any = {"array": np.arange(count), "pair": (1, "b"), "empty": {}, "list": [{}]} if count else {}
        self.tensors = [torch.ones(number + 1) for number in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"state": dict(self.state), "more": self.more, "tensors": self.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.more, self.tensors = state["state"], state["more"], state["tensors"]


class Holder:
    """An object with an object in its state."""

    def __init__(self, count: int) -> None:
        self.state: dict[str, Any] = {"log": Log(count), **{f"value {number}": number for number in range(count)}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_the_state_of_any_object_is_completed_or_refused(writer: Any, reader: Any) -> None:
    source = Log(3)
    snap.save({"own": {"log": PerRank(source)}, "logs": [torch.ones(1), Log(2)], "holder": Holder(2)}, writer, 1)
    for count in (0, 1, 3):
        target, listed = Log(count), Log(count)
        snap.load({"own": {"log": PerRank(target)}, "logs": [torch.ones(1), listed]}, reader, 1)
        same(target.state_dict(), source.state_dict())
        same(listed.state_dict(), Log(2).state_dict())
    holder, log = (made := Holder(1)), made.state["log"]
    with pytest.raises(
        dcp.CheckpointException, match=r"holder: the snapshot has values for this Holder .*restore_into"
    ):
        snap.load({"holder": holder}, reader, 1)
    assert (list(holder.state), holder.state["log"]) == (["log", "value 0"], log)
    same(log.state_dict(), Log(1).state_dict())
    fits = Holder(2)
    fits.state["log"] = Log(0)
    snap.load({"holder": fits}, reader, 1)
    same(fits.state["log"].state_dict(), Log(2).state_dict())


@pytest.mark.parametrize("before", [{}, {"a": {}}, [{}], [], ()])
def test_lists_with_something_empty_before_a_tensor_load(before: Any, writer: Any, reader: Any) -> None:
    """DCP's rewriting of sharded tensors puts None where nothing has a key; a load then missed that None."""
    snap.save({"list": [before, torch.ones(2)]}, writer, 1)
    target = {"list": [copy.deepcopy(before), torch.zeros(2)]}
    snap.load(target, reader, 1)
    same(target, {"list": [before, torch.ones(2)]})


KEYS = st.sampled_from(["a", "b", "0", "1", "", "x/y", 0, 1, -3, True, 1.5])
LEAVES = st.one_of(
    st.sampled_from([None, 1, 2.5, "text", b"bytes", (), (1, {"a": 2}), 2**70]),
    st.lists(st.integers(0, 2), max_size=3).map(lambda shape: torch.ones(shape)),
)
NESTED = st.recursive(
    LEAVES, lambda below: st.dictionaries(KEYS, below, max_size=3) | st.lists(below, max_size=3), max_leaves=12
)


def blanked(value: Any) -> Any:
    """Return a state with the same containers and tensors; the values are others, except in tuples."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blanked(child) for key, child in value.items()}
    return [blanked(child) for child in value] if isinstance(value, list) else "blank"


@given(st.dictionaries(st.sampled_from("abc"), NESTED, min_size=1))
def test_every_nested_state_loads_into_its_own_shape(state: dict[str, Any]) -> None:
    with Repository.create(MemoryStore()) as repository:
        try:
            with contextlib.closing(snap.SnapstoreWriter(repository, run="r")) as writer:
                snap.save(state, writer, 1)
        except dcp.CheckpointException as error:
            assume("duplicated flatten key" not in str(error))
            raise
        target = blanked(state)
        snap.load(target, snap.SnapstoreReader(repository, run="r"), 1)
        same(target, state)


class Drawing(Loader):
    """A loader that starts its workers when it loads, and so draws a random number."""

    def __init__(self, position: int, log: list[int]) -> None:
        super().__init__(position)
        self.log, self.first = log, position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"position": state["position"], "order": state["order"]})
        torch.rand(1)
        self.log.append(self.first)


class Holding(Drawing):
    """A loader with an object in its state."""

    def __init__(self, position: int, log: list[int]) -> None:
        super().__init__(position, log)
        self.inner = Drawing(position + 1, log)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"inner": self.inner}


class LastOfAll(Drawing):
    load_last = True


def test_objects_load_in_the_order_of_their_keys_and_generators_last(writer: Any, reader: Any) -> None:
    """The objects of `own` would draw random numbers after the generators were loaded."""
    log: list[int] = []

    def made() -> dict[str, Any]:
        return {
            "a": LastOfAll(1, log), "b": Drawing(2, log), "rng": RngState(), "z": Holding(8, log),
            "own": {
                "generators": PerRank(RngState()), "list": [Drawing(3, log), Drawing(4, log)],
                "loader": PerRank(Drawing(5, log)), "rng": RngState(), "torch": Holding(6, log),
            },
        }  # fmt: skip

    snap.save(made(), writer, 1)
    drawn = torch.rand(3)
    target = made()
    inner = target["own"]["torch"].inner
    snap.load(target, reader, 1)
    assert torch.equal(torch.rand(3), drawn)
    assert log == [2, 9, 8, 3, 4, 5, 7, 6, 1]
    assert target["own"]["torch"].inner is inner


def test_an_async_save_keeps_the_values_of_its_call(writer: Any, reader: Any) -> None:
    state = state_of(1)
    before = pickle.loads(pickle.dumps(plain(state)))
    futures = dcp.async_save(state, storage_writer=writer, checkpoint_id=1)
    for value in (*state["model"].values(), *[v for s in state["optimizer"]["state"].values() for v in s.values()]):
        value.fill_(-1)
    state["names"].append("later")
    state["mixed"][0]["deep"][1] = "later"
    state["optimizer"]["param_groups"][0]["lr"] = "later"
    state["model"]["later"] = torch.ones(1)
    futures.result()
    same(loaded(reader, 1, before), before)


def test_an_async_save_keeps_views_dtypes_and_empty_tensors(writer: Any, reader: Any) -> None:
    """Tensors that share memory, whole, in part and turned; every dtype; no elements, in any number of dimensions."""
    base = torch.randn(10, 10)
    views = {"rows": base[2:8], "box": base[2:8, 2:8], "flat": base.view(100)[10:60], "turned": base.t(), "base": base}
    dtypes = "float64 float16 bfloat16 float8_e4m3fn int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64"
    state = views | {name: (torch.rand(4, 5) * 9).to(getattr(torch, name)) for name in dtypes.split()}
    state |= {f"empty{n}": torch.empty((0,) * n) for n in (1, 2, 3)} | {"scalar": torch.tensor(0.5)}
    before = {key: value.clone() for key, value in state.items()}
    future = dcp.async_save(state, storage_writer=writer, checkpoint_id=1)
    for value in state.values():
        value.zero_()
    future.result()
    target = {key: torch.ones(value.shape).to(value.dtype) for key, value in before.items()}
    dcp.load(target, storage_reader=reader, checkpoint_id=1)
    same(target, before)


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_a_save_does_not_keep_the_callers_tensors(way: str, writer: Any) -> None:
    value = torch.randn(5000)
    kept = weakref.ref(value)
    done = getattr(dcp, way)({"a": value, "b": {"c": [value]}}, storage_writer=writer, checkpoint_id=1)
    result = done.result() if way == "async_save" else done
    del value
    gc.collect()
    assert kept() is None
    assert result.storage_meta.save_id == writer.snapshot.id


def test_async_saves_do_not_add_memory(writer: Any) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    state = {"w": torch.randn(4_000_000)}
    for step in range(10):
        if step == 3:
            before = resident()
        dcp.async_save(state, storage_writer=writer, checkpoint_id=step).result()
    assert resident() - before < 3 * state["w"].nbytes  # of seven saves


def test_async_saves_follow_each_other_and_the_second_is_a_delta(writer: Any, reader: Any) -> None:
    state = {"w": torch.randn(200_000), "step": 0}
    for step in range(4):
        state["w"][step] += 1
        state["step"] = step
        dcp.async_save(state, storage_writer=writer, checkpoint_id=step).result()
        assert writer.snapshot.step == step
    assert writer.snapshot.stored_bytes < 200_000
    assert loaded(reader, 3, state)["w"].equal(state["w"])


class Blocked:
    """Blocks the first call of a method of a writer until it is released."""

    def __init__(self, writer: Any, name: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        call = getattr(writer, name)

        def first(*args: Any, **kwargs: Any) -> Any:
            delattr(writer, name)
            self.reached.set()
            assert self.go.wait(30)
            return call(*args, **kwargs)

        setattr(writer, name, first)


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_a_save_waits_for_an_async_save_that_runs(way: str, writer: Any, repository: Repository) -> None:
    for step, hook in enumerate(HOOKS):
        blocked = Blocked(writer, hook)
        future = snap.async_save({"a": torch.ones(3000) * step}, writer, 2 * step)
        assert blocked.reached.wait(30)
        timer = threading.Timer(0.05, blocked.go.set)
        timer.start()
        done = getattr(snap, way)({"a": torch.ones(3000) / 2}, writer, 2 * step + 1)
        assert future.done()
        future.result()
        done.result() if way == "async_save" else None
        timer.join()
    assert [s.step for s in repository.snapshots("r")] == list(range(2 * len(HOOKS)))


@pytest.mark.parametrize("way", ["save", "async_save"])
@pytest.mark.parametrize("first", [{"a": torch.ones(3000)}, {"a": object()}], ids=["committed", "failed"])
def test_a_callback_of_an_async_save_may_save_again(first: Any, way: str, writer: Any, repository: Repository) -> None:
    seconds: list[Any] = []
    ended = threading.Event()

    def again(future: Any) -> None:
        seconds.append(getattr(snap, way)({"a": torch.zeros(3000)}, writer, 2))
        ended.set()

    future = snap.async_save(first, writer, 1)
    future.add_done_callback(again)
    try:
        assert ended.wait(30)
    finally:
        writer.idle.set()  # the thread ends, also if it hangs
    if way == "async_save":
        seconds[0].result()
    steps = [1, 2] if future.exception() is None else [2]
    assert [s.step for s in repository.snapshots("r")] == steps


def test_a_save_of_dcp_that_begins_before_another_has_ended(writer: Any, store: MemoryStore) -> None:
    """DCP does not tell a writer that its save has ended: the later save is committed, the other one says why not."""
    for step, hook in enumerate(HOOKS):
        blocked = Blocked(writer, hook)
        future = dcp.async_save({"a": torch.ones(3000)}, storage_writer=writer, checkpoint_id=2 * step)
        assert blocked.reached.wait(30)
        dcp.save({"a": torch.ones(3000) / 2}, storage_writer=writer, checkpoint_id=2 * step + 1)
        blocked.go.set()
        if hook == "set_up_storage_writer":  # nothing has begun
            future.exception()
            continue
        with pytest.raises(dcp.CheckpointException, match="another save of this SnapstoreWriter began"):
            future.result()
        assert writer.snapshot.step == 2 * step + 1
        assert not sessions(store)


def test_a_session_that_opens_while_another_save_begins(
    writer: Any, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overtaken save ends its own session, and leaves that of the other one alone."""
    reached, go, enter = threading.Event(), threading.Event(), SaveSession.__enter__

    def slow(session: SaveSession) -> SaveSession:
        found = enter(session)
        if session.step == 1:
            reached.set()
            assert go.wait(30)
        return found

    monkeypatch.setattr(SaveSession, "__enter__", slow)
    future = dcp.async_save({"a": torch.ones(3000)}, storage_writer=writer, checkpoint_id=1)
    assert reached.wait(30)
    blocked = Blocked(writer, "write_data")
    other = dcp.async_save({"a": torch.ones(3000) / 2}, storage_writer=writer, checkpoint_id=2)
    assert blocked.reached.wait(30)
    go.set()
    with pytest.raises(dcp.CheckpointException, match="another save of this SnapstoreWriter began"):
        future.result()
    assert len(sessions(store)) == 1
    blocked.go.set()
    other.result()
    assert writer.snapshot.step == 2
    assert not sessions(store)


def test_threads_that_save_with_one_writer(writer: Any, repository: Repository, store: MemoryStore) -> None:
    """The save that begins last is committed, under its own step; a thread that fails does not end it."""
    start = threading.Barrier(4)

    def work(step: int) -> None:
        start.wait(30)
        with suppress(dcp.CheckpointException):
            snap.save({"a": torch.full((3000,), float(step))}, writer, step)

    for first in range(0, 20, 4):
        together([partial(work, first + number) for number in range(4)])
        assert not sessions(store)
    for snapshot in repository.snapshots("r"):
        assert repository.restore(f"id:{snapshot.id}")["a"].unique().tolist() == [snapshot.step]


def test_the_writer_is_its_own_stager(writer: Any) -> None:
    assert isinstance(writer, AsyncStager)
    assert not writer.should_synchronize_after_execute
    staged = writer.stage(state_of())
    assert len(staged) == 1
    assert not any(isinstance(value, torch.Tensor) for value in staged.values())


def test_a_state_that_was_staged_for_nothing_is_not_saved_later(writer: Any, reader: Any) -> None:
    """A stage whose save never came must not give a later save its values."""
    state = {"a": torch.zeros(3000)}
    writer.stage(state)
    state["a"].fill_(1)
    dcp.save(state, storage_writer=writer, checkpoint_id=1)
    assert loaded(reader, 1, state)["a"].unique().tolist() == [1]


def test_copies_that_a_later_stage_has_taken_over_are_refused(writer: Any, store: MemoryStore) -> None:
    state = {"a": torch.zeros(3000)}
    first = writer.stage(state)
    state["a"].fill_(1)
    writer.stage(state)
    with pytest.raises(dcp.CheckpointException, match="before this one was written"):
        dcp.save(first, storage_writer=writer, checkpoint_id=1)
    assert not sessions(store)


def test_another_stager_may_be_given(writer: Any, reader: Any) -> None:
    state = state_of(2)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    dcp.async_save(state, storage_writer=writer, checkpoint_id=1, async_stager=stager).result()
    same(loaded(reader, 1, state)["model"], plain(state)["model"])
    stager.close()


def test_an_error_of_an_async_save_is_the_futures(repository: Repository) -> None:
    """Also one of the copy: a rank that raised it in its caller would leave the others in DCP's collectives."""
    writer = snap.SnapstoreWriter(repository, run="r")
    for value, text in ((object(), "no stored form"), (io.BytesIO(b"x"), "store its bytes, as getvalue")) * 2:
        future = dcp.async_save({"a": value}, storage_writer=writer, checkpoint_id=1)
        with pytest.raises(dcp.CheckpointException, match=text):
            future.result()
    future = dcp.async_save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id="none")
    with pytest.raises(dcp.CheckpointException, match="step"):
        future.result()
    dcp.async_save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id=2).result()
    assert [s.step for s in repository.snapshots("r")] == [2]
    writer.close()


class Broken:
    def state_dict(self) -> dict[str, Any]:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("broken") from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize(("bad", "text"), [(object(), "no stored form"), (Broken(), "KeyError: 'first'")])
def test_a_copy_that_fails_keeps_no_tensor(bad: Any, text: str, writer: Any) -> None:
    """The error waits for DCP's save in a thread; it keeps neither the caller's tensors nor copies."""
    value = torch.randn(5000)
    kept = weakref.ref(value)
    future = snap.async_save({"a": value, "b": {"c": [value]}, "d": [bad]}, writer, 1)
    error = future.exception()
    assert text in str(error)
    del value
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("checkpoint_id", [1, "none"])
def test_an_async_save_that_has_ended_keeps_no_tensor(checkpoint_id: Any, writer: Any) -> None:
    """Also one that failed before the copies were read: the writer keeps neither them nor the caller's tensors."""
    value = torch.randn(5000)
    kept = weakref.ref(value)
    future = dcp.async_save({"a": value}, storage_writer=writer, checkpoint_id=checkpoint_id)
    assert (future.exception() is None) == (checkpoint_id == 1)
    del value, future
    gc.collect()
    assert kept() is None


# --- modes that are refused ---


def test_process_mode_is_refused_with_the_reason(writer: Any, repository: Repository, reader: Any) -> None:
    for value in (writer, reader, writer.stage({"a": torch.ones(2)})):
        with pytest.raises(InvalidInputError, match=r"AsyncCheckpointerType\.THREAD"):
            pickle.dumps(value)
    assert "THREAD" in AsyncCheckpointerType.__members__  # the name in the error is torch's


def test_without_collectives_is_refused_with_the_reason(writer: Any, store: MemoryStore) -> None:
    with pytest.raises(InvalidInputError, match="use_collectives=False"):
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id=1, use_collectives=False)
    assert not sessions(store)


# --- planners ---


class Renaming(DefaultSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner({"foo_" + key: value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class Halving(DefaultSavePlanner):
    def create_local_plan(self):
        return super().create_local_plan()

    def resolve_data(self, write_item):
        value = super().resolve_data(write_item)
        return value if write_item.type is WriteItemType.BYTE_IO else value.to(torch.float16)


class Skipping(DefaultSavePlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        items = [item for item in plan.items if "frozen" not in item.index.fqn]
        return SavePlan(items, plan.storage_data, plan.planner_data, plan.usable)


class Reshaping(DefaultSavePlanner):
    def transform_object(self, write_item, object):
        return (
            object.reshape(-1)[:1] if isinstance(object, torch.Tensor) else super().transform_object(write_item, object)
        )


class Splitting(DefaultSavePlanner):
    """Gives several write items of a tensor: runs of its rows, as they are, or halved."""

    def __init__(self, *, halve: bool = False, leave_out: int = 0) -> None:
        super().__init__()
        self.halve, self.leave_out = halve, leave_out

    def create_local_plan(self):
        plan, items = super().create_local_plan(), []
        for item in plan.items:
            data = item.tensor_data
            if data is None or not len(data.size):
                items.append(item)
                continue
            for row in range(0, data.size[0], 2):
                place = torch.Size([row, *[0] * (len(data.size) - 1)])
                chunk = ChunkStorageMetadata(place, torch.Size([min(2, data.size[0] - row), *data.size[1:]]))
                index = MetadataIndex(item.index.fqn, place)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=dataclasses.replace(data, chunk=chunk)))
        return SavePlan(items[self.leave_out :], plan.storage_data, plan.planner_data)

    def resolve_data(self, write_item):
        if write_item.type is not WriteItemType.SHARD:
            return super().resolve_data(write_item)
        chunk, value = write_item.tensor_data.chunk, self.state_dict[write_item.index.fqn]
        rows = value[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]
        return rows.to(torch.float16) if self.halve else rows


class Foreign(SavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.held = state_dict

    def create_local_plan(self):
        return SavePlan([])

    def create_global_plan(self, all_plans):
        return all_plans, dcp.Metadata({})

    def finish_plan(self, new_plan):
        return new_plan

    def resolve_data(self, write_item):
        raise AssertionError


def test_a_planner_may_rename_change_and_leave_out(writer: Any, repository: Repository) -> None:
    state = {"a": {"w": torch.rand(3, 4), "frozen": torch.ones(2)}, "n": 3}
    for step, planner in enumerate((Renaming(), Halving(), Skipping())):
        dcp.save(state, storage_writer=writer, checkpoint_id=step, planner=planner)
    same(repository.restore("r@0"), {"foo_a": state["a"], "foo_n": 3})
    same(repository.restore("r@1"), {"a": {key: value.half() for key, value in state["a"].items()}, "n": 3})
    same(repository.restore("r@2"), {"a": {"w": state["a"]["w"]}, "n": 3})


@pytest.mark.parametrize("halve", [False, True])
def test_a_planner_may_give_several_items_of_a_tensor(halve: bool, writer: Any, repository: Repository) -> None:
    """Pieces of the tensor as it is store it as a plain save does; changed ones are put together."""
    state = {"a": {"w": torch.rand(5, 500), "s": torch.tensor(2.5)}, "n": 3}
    dcp.save(state, storage_writer=writer, checkpoint_id=1)
    dcp.save(state, storage_writer=writer, checkpoint_id=2, planner=Splitting(halve=halve))
    w = state["a"]["w"].half() if halve else state["a"]["w"]
    same(repository.restore("r@2"), {"a": {"w": w, "s": state["a"]["s"]}, "n": 3})
    assert (writer.snapshot.new_chunks == 0) == (not halve)
    if halve:
        with pytest.raises(dcp.CheckpointException, match=r"a\.w: Splitting changes it and omits 1000 el"):
            dcp.save(state, storage_writer=writer, checkpoint_id=3, planner=Splitting(halve=True, leave_out=1))


def test_a_planner_that_cannot_be_followed_is_refused(writer: Any, repository: Repository, store: MemoryStore) -> None:
    state = {"w": torch.rand(3, 4)}
    for planner, text in ((Foreign(), "subclass of DefaultSavePlanner"), (Reshaping(), "returns shape \\(1,\\)")):
        with pytest.raises(dcp.CheckpointException, match=text):
            dcp.save(state, storage_writer=writer, checkpoint_id=1, planner=planner)
    with pytest.raises(dcp.CheckpointException, match="async_stager="):
        dcp.async_save(state, storage_writer=writer, checkpoint_id=1, planner=Renaming()).result()
    assert not sessions(store)
    assert not repository.snapshots("r")
    stager = DefaultStager(StagingOptions(False, False, False, False))
    dcp.async_save(state, storage_writer=writer, checkpoint_id=1, planner=Renaming(), async_stager=stager).result()
    same(repository.restore("r@1"), {"foo_w": state["w"]})


@pytest.mark.parametrize("flatten", [True, False])
def test_a_planner_may_leave_the_state_nested(flatten: bool, writer: Any, repository: Repository) -> None:
    state = {"a": {"w": torch.rand(3)}, "n": 3}
    dcp.save(state, storage_writer=writer, checkpoint_id=1, planner=DefaultSavePlanner(flatten_state_dict=flatten))
    same(repository.restore("r@1"), state)


def test_the_plan_cache_works(writer: Any, reader: Any) -> None:
    class Cached(DefaultSavePlanner):  # a class of its own: the cache goes by its name
        pass

    class CachedSkipping(Skipping):
        pass

    for step in range(4):
        state = state_of(step % 2) | ({"more": torch.ones(3)} if step == 2 else {})
        for run, kind in (("r", Cached), ("s", CachedSkipping)):
            one = snap.SnapstoreWriter(writer.repository, run=run)
            state["frozen"] = torch.ones(1)
            dcp.save(state, storage_writer=one, checkpoint_id=step, planner=kind(enable_plan_caching=True))
            got = loaded(snap.SnapstoreReader(writer.repository, run=run), step, got_keys(state, run))
            same(got, plain(got_keys(state, run)))
            one.close()


def got_keys(state: dict[str, Any], run: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if run == "r" or key != "frozen"}


# --- loads ---


def test_a_key_that_is_missing_is_an_error_unless_partial_loads_are_allowed(writer: Any, reader: Any) -> None:
    dcp.save({"a": torch.ones(3), "n": 1}, storage_writer=writer, checkpoint_id=1)
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: b"):
        dcp.load({"a": torch.zeros(3), "b": torch.zeros(3)}, storage_reader=reader, checkpoint_id=1)
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=reader, checkpoint_id=1, planner=planner)
    assert (state["a"].tolist(), state["b"].tolist()) == ([1] * 3, [0] * 3)
    state = {"a": torch.zeros(3)}  # and fewer keys may be asked for
    dcp.load(state, storage_reader=reader, checkpoint_id=1)
    assert state["a"].tolist() == [1] * 3


def test_another_shape_or_sort_is_an_error_and_nothing_is_written(writer: Any, reader: Any) -> None:
    dcp.save({"a": torch.ones(3, 4), "n": 1}, storage_writer=writer, checkpoint_id=1)
    for state, text in (
        ({"a": torch.zeros(4, 3)}, "Size mismatch"),
        ({"a": "text"}, "Invalid checkpoint metadata for a"),
    ):
        with pytest.raises(dcp.CheckpointException, match=text):
            dcp.load(state, storage_reader=reader, checkpoint_id=1)
    state = {"n": torch.zeros(1), "a": torch.zeros(3, 4)}  # a value replaces whatever is there
    dcp.load(state, storage_reader=reader, checkpoint_id=1)
    assert state["n"] == 1


def test_a_tensor_of_another_dtype_gets_the_values_and_a_warning(writer: Any, reader: Any, caplog: Any) -> None:
    values = torch.randn(5000)
    dcp.save({"a": values, "b": values}, storage_writer=writer, checkpoint_id=1)
    state = {"a": torch.zeros(5000, dtype=torch.bfloat16), "b": torch.zeros(5000)}
    dcp.load(state, storage_reader=reader, checkpoint_id=1)
    assert state["a"].equal(values.bfloat16())
    assert state["b"].equal(values)
    assert "casting 1 tensor to the dtypes given: a" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_targets_need_equal_values_also_if_they_are_cast(dtype: Any, repository: Repository, reader: Any) -> None:
    near = torch.full((8,), 1.0009765625)  # 1 in bfloat16
    repository.save({"a": torch.ones(8), "b": torch.ones(8), "c": near, "d": near * 3}, run="r", step=1)
    tied = torch.zeros(8, dtype=dtype)
    snap.load({"a": tied, "b": tied}, reader, 1)
    assert tied.tolist() == [1.0] * 8
    rows = torch.zeros(3, 8, dtype=dtype)
    for state in ({"a": tied, "d": tied}, {"a": rows[0], "d": rows.view(-1)[4:12]}):
        with pytest.raises(dcp.CheckpointException, match="shares memory with another array in the target"):
            snap.load(state, reader, 1)
    if dtype == torch.bfloat16:
        snap.load({"a": tied, "c": tied}, reader, 1)
        assert tied.tolist() == [1.0] * 8


CASTING_LOAD = """
import sys
import torch
from pathlib import Path
from snapstore import dcp

reader = dcp.SnapstoreReader(sys.argv[1], run="r")
state = {f"w{n}": torch.zeros(2**20, dtype=torch.bfloat16) for n in range(64)}
dcp.load({"w0": state["w0"]}, reader, 1)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
dcp.load(state, reader, 1)
print(peak() - before)
assert all(value.equal((torch.arange(2.0**20) + n).bfloat16()) for n, value in enumerate(state.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory without Linux")
def test_a_load_that_casts_does_not_hold_a_second_state(tmp_path: Path) -> None:
    """Values arrive in memory of the stored dtype, which is freed when an array is complete."""
    with Repository.create(tmp_path / "repository") as repository:
        repository.save({f"w{n}": torch.arange(2.0**20) + n for n in range(64)}, run="r", step=1)
    out = run_python("-c", CASTING_LOAD, tmp_path / "repository")
    assert out.returncode == 0, out.stderr
    added_kib = int(out.stdout)
    assert added_kib < 64 * 4 * 1024 * 3 // 4, added_kib


def test_a_load_that_casts_is_refused_if_its_memory_is_not_there(
    reader: Any, repository: Repository, monkeypatch: Any
) -> None:
    values = torch.arange(float(2**23))
    repository.save({"w": values}, run="r", step=1)
    monkeypatch.setenv("SNAPSTORE_MAX_MEMORY", "20M")
    target = torch.zeros(len(values), dtype=torch.bfloat16)
    with pytest.raises(dcp.CheckpointException, match=r"needs 33\.6MB"):
        snap.load({"w": target}, reader, 1)
    assert not target.any()
    snap.load({"w": torch.zeros(len(values))}, reader, 1)


def test_targets_may_be_strided_tied_and_need_gradients(writer: Any, reader: Any) -> None:
    values = torch.randn(300, 50)
    dcp.save({"a": values, "b": values[:, :7], "c": values, "p": values}, storage_writer=writer, checkpoint_id=1)
    tied = torch.zeros(300, 50)
    state = {
        "a": torch.zeros(50, 300).t(), "b": torch.zeros(300, 90)[:, 3:10], "c": tied, "d": tied,
        "p": torch.nn.Parameter(torch.zeros(300, 50)),
    }  # fmt: skip
    targets = dict(state)
    dcp.load(state, storage_reader=reader, checkpoint_id=1, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert all(state[key] is targets[key] for key in state)
    assert state["a"].equal(values)
    assert state["b"].equal(values[:, :7])
    assert state["p"].equal(values)
    assert tied.equal(values)


def test_tied_tensors_are_loaded_into_each_of_their_keys(writer: Any, reader: Any) -> None:
    weight = torch.randn(500, 20)
    dcp.save({"m": {"emb": weight, "head": weight}, "o": {"w": weight}}, storage_writer=writer, checkpoint_id=1)
    state = {"m": {"emb": torch.zeros(500, 20), "head": torch.zeros(500, 20)}, "o": {"w": torch.zeros(500, 20)}}
    dcp.load(state, storage_reader=reader, checkpoint_id=1)
    assert all(value.equal(weight) for value in (*state["m"].values(), state["o"]["w"]))
    assert writer.snapshot.logical_bytes < 2 * 500 * 20 * 4 + 1000


class RenamingLoad(DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.given = state_dict
        super().set_up_planner({"foo_" + key: value for key, value in state_dict.items()}, metadata, is_coordinator)

    def load_bytes(self, read_item, value):
        self.given[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class Materializing(DefaultLoadPlanner):
    def resolve_tensor(self, read_item):
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item, tensor):
        self.original_state_dict[read_item.dest_index.fqn] = tensor


def test_a_load_planner_may_rename_and_replace(writer: Any, reader: Any) -> None:
    dcp.save({"foo_a": torch.ones(3), "foo_n": 4}, storage_writer=writer, checkpoint_id=1)
    state = {"a": torch.zeros(3), "n": 0}
    dcp.load(state, storage_reader=reader, checkpoint_id=1, planner=RenamingLoad())
    assert (state["a"].tolist(), state["n"]) == ([1] * 3, 4)
    state = {"foo_a": torch.zeros(3)}
    _load_state_dict(state, reader_at(reader, 1), planner=Materializing(), no_dist=True)
    assert state["foo_a"].tolist() == [1] * 3


def test_a_state_is_made_from_the_metadata_alone(writer: Any, reader: Any) -> None:
    state = state_of(1)
    dcp.save(state, storage_writer=writer, checkpoint_id=1)
    made: dict[str, Any] = {}
    _load_state_dict(made, reader_at(reader, 1), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    same(made, plain(state))
    some = _load_state_dict_from_keys({"model", "step"}, checkpoint_id=1, storage_reader=reader)
    same(some, {"model": plain(state["model"]), "step": 1})
    some = _load_state_dict_from_keys("optimizer.state", checkpoint_id=1, storage_reader=reader)
    same(some, {"optimizer": {"state": plain(state["optimizer"]["state"])}})


def reader_at(reader: Any, checkpoint_id: Any) -> Any:
    reader.reset(checkpoint_id)
    return reader


# --- failures ---


def test_a_save_that_fails_anywhere_commits_nothing_and_leaves_no_session() -> None:
    """Fail each store operation of a save in turn; then the same writer saves."""
    failed = 0
    for number in range(200):
        inner = MemoryStore()
        Repository.create(inner).close()
        store = FaultStore(inner)
        with Repository.open(store) as repository:
            writer = snap.SnapstoreWriter(repository, run="r")
            state = {"a": torch.arange(3000.0), "n": number}
            store.at = at = len(store.log) + number
            try:
                dcp.save(state, storage_writer=writer, checkpoint_id=1)
            except dcp.CheckpointException:
                failed += 1
                assert not repository.snapshots("r")
            fired = store.fired
            store.heal()
            state["a"] += 1
            dcp.save(state, storage_writer=writer, checkpoint_id=2)
            assert repository.restore("r@2")["a"].equal(state["a"])
            writer.close()
            if not fired:
                break
            assert not sessions(inner) or store.log[at][0] == "release"  # it ended, and a gc takes what is left
    assert failed > 5


HOOKS = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
READER_HOOKS = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")


def test_a_hook_that_fails_fails_the_call_and_not_the_next_one(writer: Any, reader: Any, store: MemoryStore) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("injected")

    for step, hook in enumerate(HOOKS):
        setattr(writer, hook, fail)
        with pytest.raises(dcp.CheckpointException, match="injected") as caught:
            dcp.save({"a": torch.zeros(3)}, storage_writer=writer, checkpoint_id=step)
        assert caught.value.failures.keys() == {0}
        delattr(writer, hook)
        dcp.save({"a": torch.full((3,), float(step))}, storage_writer=writer, checkpoint_id=step)
        assert not sessions(store), hook
    for hook in READER_HOOKS:
        setattr(reader, hook, fail)
        with pytest.raises(dcp.CheckpointException, match=r"injected|metadata is None"):  # see `unloadable`
            loaded(reader, 2, {"a": torch.zeros(3)})
        delattr(reader, hook)
        assert loaded(reader, 2, {"a": torch.zeros(3)})["a"].tolist() == [2] * 3


def test_a_session_that_another_ranks_failure_leaves_open_ends(writer: Any, store: MemoryStore) -> None:
    """DCP calls nothing on rank 0 when another rank fails: reset, the next save, or close ends the session."""

    def begun() -> None:
        writer.reset(1)
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        writer.prepare_global_plan([writer.prepare_local_plan(SavePlan([]))])
        assert len(sessions(store)) == 1

    begun()
    writer.reset(2)
    assert not sessions(store)
    begun()
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    assert not sessions(store)
    begun()
    writer.close()
    assert not sessions(store)


def test_threads_may_load_different_steps_with_one_reader(writer: Any, reader: Any) -> None:
    """Each thread gets the step that it asks for, whatever another one asks for between two calls of DCP."""
    for step in range(3):
        snap.save({"w": torch.full((9,), float(step)), "n": step}, writer, step)
    at_once, found = threading.Barrier(3, timeout=60), list[Any]()
    calls = reader.read_metadata, reader.read_data

    def met(call: Any) -> Any:
        def wait_and_call(*args: Any) -> Any:
            at_once.wait()
            return call(*args)

        return wait_and_call

    reader.read_metadata, reader.read_data = map(met, calls)

    def load(step: int) -> None:
        state = {"w": torch.zeros(9), "n": -1}
        snap.load(state, reader, step)
        found.append((step, state["n"], state["w"].tolist()))

    together([partial(load, step) for step in range(3)])
    assert sorted(found) == [(step, step, [step] * 9) for step in range(3)]
    reader.read_metadata, reader.read_data = calls
    reader.reset(1)
    (another := threading.Thread(target=reader.read_metadata)).start()  # without an id of its own
    another.join()
    assert reader.snapshot.step == 1


def test_a_damaged_chunk_is_an_error_and_not_a_value(store: MemoryStore, repository: Repository, reader: Any) -> None:
    repository.save({"a": torch.randn(50_000)}, run="r", step=1)
    key = next(info.key for info in store.list("packs/"))
    flip(store, key, 5000)
    with pytest.raises(dcp.CheckpointException, match="IntegrityError"):
        dcp.load({"a": torch.zeros(50_000)}, storage_reader=reader, checkpoint_id=1)


def test_a_step_that_is_saved_again_is_the_newest(writer: Any, reader: Any) -> None:
    for value in (1.0, 2.0):
        dcp.save({"a": torch.full((3,), value)}, storage_writer=writer, checkpoint_id=1)
    assert loaded(reader, 1, {"a": torch.zeros(3)})["a"].tolist() == [2.0] * 3


def test_a_writer_makes_the_repository_and_a_reader_does_not(tmp_path: Any) -> None:
    with pytest.raises(NotFoundError):
        snap.SnapstoreReader(tmp_path / "none", run="r")
    writer = snap.SnapstoreWriter(tmp_path / "new", run="r")
    snap.save({"a": torch.ones(2)}, writer, 1)
    writer.close()
    reader = snap.SnapstoreReader(tmp_path / "new", run="r")
    assert loaded(reader, 1, {"a": torch.zeros(2)})["a"].tolist() == [1, 1]
    reader.close()
    with pytest.raises(InvalidInputError, match="run"):
        snap.SnapstoreWriter(tmp_path / "new", run="a/b")


def test_a_save_that_gets_no_thread_for_heartbeats_leaves_no_session(
    writer: Any, store: MemoryStore, monkeypatch: Any
) -> None:
    start = threading.Thread.start

    def without_heart(thread: threading.Thread) -> None:
        if thread.name == "snapstore-heart":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", without_heart)
        with pytest.raises(dcp.CheckpointException, match="CapabilityError"):
            dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id=1)
    assert not sessions(store)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id=2)
