"""Snapshots as files of fsspec: the bytes are those of a real safetensors file, and only what is needed is read."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import pickle
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch

from kit.rank_snapshots import RankWriter, columns
from kit.repositories import created, decoded_chunks, opened, same
from kit.samples import SEED
from snapstore import InvalidInputError, Repository, pack_folder
from snapstore.integrations import fsspec as fsspec_module
from snapstore.integrations.fsspec import SnapstoreFileSystem

CHUNK_BYTES = 4096


def state(step: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    weight = torch.from_numpy(rng.standard_normal((200, 64)).astype(np.float32))
    weight[step] += 1
    return {
        "model": {"w": weight, "half": weight.to(torch.bfloat16), "tied": weight, "empty": torch.zeros(0, 3)},
        "optimizer": {"state": {0: {"m": weight * 2, "step": torch.tensor(float(step))}}, "lr": 0.1},
        "odd/part": {"x": torch.arange(5)},
        "times": {"when": np.array(["2026-01-01"], "M8[s]"), "n": np.arange(3.0)},
        "step": step,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("fsspec") / "r")
    fsspec.register_implementation("snapstore", SnapstoreFileSystem, clobber=True)
    with Repository.create(path, chunk_bytes=CHUNK_BYTES) as repository:
        for step in range(3):
            repository.save(state(step), run="exp1", step=step, tags=["first"] if not step else [])
        repository.save(state(1), run="exp1", step=1)
        yield path


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Forget the file systems that fsspec keeps, and thereby their repositories."""
    yield
    SnapstoreFileSystem.clear_instance_cache()


