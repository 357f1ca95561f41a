"""`first_difference` finds the step, the tensor and the element at which two runs first differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kit.objects import replace
from kit.rank_snapshots import RankWriter, columns, rows
from kit.repositories import created, opened
from kit.samples import SEED
from kit.shell import invoke
from snapstore import InvalidInputError, NotFoundError, Repository
from snapstore.chunks.reader import ChunkReader
from snapstore.format import records


def state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {
        "model": {"w": torch.from_numpy(rng.standard_normal((50, 40)).astype(np.float32)), "b": torch.zeros(4) + step},
        "optimizer": {"m": rng.standard_normal((50, 40)), "half": torch.ones(3, dtype=torch.bfloat16)},
        "step": step,
    }


@pytest.fixture
def repository() -> Iterator[Repository]:
    with opened(created(1024)) as repository:
        yield repository


def save(repository: Repository, run: str, steps: Any, change: Any = None) -> None:
    for step in steps:
        value = state(step)
        if change is not None:
            change(step, value)
        repository.save(value, run=run, step=step)


def test_runs_that_meet_again(repository, monkeypatch):
    """They differ at steps 3 and 5 and not at 4; a has steps that b lacks, and the other way round."""

    def change(step: int, value: dict[str, Any]) -> None:
        if step in (3, 5):
            value["model"]["w"][40, 7] = 5
            value["model"]["w"][49, 0] = 5
            value["optimizer"]["m"][0, 0] = 5

    save(repository, "a", range(6))
    save(repository, "b", [1, 2, 3, 4, 5, 9], change)
    decoded = []
    read = ChunkReader._read
    monkeypatch.setattr(
        ChunkReader, "_read", lambda self, e, batch: (decoded.append(len(batch.counts)), read(self, e, batch))[1]
    )
    found = repository.first_difference("a", "b")
    assert found
    assert found.steps == [1, 2, 3]
    assert (found.a.ref, found.b.ref) == ("a@3", "b@3")
    assert (found.path, found.index, found.chunk) == ("model.w", (40, 7), (40 * 40 + 7) * 4 // 1024)
    assert (float(found.before), found.after) == (float(state(3)["model"]["w"][40, 7]), "5.0")
    assert sum(decoded) <= 2 * 2, "from the chunk that differs on, not the chunks before"


@pytest.mark.parametrize("chunk_bytes", [512, 1040, 65536])
def test_chunks_are_those_of_the_manifests(chunk_bytes):
    """A config that a repair has reconstructed may have another size of chunks."""

    def change(step: int, value: dict[str, Any]) -> None:
        value["model"]["w"][40, 7] = 5

    store = created(1024)
    with opened(store) as repository:
        save(repository, "a", [0])
        save(repository, "b", [0], change)
        config = msgspec.structs.replace(repository.config, chunk_bytes=chunk_bytes)
    replace(store, "config", records.encode(config))
    with opened(store) as repository:
        found = repository.first_difference("a", "b")
        assert (found.index, found.chunk) == ((40, 7), (40 * 40 + 7) * 4 // 1024)


def test_the_same_runs(repository):
    save(repository, "a", range(3))
    save(repository, "b", range(1, 5))
    found = repository.first_difference("a", "b")
    assert not found
    assert (found.steps, found.path, found.a.ref) == ([1, 2], None, "a@2")
    repository.save({**state(2), "step": 7}, run="b", step=2)
    assert not repository.first_difference("a", "b"), "plain values are not compared"
    assert repository.first_difference("a@1", "b@2").path == "model.w"


def test_the_newest_save_of_a_step_counts(repository):
    save(repository, "a", [1])
    save(repository, "b", [1], lambda step, value: value["model"]["b"].add_(1))
    assert repository.first_difference("a", "b").index == (0,)
    save(repository, "b", [1])
    assert not repository.first_difference("a", "b")


@pytest.mark.parametrize(
    ("change", "path", "note"),
    [
        (lambda v: v["model"].pop("b"), "model.b", "only in a@0"),
        (lambda v: v["model"].update(c=torch.ones(2)), "model.c", "only in b@0"),
        (lambda v: v["model"].update(b=torch.ones(5)), "model.b", "float32 [4] -> float32 [5]"),
        (lambda v: v["model"].update(b=torch.ones(4).double()), "model.b", "float32 [4] -> float64 [4]"),
    ],
)
def test_tensors_that_cannot_be_compared(repository, change, path, note):
    save(repository, "a", [0])
    save(repository, "b", [0], lambda step, value: change(value))
    found = repository.first_difference("a", "b")
    assert (found.path, found.index, found.note) == (path, None, note)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("M8[ns]", ["2020-01-01T00:00:00.000000001", "NaT"]),
        ("m8[ns]", ["1 nanoseconds", "2 nanoseconds"]),
        ("M8[D]", ["NaT", "2020-01-02"]),
    ],
)
def test_times_are_shown_as_numpy_shows_them(repository, dtype, values):
    """Python has no NaT, and no nanoseconds."""
    for run, value in zip("ab", values, strict=True):
        time = np.timedelta64(int(value[0]), "ns") if dtype[0] == "m" else np.datetime64(value, dtype[3:-1])
        repository.save({"x": np.full(3, time, dtype)}, run=run, step=1)
    found = repository.first_difference("a", "b")
    assert (found.index, found.before, found.after) == ((0,), *values)


def test_nans_of_other_bits_and_scalars(repository):
    for run, bits in (("a", 0x7FC00000), ("b", 0x7FC00001)):
        nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        repository.save({"x": nan.reshape(())}, run=run, step=0)
    found = repository.first_difference("a", "b")
    assert (found.path, found.index, found.before, found.after) == ("x", (), "nan (0x7fc00000)", "nan (0x7fc00001)")


@pytest.mark.parametrize("dtype", ["<U3", "<U7", "S5", "S17"])
def test_an_element_that_crosses_the_border_of_a_chunk(repository, dtype):
    """It differs in the second of its two chunks only."""
    size = np.dtype(dtype).itemsize
    at = 1024 // size
    before, after = (np.zeros(4096 // size + 9, dtype) for _ in range(2))
    after.view(np.uint8)[1024] = 1
    assert at * size < 1024 < (at + 1) * size
    repository.save({"x": before}, run="a", step=0)
    repository.save({"x": after}, run="b", step=0)
    found = repository.first_difference("a", "b")
    assert (found.path, found.index, found.chunk) == ("x", (at,), 0)
    assert (found.before, found.after) == (str(before[at]), str(after[at]))


def test_boxes_of_ranks():
    """One run by three ranks, the other by two with other boxes: bytes are compared where digests cannot be."""
    store, rng = created(1024), np.random.default_rng(SEED)
    value = rng.standard_normal((40, 30)).astype(np.float32)
    other, at = value.copy(), tuple(int(n) for n in rng.integers(0, (40, 30)))
    other[at] += 1
    other[39, 29] += 1
    for step, second in enumerate((value, other)):
        for run, world, cut, data in (("a", 3, rows, value), ("b", 2, columns, second)):
            writer = RankWriter(store)
            writer.seq = step - 1
            writer.save({"": {}, "model": {"w": data}}, run=run, world=world, cut=cut, step=step)
    with opened(store) as repository:
        found = repository.first_difference("a", "b")
        assert (found.steps, found.path, found.index) == ([0, 1], "model.w", at)


def test_names_that_are_refused(repository):
    save(repository, "a", [1])
    save(repository, "b", [2])
    with pytest.raises(NotFoundError, match="runs 'a' and 'b' have no step in common: 'a' has 1, 'b' has 2"):
        repository.first_difference("a", "b")
    with pytest.raises(NotFoundError, match="run 'none': has no snapshots in this repository; runs: a, b"):
        repository.first_difference("a", "none")
    with pytest.raises(NotFoundError, match="a@9"):
        repository.first_difference("a@9", "b@1")
    for name in (None, 5, ["a"]):
        with pytest.raises(InvalidInputError, match=re.escape(f"run {name!r}: expected a str, got ")):
            repository.first_difference("a", name)


def test_the_shell(tmp_path):
    place = str(tmp_path / "r")
    with Repository.create(place) as repository:
        save(repository, "a", range(3))
        save(repository, "b", range(3), lambda step, value: value["model"]["b"].add_(step // 2))
        save(repository, "c", range(3), lambda step, value: value["model"].pop("b"))

    def run(*words: str) -> str:
        result = invoke(["diff", "--repo", place, "--first", *words])
        assert result.exit_code == 0
        return result.stdout

    assert run("a", "b") == (
        "first difference: a@2 and b@2, after 2 common steps without any\nmodel.b[0] in chunk 0: 2.0 -> 3.0\n"
    )
    assert run("a", "c").endswith("model.b: only in a@0\n")
    assert run("a", "a") == "all tensors are the same in 3 common steps, up to a@2 and a@2\n"
    document = json.loads(run("a", "b", "--json"))
    assert (document["steps"], document["path"], document["index"], document["chunk"]) == ([0, 1, 2], "model.b", [0], 0)
