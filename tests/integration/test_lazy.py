"""Lazy tensors: any slice is what NumPy and torch give, and reads exactly the chunks that hold its elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kit.objects import flip, keys_of
from kit.rank_snapshots import RankWriter, columns, rows, strided
from kit.repositories import created, decoded_chunks, opened, same
from kit.samples import examples
from snapstore import (
    CapabilityError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    LazyTensors,
    NotFoundError,
    Repository,
    TensorHandle,
)
from snapstore.format.chunking import INLINE_BYTES
from snapstore.format.manifests.manifest import ManifestContents
from snapstore.inspect import lazy
from snapstore.retention import KeepLast

CHUNK_BYTES = 1024
SHAPES: dict[str, tuple[int, ...]] = {
    "line": (3000,), "table": (70, 90), "tall": (1500, 2), "cube": (11, 12, 13), "deep": (3, 1, 4, 5, 30),
    "scalar": (), "small": (3, 4), "empty": (0, 5), "one": (1, 1, 1900),
}  # fmt: skip


def arrays(version: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    found = {}
    for name, shape in SHAPES.items():
        found[name] = rng.standard_normal(shape).astype(np.float32)
        found[name].reshape(-1)[:: 50 + version] += np.float32(version) / 100
    return found


def tensors(version: int = 0) -> dict[str, Any]:
    """Return the same as torch tensors of several element sizes: one a parameter, one not contiguous, two tied."""
    own = {name: torch.from_numpy(value) for name, value in arrays(version).items()}
    own["line"] = own["line"].to(torch.bfloat16)
    own["cube"] = torch.nn.Parameter(own["cube"].double())
    own["tall"] = own["tall"].t().contiguous().t()
    own["deep"] = torch.complex(own["deep"], own["deep"])
    return {**own, "tied": own["table"], "count": 7}


@pytest.fixture(scope="module")
def repository() -> Iterator[Repository]:
    """Runs `arrays` and `tensors` of one process, with chains; runs `rows`, `columns`, `strided` of three ranks."""
    store = created(CHUNK_BYTES)
    with opened(store) as repository:
        for step in range(3):
            repository.save({"model": arrays(step), "step": step}, run="arrays", step=step)
            repository.save({"model": tensors(step)}, run="tensors", step=step)
        assert repository.snapshot("arrays@2").depth > 0
    for name, cut in {"rows": rows, "columns": columns, "strided": strided}.items():
        writer = RankWriter(store)
        for step in range(2):
            writer.save({"": {}, "model": arrays(step)}, step=step, world=3, cut=cut, run=name)
    with opened(store) as repository:
        yield repository


@pytest.fixture(scope="module")
def lazily(repository: Repository) -> dict[str, LazyTensors]:
    refs = ("arrays@2", "tensors@1", "rows@1", "columns@1", "strided@1")
    return {ref: repository.tensors(ref) for ref in refs}


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of chunks that each batch decodes."""
    return decoded_chunks(monkeypatch)