@pytest.fixture
def files(place: str) -> SnapstoreFileSystem:
    return SnapstoreFileSystem(repository=place, skip_instance_cache=True)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of chunks that each batch decodes."""
    return decoded_chunks(monkeypatch)


def test_listings(files):
    assert files.ls("", detail=False) == ["exp1@0", "exp1@2", "exp1@1"]
    assert files.ls("snapstore://exp1@2", detail=False) == [
        "exp1@2/model.safetensors", "exp1@2/optimizer.safetensors", "exp1@2/times.safetensors",
        "exp1@2/all.safetensors",
    ]  # fmt: skip
    info = files.info("exp1@latest/model.safetensors")
    assert (info["name"], info["type"]) == ("exp1@latest/model.safetensors", "file")
    assert info["size"] == len(files.cat("exp1@1/model.safetensors"))
    assert info["id"] == files.repository.snapshot("exp1@1").id
    assert files.info("exp1@1/times.safetensors")["left_out"] == ["when"]
    assert files.isdir("exp1@first")
    assert files.isfile("exp1@first/all.safetensors")
    assert len(files.find("")) == 12
    assert files.glob("exp1@*/model.safetensors") == [f"exp1@{step}/model.safetensors" for step in (0, 1, 2)]
    assert abs(files.created("exp1@1").timestamp() - files.repository.snapshot("exp1@1").created) < 1e-3
    assert len(list(files.walk(""))) == 4


@pytest.mark.parametrize(("now", "year"), [(-1e12, 1), (1e12, 9999)])
def test_a_date_that_python_does_not_know(tmp_path, monkeypatch, now, year):
    monkeypatch.setattr(time, "time", lambda: now)
    with Repository.create(tmp_path / "r") as repository:
        repository.save(state(), run="exp1", step=1)
    files = SnapstoreFileSystem(repository=str(tmp_path / "r"), skip_instance_cache=True)
    assert files.created("exp1@1/model.safetensors").year == year


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "path", ["none@1", "exp1@9/model.safetensors", "exp1@1/none.safetensors", "exp1@1/model", "exp1@1/.safetensors",
             "exp1@1/odd/part.safetensors", "exp1@1/model.safetensors/x", "exp1"]
)  # fmt: skip
def test_paths_that_are_not_there(files, path):
    assert not files.exists(path)
    for call in (files.info, files.ls, files.cat_file):
        with pytest.raises(FileNotFoundError):
            call(path)


def test_the_library_reads_the_files(files):
    expected = state(2)
    found = safetensors.torch.load(files.cat("exp1@2/model.safetensors"))
    assert same({name: found[name] for name in expected["model"]}, expected["model"])
    with files.open("exp1@2/all.safetensors") as file:
        whole = safetensors.torch.load(file.read())
    assert torch.equal(whole["optimizer.state.0.m"], expected["optimizer"]["state"][0]["m"])
    assert torch.equal(whole["odd/part.x"], torch.arange(5))
    assert json.loads(files.cat("exp1@2/model.safetensors")[8:].partition(b"}}")[0] + b"}}")["__metadata__"] == {
        "format": "pt"
    }


def test_any_range(files):
    whole, rng = files.cat("exp1@2/all.safetensors"), np.random.default_rng(SEED)
    size = len(whole)
    for first, end in [(0, 8), (0, size), (size, size + 9), (None, 40), (-100, None), (5, 5), (9, 3)] + [
        tuple(sorted(rng.integers(0, size, 2).tolist())) for _ in range(40)
    ]:
        assert files.cat_file("exp1@2/all.safetensors", first, end) == whole[first:end]
    with files.open("exp1@2/all.safetensors", cache_type="none") as file:
        for at in rng.integers(0, size, 20).tolist():
            file.seek(at)
            assert file.read(1000) == whole[at : at + 1000]
    with files.open("exp1@2/all.safetensors", "rb") as file:
        assert b"".join(iter(lambda: file.read(3333), b"")) == whole


def test_a_range_reads_the_chunks_that_it_needs(files, chunks):
    files.info("exp1@2/model.safetensors")
    assert chunks == [], "a header needs no chunk"
    header = int.from_bytes(files.cat_file("exp1@2/model.safetensors", 0, 8), "little")
    names = json.loads(files.cat_file("exp1@2/model.safetensors", 8, 8 + header))
    assert chunks == []
    begin = 8 + header + names["w"]["data_offsets"][0]
    files.cat_file("exp1@2/model.safetensors", begin + CHUNK_BYTES, begin + 2 * CHUNK_BYTES)
    assert sum(chunks) == 1
    files.cat_file("exp1@2/model.safetensors", begin + CHUNK_BYTES - 1, begin + CHUNK_BYTES + 1)
    assert sum(chunks) == 3


def test_tensors_of_several_ranks():
    store = created(1024)
    value = np.arange(64 * 40, dtype=np.float32).reshape(64, 40)
    RankWriter(store).save({"": {}, "model": {"w": value}}, world=3, cut=columns, run="ranks")
    with opened(store) as repository:
        files = SnapstoreFileSystem(repository="unused", skip_instance_cache=True)
        files._opened = os.getpid(), "unused", repository
        found = safetensors.torch.load(files.cat("ranks@0/model.safetensors"))
        assert same(found["w"].numpy(), value)


def test_the_files_of_a_folder(tmp_path):
    root = tmp_path / "there"
    (root / "deep").mkdir(parents=True)
    data = np.random.default_rng(SEED).bytes(300_000)
    (root / "deep/large.bin").write_bytes(data)
    (root / "vocab.json").write_text('{"a": 1}')
    (root / "empty").touch()
    (root / "link").symlink_to("deep/large.bin")
    (root / "dangling").symlink_to("none")
    (root / "to-deep").symlink_to("deep")
    (root / "x?repository=y").touch()  # no path names it; the others are listed all the same
    place = str(tmp_path / "r")
    with Repository.create(place, chunk_bytes=CHUNK_BYTES) as repository:
        repository.save(pack_folder(root), run="f", step=1)
        repository.save({"folder": np.zeros(3)}, run="f", step=2)
    files = SnapstoreFileSystem(repository=place, skip_instance_cache=True)
    assert files.ls("f@1", detail=False) == [f"f@1/{name}" for name in ("deep", "empty", "link", "vocab.json")]
    assert files.find("f@1") == [f"f@1/{name}" for name in ("deep/large.bin", "empty", "link", "vocab.json")]
    assert files.isdir("f@1/deep")
    assert json.loads(files.cat("f@1/vocab.json")) == {"a": 1}
    assert files.cat("f@1/link") == files.cat("f@1/deep/large.bin") == data
    assert files.cat_file("f@1/deep/large.bin", 9000, 9100) == data[9000:9100]
    assert files.cat("f@1/empty") == b""
    for path in ("f@1/dangling", "f@1/to-deep/large.bin", "f@1/all.safetensors", "f@1/none"):
        assert not files.exists(path)
    assert files.ls("f@2", detail=False) == ["f@2/all.safetensors"]


def test_few_snapshots_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(fsspec_module, "FILES_KEPT", 2)
    (tmp_path / "model").mkdir()
    with Repository.create(tmp_path / "r") as repository:
        for step in range(4):
            (tmp_path / "model" / "step").write_text(str(step))
            repository.save(pack_folder(tmp_path / "model"), run="exp1", step=step)
    files = SnapstoreFileSystem(repository=str(tmp_path / "r"))
    assert files.cat(files.glob("*/*")) == {f"exp1@{step}/step": str(step).encode() for step in range(4)}
    assert list(files._folders) == [s.id for s in files.repository.snapshots()][2:]


def test_where_the_repository_is(place, monkeypatch):
    monkeypatch.delenv("SNAPSTORE_REPO", raising=False)
    size = SnapstoreFileSystem(repository=place).info("exp1@2/model.safetensors")["size"]
    with fsspec.open("snapstore://exp1@2/model.safetensors", repository=place) as file:
        assert len(file.read()) == size
    with fsspec.open(f"snapstore://exp1@2/model.safetensors?repository={place}") as file:
        assert len(file.read()) == size
    with pytest.raises(InvalidInputError, match="no repository named"):
        fsspec.filesystem("snapstore")
    monkeypatch.setenv("SNAPSTORE_REPO", place)
    with fsspec.open("snapstore://exp1@2/model.safetensors") as file:
        assert len(file.read()) == size
    path = SnapstoreFileSystem._strip_protocol("snapstore://a@1/m.safetensors?repository=s3://bucket/x")
    assert (path, SnapstoreFileSystem._get_kwargs_from_urls("snapstore://a@1/m?repository=s3://bucket/x")) == (
        "a@1/m.safetensors",
        {"repository": "s3://bucket/x"},
    )


def test_another_repository_in_the_environment(place, tmp_path, monkeypatch):
    """fsspec keeps the file system that was made while SNAPSTORE_REPO named another repository."""
    with Repository.create(tmp_path / "other", chunk_bytes=CHUNK_BYTES) as repository:
        repository.save({"model": {"x": torch.zeros(3)}}, run="other", step=1)
    monkeypatch.setenv("SNAPSTORE_REPO", place)
    assert fsspec.filesystem("snapstore").exists("exp1@2/model.safetensors")
    monkeypatch.setenv("SNAPSTORE_REPO", str(tmp_path / "other"))
    files = fsspec.filesystem("snapstore")
    assert files.exists("other@1/model.safetensors")
    assert not files.exists("exp1@2/model.safetensors")


def test_nothing_can_be_written(files):
    for mode in ("wb", "ab", "r+b"):
        with pytest.raises(OSError, match="Read-only") as caught:
            files.open("exp1@2/model.safetensors", mode)
        assert caught.value.errno == errno.EROFS
    path = "exp1@2/model.safetensors"
    for write in (
        lambda: files.rm(path),
        lambda: files.rm_file(path),
        lambda: files.mv(path, "exp1@2/other"),
        lambda: files.cp_file(path, "exp1@2/other"),
        lambda: files.mkdir("exp1@2/folder"),
        lambda: files.touch(path),
    ):
        with pytest.raises(OSError, match="Read-only") as caught:
            write()
        assert caught.value.errno == errno.EROFS


def test_an_open_file_can_be_pickled(tmp_path):
    """The other process reads the same snapshot at the same place, also if it was opened as the newest."""
    with Repository.create(tmp_path / "r") as repository:
        repository.save(state(0), run="a", step=0)
        files = SnapstoreFileSystem(repository=str(tmp_path / "r"), skip_instance_cache=True)
        with files.open("a@latest/model.safetensors") as file:
            file.seek(10)
            pickled, rest = pickle.dumps(file), file.read()
        repository.save(state(1), run="a", step=1)
        with pickle.loads(pickled) as file:
            assert file.read() == rest
        with files.open("a@latest/model.safetensors", size=3) as file:
            assert file.read()[10:] != rest


def test_tables_and_text_wrappers(files):
    """Other readers work on the file: numpy reads a tensor at its offset, io reads a line."""
    header = int.from_bytes(files.cat_file("exp1@2/model.safetensors", 0, 8), "little")
    with files.open("exp1@2/model.safetensors") as file:
        names = json.loads(io.TextIOWrapper(io.BytesIO(file.read(8 + header)[8:])).readline())
        file.seek(8 + header + names["w"]["data_offsets"][0])
        found = np.frombuffer(file.read(200 * 64 * 4), np.float32).reshape(200, 64)
    assert same(torch.from_numpy(found.copy()), state(2)["model"]["w"])


def test_the_entry_point_is_the_class():
    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, name = about["project"]["entry-points"]["fsspec.specs"]["snapstore"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is SnapstoreFileSystem
    assert SnapstoreFileSystem.protocol == "snapstore"