def needed(value: np.ndarray, index: Any) -> int:
    """Count the chunks that hold an element of a selection; one process saved the tensor."""
    if value.nbytes < INLINE_BYTES:  # inline, in the manifest
        return 0
    numbers = np.arange(value.size).reshape(value.shape)[index]
    return len(np.unique(numbers * value.itemsize // CHUNK_BYTES))


def indices(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Draw any basic index of NumPy, without None and without negative steps."""
    one = [
        st.one_of(
            st.slices(size).filter(lambda s: s.step is None or s.step > 0),
            *([st.integers(-size, size - 1)] if size else []),
        )
        for size in shape
    ]
    cut = st.integers(0, len(shape))

    @st.composite
    def build(draw: Any) -> Any:
        full = [draw(each) for each in one]
        first, last = sorted((draw(cut), draw(cut)))
        dots = draw(st.booleans())
        found = [*full[:first], ..., *full[last:]] if dots else full[:last]
        return found[0] if len(found) == 1 and draw(st.booleans()) else tuple(found)

    return build()


cases = st.sampled_from(sorted(SHAPES)).flatmap(lambda name: st.tuples(st.just(name), indices(SHAPES[name])))


@settings(max_examples=examples(80), deadline=None)
@given(case=cases, small_pieces=st.booleans())
def test_any_slice(case, small_pieces, lazily):
    """Slices of delta chains and of the boxes of ranks are bit-equal to NumPy's; no chunk is decoded without need."""
    name, index = case
    expected = arrays(2)[name][index]
    with pytest.MonkeyPatch.context() as patch:
        counts = decoded_chunks(patch)
        if small_pieces:
            patch.setattr(lazy, "PIECE_BYTES", 600)
        found = lazily["arrays@2"][f"model.{name}"][index]
        assert same(found, np.asarray(expected))
        if not small_pieces:
            assert sum(counts) == needed(arrays(2)[name], index)
        for run in ("rows", "columns", "strided"):
            assert same(lazily[f"{run}@1"][f"model.{name}"][index], np.asarray(arrays(1)[name][index]))


@settings(max_examples=examples(40), deadline=None)
@given(case=cases)
def test_any_slice_of_tensors(case, lazily):
    name, index = case
    found = lazily["tensors@1"][f"model.{name}"][index]
    expected = tensors(1)[name].detach()[index]
    assert (type(found), found.dtype, found.requires_grad) == (torch.Tensor, expected.dtype, False)
    assert torch.equal(found, expected)


@settings(max_examples=examples(60), deadline=None)
@given(name=st.sampled_from(sorted(SHAPES)), data=st.data())
def test_any_span_of_bytes(name, data, lazily):
    value = arrays(2)[name]
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, value.nbytes)] * 2)))
    with pytest.MonkeyPatch.context() as patch:
        counts = decoded_chunks(patch)
        handle = lazily["arrays@2"][f"model.{name}"]
        assert handle.read_bytes(first, end).tobytes() == value.tobytes()[first:end]
        chunks = -(-end // CHUNK_BYTES) - first // CHUNK_BYTES if end > first and value.nbytes >= INLINE_BYTES else 0
        assert sum(counts) == chunks
    for run in ("rows", "columns", "strided"):
        found = lazily[f"{run}@1"][f"model.{name}"].read_bytes(first, end)
        assert found.tobytes() == arrays(1)[name].tobytes()[first:end]


def test_nothing_is_read_before_a_slice(repository, chunks):
    found = repository.tensors("tensors@2")
    assert isinstance(found, LazyTensors)
    assert set(found) == {f"model.{name}" for name in (*SHAPES, "tied")}
    handle = found["model.cube"]
    assert isinstance(handle, TensorHandle)
    assert (handle.name, handle.kind, handle.dtype, handle.shape) == (
        "model.cube",
        "parameter",
        "float64",
        (11, 12, 13),
    )
    assert (handle.ndim, handle.size, handle.nbytes, len(handle)) == (3, 1716, 13728, 11)
    assert repr(handle) == "TensorHandle('model.cube', float64, [11, 12, 13])"
    assert repr(found) == "LazyTensors('tensors@2', 10 tensors)"
    assert chunks == []
    assert same(handle.read(), tensors(2)["cube"].detach())
    assert sum(chunks) == 14
    assert same(found["model.tied"][3:5], found["model.table"][3:5])


def test_a_rank_reads_the_children_that_it_needs(repository):
    """A slice of one rank's rows does not read the manifests of the other ranks."""
    seen = []
    store = repository.store
    get = store.get

    def got(key: str, **options: Any) -> bytes:
        seen.append(key)
        return get(key, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "get", got)
        handle = repository.tensors("rows@1")["model.table"]
        roots = len([key for key in seen if key.startswith("manifests/")])
        seen.clear()
        handle[0:5]
        assert len([key for key in seen if key.startswith("manifests/")]) == 1
    assert roots == 2


@pytest.mark.parametrize(
    ("index", "error", "match"),
    [
        (None, InvalidInputError, "ints, slices and an ellipsis"),
        ([1, 2], InvalidInputError, "ints, slices and an ellipsis"),
        (True, InvalidInputError, "ints, slices and an ellipsis"),
        (1.5, InvalidInputError, "ints, slices and an ellipsis"),
        (torch.tensor([True]), InvalidInputError, "ints, slices and an ellipsis"),
        (torch.tensor(False), InvalidInputError, "ints, slices and an ellipsis"),
        ((0, torch.tensor([3])), InvalidInputError, "ints, slices and an ellipsis"),
        (slice(None, None, -1), InvalidInputError, "step of 1 or more"),
        (slice(None, None, 0), InvalidInputError, "slice step cannot be zero"),
        (slice("a"), InvalidInputError, "slice indices must be integers"),
        ((..., ...), IndexError, "at most one ellipsis"),
        ((1, 2, 3), IndexError, "3 indices for 2 dimensions"),
        (70, IndexError, "out of range of a dimension of 70"),
        ((0, -91), IndexError, "out of range of a dimension of 90"),
    ],
)
def test_indices_that_are_refused(repository, index, error, match):
    with pytest.raises(error, match=match):
        repository.tensors("arrays@2")["model.table"][index]


def test_rows_can_be_gone_through(repository):
    handle = repository.tensors("arrays@2")["model.small"]
    assert [row.tolist() for row in handle] == arrays(2)["small"].tolist()
    with pytest.raises(TypeError, match="no length"):
        len(repository.tensors("arrays@2")["model.scalar"])
    with pytest.raises(IndexError, match=r"3 indices for 1 dimension$"):
        repository.tensors("arrays@2")["model.line"][0, 0, 0]
    with pytest.raises(InvalidInputError, match="bytes 0 to 49 of 48"):
        handle.read_bytes(0, 49)
    for bounds in ((0.0, 4), (0, None), ("0", 4)):
        with pytest.raises(InvalidInputError, match="expected integers"):
            handle.read_bytes(*bounds)
    assert handle.read_bytes(np.int64(0), np.int64(4)).size == 4


def test_keys_and_names(repository):
    assert list(repository.tensors("arrays@2", keys="*.ta*")) == ["model.table", "model.tall"]
    with pytest.raises(KeyError):
        repository.tensors("arrays@2")["model.none"]
    with pytest.raises(NotFoundError, match="matches nothing"):
        repository.tensors("arrays@2", keys="none")
    with opened(created()) as other:
        other.save({"a.b": np.zeros(3), "a": {"b": np.ones(3)}}, run="r", step=0)
        with pytest.raises(InvalidInputError, match=r"two tensors have the path 'a\.b'"):
            other.tensors("r@0")


def test_damage_is_noticed_by_the_slice_that_meets_it():
    store = created(CHUNK_BYTES)
    with opened(store) as repository:
        value = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
        repository.save({"x": value}, run="r", step=0)
        handle = repository.tensors("r@0")["x"]
        pack = keys_of(store, "packs/")[0]
        flip(store, pack, len(store.get(pack)) // 2)
        damaged = 0
        for first in range(0, 4096, CHUNK_BYTES // 4):
            with suppress(IntegrityError):
                assert same(handle[first : first + 256], value[first : first + 256])
                continue
            damaged += 1
        assert damaged == 1
        with pytest.raises(IntegrityError, match="r@0"):
            handle.read()


def test_a_handle_outlives_compact_but_not_gc_of_its_snapshot():
    store = created(CHUNK_BYTES)
    with opened(store) as repository:
        for step in range(4):
            repository.save({"model": arrays(step)}, run="r", step=step)
        handle = repository.tensors("r@3")["model.table"]
        old = repository.tensors("r@1")["model.table"]
        repository.forget(KeepLast(1), run="r")
        repository.gc()
        repository.compact()
        repository.gc()
        assert same(handle[5:9], arrays(3)["table"][5:9])
        with pytest.raises(NotFoundError, match="was forgotten and deleted by a gc"):
            old[5:9]


# --- forged manifests ------------------------------------------------------------------------------------------------


def moved(by: int, contents: ManifestContents) -> ManifestContents:
    """Move the box of rank 1 by some rows: some rows are then missing, or stored twice."""
    if contents.children or contents.part != "model" or contents.rank != 1:
        return contents
    entries = []
    for entry in contents.tensors:
        boxes = [structs.replace(box, offsets=[box.offsets[0] + by, *box.offsets[1:]]) for box in entry.boxes]
        entries.append(structs.replace(entry, boxes=boxes))
    return replace(contents, tensors=entries)


@pytest.mark.parametrize("by", [-3, 2])
def test_boxes_that_overlap_or_leave_gaps(by):
    store, value = created(CHUNK_BYTES), np.arange(60 * 40, dtype=np.float32).reshape(60, 40)
    RankWriter(store).save({"": {}, "model": {"w": value}}, world=3, run="r", changes=partial(moved, by))
    with opened(store) as repository:
        handle = repository.tensors("r@0")["model.w"]
        assert same(handle[:17], value[:17])
        assert same(handle[-17:], value[-17:])
        for read in (handle.read, lambda: handle[15:25], lambda: handle.read_bytes(0, handle.nbytes)):
            with pytest.raises((FormatError, IntegrityError), match="r@0"):
                read()


def test_a_shape_that_nothing_explains():
    """A manifest may claim any shape: the claim takes no memory, and elements that are not stored are an error."""
    store, value = created(CHUNK_BYTES), np.arange(60 * 40, dtype=np.float32).reshape(60, 40)

    def grown(contents: ManifestContents) -> ManifestContents:
        if contents.part != "model":
            return contents
        tensors = [structs.replace(entry, shape=[2**40, 40]) for entry in contents.tensors]
        return replace(contents, tensors=tensors)

    RankWriter(store).save({"": {}, "model": {"w": value}}, world=3, run="r", changes=grown)
    with opened(store) as repository:
        handle = repository.tensors("r@0")["model.w"]
        assert same(handle[3:5], value[3:5])
        with pytest.raises(FormatError, match="elements are missing"):
            handle[100:200]
        with pytest.raises(CapabilityError, match="needs 17"):
            handle.read()
        with pytest.raises(FormatError, match="elements are missing"):
            handle[:: 2**39]
