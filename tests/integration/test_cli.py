"""The shell keeps its output, its JSON and its exit codes, for every verb and for bad input."""

import errno
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kit import foreign
from kit.objects import flip_file
from kit.processes import run_python
from kit.repositories import index_of
from kit.shell import invoke
from kit.states import DTYPES
from kit.waits import until
from snapstore import KeepEvery, KeepLast, Repository, RngState, cli
from snapstore.catalog import policy_store
from snapstore.cli import app, inspect, maintenance, output
from snapstore.cli.app import VERBS
from snapstore.cli.doctor import doctor
from snapstore.convert import files, safetensors_file
from snapstore.engine.spans import engine_in_use
from snapstore.errors import ConflictError, StorageError
from snapstore.format import records
from snapstore.format.hashing import checksum
from snapstore.format.keys import record_key
from snapstore.protocol import tags
from snapstore.protocol.liveness import this_session
from snapstore.storage import cache_dir as cache_module
from snapstore.storage.cache_dir import mount_of, on_network
from snapstore.storage.local import LocalStore

SNAPSHOT_KEYS = {
    "id", "run", "step", "state", "parent", "created", "logical_bytes", "stored_bytes", "depth", "tags", "metrics",
}  # fmt: skip

#: The JSON of `log`, of an empty repository.
NO_SNAPSHOTS = {"snapshots": [], "superseded": [], "damaged": [], "made_up": [], "unproven": []}


class Shell:
    """Runs verbs in this process on one repository."""

    def __init__(self, folder):
        self.folder, self.url = folder, str(folder / "repo")
        self.env = {"SNAPSTORE_REPO": self.url}

    def __call__(self, *args, code=0, **env):
        result = invoke([str(arg) for arg in args], env={**self.env, **env})
        assert result.exit_code == code, (args, result.exit_code, result.stdout, result.stderr)
        assert "Traceback" not in result.stderr or "-v" in args
        return result

    def json(self, *args, code=0, **env):
        return json.loads(self(*args, "--json", code=code, **env).stdout)

    def fails(self, *args, code=1, **env):
        """Return the message of a failure."""
        result = self(*args, code=code, **env)
        assert result.stdout == ""
        assert result.stderr.startswith("snapstore: error: ")
        return result.stderr.removeprefix("snapstore: error: ")

    def save(self, state, step, *args, run="exp", name="state.pt"):
        torch.save(state, self.folder / name)
        return self.json("save", self.folder / name, "--run", run, "--step", step, *args)["snapshot"]


def initialised(folder):
    app = Shell(folder)
    app("init", "--chunk-bytes", "4096")
    return app


@pytest.fixture
def sh(tmp_path):
    return initialised(tmp_path)


def state(step=0):
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(40, 50, generator=generator) + step * 1e-3
    return {"model": {"w": weight, "b": torch.zeros(3, dtype=torch.bfloat16)}, "extra": {"step": step, "name": "x"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    app = initialised(tmp_path_factory.mktemp("series"))
    for step in range(4):
        app.save(state(step), step, "--metric", f"loss={4 - step}")
    return app


@pytest.fixture
def series(made, tmp_path):
    """Copy four steps, with an index: a test may change them."""
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    copy = Shell(tmp_path)
    with Repository.open(copy.url) as repository:
        repository.view()
    return copy


# --- the shell itself


def test_every_verb_has_help_and_stands_in_the_list():
    listed = invoke(["--help"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.stdout.partition("Commands:\n")[2].splitlines()] == list(VERBS)
    for verb in VERBS:
        text = invoke([verb, "-h"]).stdout
        assert all(option in text for option in ("--repo", "--json", "--verbose")), verb


def test_without_arguments_it_prints_its_help(sh):
    printed = invoke([], env=sh.env)
    assert printed.exit_code == 2
    assert printed.stderr + printed.stdout == invoke(["--help"]).stdout


def test_usage_errors_are_2(sh):
    for args in (["nonsense"], ["log", "--nonsense"], ["show"], ["save", "x.pt", "--run", "r", "--step", "many"], []):
        result = invoke(args, env=sh.env)
        assert result.exit_code == 2, args
        assert "Usage: " in result.stderr + result.stdout


def test_the_version(sh):
    assert sh("--version").stdout == f"snapstore {records.VERSION} (CPU engine: {engine_in_use()})\n"


def test_the_version_is_printed_beside_a_wrong_engine(sh, monkeypatch):
    monkeypatch.setenv("SNAPSTORE_ENGINE", "fast")
    said = f"snapstore {records.VERSION} (CPU engine: none: SNAPSTORE_ENGINE='fast': expected 'native' or 'numpy')\n"
    assert sh("--version").stdout == said


def test_common_options_before_and_after_the_verb(series):
    other = str(series.folder / "other")
    series("init", other)
    for args in (["--repo", other, "--json", "log"], ["log", "--json", "--repo", other]):
        assert json.loads(series(*args).stdout) == NO_SNAPSHOTS
    # after the verb wins, and both win over the environment
    assert len(series.json("--repo", other, "log", "--repo", series.url)["snapshots"]) == 4


def test_no_repository_named_is_usage(sh):
    assert "--repo URL or set SNAPSTORE_REPO" in sh.fails("log", code=2, SNAPSTORE_REPO="")


def test_no_repository_is_10(sh, tmp_path):
    for place in (tmp_path / "missing", tmp_path):
        assert "snapstore init" in sh.fails("log", "--repo", place, code=10)
    document = sh.json("log", "--repo", tmp_path / "missing", code=10)
    assert document["error"]["kind"] == "NoRepositoryError"
    assert set(document["error"]) == {"kind", "message"}


def test_a_newer_format_is_an_error_and_no_corruption(sh):
    config = Path(sh.url, "config")
    newer = records.decode(config.read_bytes(), records.Config, "config")
    fields = {name: getattr(newer, name) for name in newer.__struct_fields__}
    config.unlink()
    config.write_bytes(records.encode(records.Config(**{**fields, "version": 99, "writer": "snapstore 9"})))
    assert "format version 99" in sh.fails("log", code=1)


def test_invalid_environment_values(sh):
    assert "0" in sh.fails("log", SNAPSTORE_THREADS="0")
    assert "ftp" in sh.fails("log", SNAPSTORE_REPO="ftp://host/x")
    assert "memory" in sh.fails("log", SNAPSTORE_REPO="memory://../x")
    assert "SNAPSTORE_CACHE_DIR" in sh.fails("log", SNAPSTORE_CACHE_DIR="relative")


def test_errors_keep_their_exit_codes_and_tracebacks_need_v(sh, monkeypatch):
    def failing(error):
        def view(*_):
            raise error

        monkeypatch.setattr(Repository, "view", view)

    failing(ConflictError("taken"))
    assert sh.fails("log", code=11) == "taken\n"
    failing(ZeroDivisionError("oops"))
    assert "ZeroDivisionError: oops; this is a bug" in sh.fails("log")
    assert sh.json("log", code=1)["error"]["kind"] == "ZeroDivisionError"
    failing(MemoryError())
    assert "out of memory" in sh.fails("log")
    failing(ZeroDivisionError("oops"))
    assert "Traceback" in sh("log", "-v", code=1).stderr
    failing(KeyboardInterrupt())
    result = sh("log", code=130)
    assert (result.stdout, result.stderr) == ("", "snapstore: interrupted\n")


def test_logs_go_to_stderr(sh):
    torch.save(state(), sh.folder / "s.pt")
    result = sh("-v", "save", sh.folder / "s.pt", "--run", "r", "--step", 1, "--json")
    assert set(json.loads(result.stdout)) == {"snapshot"}
    assert "snapstore: info: run=r step=1 logical=" in result.stderr


# --- init, save, restore


def test_init(tmp_path):
    sh = Shell(tmp_path)
    made = sh.json("init", tmp_path / "a" / "b")
    assert set(made) == {"url", "uuid", "version", "chunk_bytes"}
    assert made["chunk_bytes"] == 1024 * 1024
    assert "already" in sh.fails("init", tmp_path / "a" / "b")
    assert "not empty" in sh.fails("init", tmp_path)
    assert "chunk" in sh.fails("init", tmp_path / "c", "--chunk-bytes", 5)
    assert "--chunk-bytes 4X" in sh.fails("init", tmp_path / "c", "--chunk-bytes", "4X", code=2)
    assert not (tmp_path / "c").exists()
    assert sh.json("init", tmp_path / "c", "--chunk-bytes", "4M")["chunk_bytes"] == 4 << 20
    assert sh("init").stdout == f"created a repository at {sh.url}\n"


def test_save_and_restore_pt(sh):
    saved = sh.save(state(3), 3, "--tag", "good", "--metric", "loss=0.5", "--metric", "a=b=nan")
    assert set(saved) == SNAPSHOT_KEYS
    assert saved["tags"] == ["good"]
    assert saved["metrics"] == {"loss": 0.5, "a=b": "NaN"}
    assert saved["created"].endswith("Z")
    out = sh.folder / "out.pt"
    restored = sh.json("restore", "exp@good", "-o", out)
    assert set(restored) == {"snapshot", "file", "tensors", "bytes", "dropped", "by_rank", "changed"}
    assert (restored["tensors"], restored["dropped"], restored["changed"]) == (2, [], [])
    assert restored["bytes"] == out.stat().st_size
    loaded = torch.load(out, weights_only=True)
    assert torch.equal(loaded["model"]["w"], state(3)["model"]["w"])
    assert loaded["extra"] == {"step": 3, "name": "x"}
    assert sorted(p.name for p in sh.folder.iterdir()) == ["out.pt", "repo", "state.pt"]


def test_the_readmes_state_is_read_with_weights_only(sh):
    """The state goes to a file, into the objects, and back into a repository."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with Repository.open(sh.url) as repository:
        repository.save({"model": model, "optimizer": optimizer, "rng": RngState()}, run="exp", step=1)
    wanted = torch.rand(3)
    result = sh("restore", "exp@1", "-o", sh.folder / "o.pt")
    assert result.stderr == (
        "written as another type for torch.load(weights_only=True): rng.python.words (numpy.ndarray as Tensor), "
        "rng.numpy.state.key (numpy.ndarray as Tensor)\n"
    )
    assert sh.json("restore", "exp@1", "-o", sh.folder / "o.pt", "--force")["changed"] == [
        {"path": path, "was": "numpy.ndarray", "written_as": "Tensor"}
        for path in ("rng.python.words", "rng.numpy.state.key")
    ]
    loaded = torch.load(sh.folder / "o.pt", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    RngState().load_state_dict(loaded["rng"])
    assert torch.equal(torch.rand(3), wanted)
    sh("save", sh.folder / "o.pt", "--run", "exp", "--step", 2)
    with Repository.open(sh.url) as repository:
        repository.restore_into("exp@2", {"model": model, "optimizer": optimizer, "rng": RngState()})
    assert torch.equal(torch.rand(3), wanted)


def test_a_state_that_weights_only_cannot_hold(sh):
    with Repository.open(sh.url) as repository:
        repository.save({"a": {(1,): 1, frozenset({1}): 2}, "b": torch.ones(2)}, run="exp", step=1)
    message = sh.fails("restore", "exp@1", "-o", sh.folder / "o.pt")
    assert "torch.load(weights_only=True) would refuse a.frozenset({1}) (a key that would equal another" in message
    assert "--keys" in message
    assert not (sh.folder / "o.pt").exists()
    sh("restore", "exp@1", "-o", sh.folder / "o.pt", "--keys", "b")


def test_save_says_what_it_did(sh):
    torch.save(state(), sh.folder / "s.bin", _use_new_zipfile_serialization=False)
    text = sh("save", sh.folder / "s.bin", "--run", "r", "--step", 0, "--full").stdout
    assert text.startswith("saved r@0 as id:")
    assert "restored r@0" in sh("restore", "r@0", "-o", sh.folder / "o.pt", "--keys", "model.*").stdout
    assert list(torch.load(sh.folder / "o.pt", weights_only=True)) == ["model"]


def test_forks_and_bases(series):
    fork = series.save(state(9), 9, "--parent", "exp@1", "--base", "exp@2", run="fork")
    log = {s["id"]: s for s in series.json("log")["snapshots"]}
    assert log[fork["parent"]]["step"] == 1
    assert "no run" in series.fails("save", series.folder / "state.pt", "--run", "f", "--step", 1, "--parent", "no@1")


def test_bad_options_save_nothing(sh):
    torch.save(state(), sh.folder / "s.pt")
    save = "save", sh.folder / "s.pt", "--run"
    assert "run" in sh.fails(*save, "é", "--step", 1)
    assert "step -1" in sh.fails(*save, "r", "--step", -1)
    assert "tag 'a/b'" in sh.fails(*save, "r", "--step", 1, "--tag", "a/b")
    assert "reference 'r'" in sh.fails(*save, "r", "--step", 1, "--parent", "r")
    for metric in ("loss", "loss=", "=1", "loss=low"):
        assert "--metric" in sh.fails(*save, "r", "--step", 1, "--metric", metric, code=2)
    assert sh.json("log", "--all") == NO_SNAPSHOTS
    assert not list(Path(sh.url).rglob("packs/*/*"))


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_objects_are_refused_by_name_and_not_run(sh, monkeypatch, zipped):
    torch.save({"a": np.ma.ones(3)}, sh.folder / "n.pt", _use_new_zipfile_serialization=zipped)
    assert "Python object (numpy.ma" in sh.fails("save", sh.folder / "n.pt", "--run", "r", "--step", 1)
    monkeypatch.setenv("EVIL", str(sh.folder / "evil"))
    torch.save({"a": torch.ones(2), "b": Evil()}, sh.folder / "e.pt", _use_new_zipfile_serialization=zipped)
    message = sh.fails("save", sh.folder / "e.pt", "--run", "r", "--step", 1)
    assert "Python object (posix.mkdir)" in message
    assert "could run any code" in message
    assert "weights_only=False" not in message
    assert not (sh.folder / "evil").exists()


def test_damaged_and_foreign_files(sh):
    torch.save(state(), sh.folder / "whole.pt")
    save_file({"a": torch.ones(5000)}, sh.folder / "whole.safetensors")
    for name in ("whole.pt", "whole.safetensors"):
        whole = (sh.folder / name).read_bytes()
        for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
            cut = sh.folder / f"cut.{name}"
            cut.write_bytes(whole[:length])
            assert "damaged" in sh.fails("save", cut, "--run", "r", "--step", 1), (name, length)
    (sh.folder / "text.pt").write_text("hello, no model here")
    text = sh.fails("save", sh.folder / "text.pt", "--run", "r", "--step", 1)
    assert "not a PyTorch file, or damaged: KeyError: 10" in text
    assert "*.safetensors" in sh.fails("save", sh.folder / "x.npz", "--run", "r", "--step", 1)
    assert "found none" in sh.fails("save", sh.folder / "none.pt", "--run", "r", "--step", 1)
    os.mkfifo(sh.folder / "d.pt")
    assert "something else" in sh.fails("save", sh.folder / "d.pt", "--run", "r", "--step", 1)
    assert sh.json("log") == NO_SNAPSHOTS


def test_safetensors_keep_their_names_and_metadata(sh):
    source, out = sh.folder / "m.safetensors", sh.folder / "o.safetensors"
    tensors = {"layer.0.w": torch.randn(30, 30), "b": torch.ones(2, dtype=torch.float8_e4m3fn)}
    save_file(tensors, source, metadata={"format": "pt", "who": "me"})
    sh("save", source, "--run", "st", "--step", 1)
    assert sh.json("show", "st@1")["metadata"] == {"safetensors": {"format": "pt", "who": "me"}}
    sh("restore", "st@1", "-o", out)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "who": "me"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8))
    plain = sh.folder / "plain"
    plain.touch()
    assert out.stat().st_mode == plain.stat().st_mode


def test_safetensors_of_every_dtype_are_the_librarys(sh):
    dtypes = [getattr(torch, name) for name in DTYPES if not name.startswith(("bits", "complex32", "complex128"))]
    numbers = torch.tensor([0, 1] * 24, dtype=torch.uint8)
    source, out, ours = (sh.folder / f"{name}.safetensors" for name in ("source", "out", "ours"))
    for step, dtype in enumerate(dtypes):
        size = torch.empty(0, dtype=dtype).element_size()
        tensors = {
            "x": numbers.view(dtype).reshape(-1, 1),
            "a": numbers.clone().view(dtype),
            "tiny": numbers[:size].clone().view(dtype),
        }
        tensors |= {"empty": torch.empty((0, 4), dtype=dtype), "é": torch.ones(3, dtype=torch.bool)}
        save_file(tensors, source, metadata={"é": "1"})
        sh("save", source, "--run", "r", "--step", step)
        sh("restore", f"r@{step}", "-o", out, "--force")
        assert out.read_bytes() == source.read_bytes(), dtype
    arrays = {
        name: np.arange(8).astype(name) for name in ("<f8", "<f4", "<f2", "<i8", "<u4", "<i2", "|u1", "|b1", "<c8")
    }
    with Repository.open(sh.url) as repository:
        repository.save(arrays, run="r", step=99)
        repository.save({"__metadata__": numbers}, run="r", step=100)
    sh("restore", "r@99", "-o", ours)
    with safe_open(ours, "np") as file:
        assert all((file.get_tensor(name) == array).all() for name, array in arrays.items())
    assert "of the name '__metadata__'" in sh.fails("restore", "r@100", "-o", sh.folder / "x.safetensors")


def test_safetensors_of_a_training_state(sh):
    weight = torch.randn(64, 64)
    sh.save({"m": {"w": weight, "tied": weight, "t": [torch.ones(1)]}, "lr": 0.1, "e": {}}, 1)
    out = sh.folder / "o.safetensors"
    message = sh.fails("restore", "exp@1", "-o", out)
    assert "lr would be lost" in message
    assert "--tensors-only" in message
    result = sh("restore", "exp@1", "-o", out, "--tensors-only")
    assert "left out 1 value:" in result.stderr
    loaded = load_file(out)
    assert set(loaded) == {"m.w", "m.tied", "m.t.0"}
    assert torch.equal(loaded["m.tied"], weight)
    sh("restore", "exp@1", "-o", out, "--keys", "m.w", "--keys", "m.t*", "--force")
    assert set(load_file(out)) == {"m.w", "m.t.0", "m.tied"}


def test_states_that_safetensors_cannot_hold(sh):
    out = sh.folder / "o.safetensors"
    with Repository.open(sh.url) as repository:
        repository.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, run="r", step=1)
        repository.save(torch.ones(1), run="r", step=2)
        repository.save({"s": np.array(["x"])}, run="r", step=3)
        repository.save({"n": np.arange(4.0)}, run="r", step=4)
        repository.save({str(i): i for i in range(9)}, run="r", step=5)
        repository.save({"q": torch.zeros(4, dtype=torch.complex128)}, run="r", step=6)
    assert "both be named 'a.b'" in sh.fails("restore", "r@1", "-o", out)
    assert "without a name" in sh.fails("restore", "r@2", "-o", out)
    assert "cannot hold an array of <U1" in sh.fails("restore", "r@3", "-o", out)
    sh("restore", "r@4", "-o", out)
    assert "0, 1, 2, 3, 4 and 4 more would be lost" in sh.fails("restore", "r@5", "-o", sh.folder / "x.safetensors")
    assert "cannot hold" in sh.fails("restore", "r@6", "-o", sh.folder / "x.safetensors")
    assert not list(sh.folder.glob("*.tmp")) + list(sh.folder.glob(".*"))


def test_without_the_safetensors_library(sh, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (sh.folder / "m.safetensors").touch()
    sh.save(state(), 1)
    assert "pip install" in sh.fails("save", sh.folder / "m.safetensors", "--run", "r", "--step", 1)
    assert "pip install" in sh.fails("restore", "exp@1", "-o", sh.folder / "o.safetensors")


def test_restore_replaces_nothing_unasked_and_refuses_other_places(series):
    folder, out = series.folder, series.folder / "o.pt"
    out.write_text("mine")
    assert "--force" in series.fails("restore", "exp@1", "-o", out)
    assert out.read_text() == "mine"
    series("restore", "exp@1", "-o", out, "--force")
    assert torch.load(out, weights_only=True)["extra"]["step"] == 1
    assert "is not a folder" in series.fails("restore", "exp@1", "-o", folder / "none" / "o.pt")
    assert "ends in .pt" in series.fails("restore", "exp@1", "-o", folder / "o.npz")
    (folder / "d.pt").mkdir()
    assert "is a folder" in series.fails("restore", "exp@1", "-o", folder / "d.pt")
    refused = series.fails("restore", "exp@1", "-o", folder / "new.pt", "--keys", "nothing*")
    assert "keys 'nothing*': matches nothing in this snapshot; its parts are model, " in refused


def test_a_full_disk_under_the_output(series, monkeypatch):

    def failing(error):
        def write(*_, **__):
            raise error

        return write

    out = series.folder / "out"
    out.mkdir()
    looked_for = []
    monkeypatch.setattr("snapstore.check.newest_whole.advice", lambda *_, **__: looked_for.append(True) or "")
    monkeypatch.setattr(torch, "save", failing(RuntimeError("unexpected pos 896 vs 790")))
    assert "cannot be written: unexpected pos" in series.fails("restore", "exp@1", "-o", out / "o.pt")
    monkeypatch.setattr(torch, "save", failing(OSError(28, "No space left on device")))
    assert "cannot be written: No space left" in series.fails("restore", "exp@1", "-o", out / "o.pt")
    monkeypatch.setattr(safetensors_file, "as_bytes", failing(OSError(28, "No space left on device")))
    tensors = ["--keys", "model.*"]
    assert "cannot be written: No space left" in series.fails("restore", "exp@1", "-o", out / "o.safetensors", *tensors)
    assert not list(out.iterdir())
    assert not looked_for, "a full disk under the output is no reason to look for a whole snapshot"


def test_files_that_cannot_be_read(sh, monkeypatch):
    torch.save(state(), sh.folder / "s.pt")
    monkeypatch.setattr(torch, "load", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
    assert "out of memory" in sh.fails("save", sh.folder / "s.pt", "--run", "r", "--step", 1)
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(files.InvalidInputError, match=r"cannot be read: Permission denied"):
        files.read(sh.folder / "s.pt")


def test_a_file_that_appears_meanwhile_stays(tmp_path, monkeypatch):
    out = tmp_path / "o.pt"
    with pytest.raises(files.AlreadyExistsError):
        files.publish(out, lambda temp: out.write_text("theirs"), force=False)
    monkeypatch.setattr(Path, "hardlink_to", lambda self, target: (_ for _ in ()).throw(OSError()))
    with pytest.raises(files.AlreadyExistsError):
        files.publish(out, lambda temp: out.write_text("theirs"), force=False)
    assert [p.name for p in tmp_path.iterdir()] == ["o.pt"]
    out.unlink()
    files.publish(out, lambda temp: temp.write_text("ours"), force=False)
    assert [p.name for p in tmp_path.iterdir()] == ["o.pt"]
    assert out.read_text() == "ours"


# --- log, show, diff, stats


def test_log(series):
    document = series.json("log")
    assert set(document) == set(NO_SNAPSHOTS)
    assert [s["step"] for s in document["snapshots"]] == [0, 1, 2, 3]
    assert all(set(s) == SNAPSHOT_KEYS for s in document["snapshots"])
    assert [s["parent"] for s in document["snapshots"]] == [None, *(s["id"] for s in document["snapshots"][:3])]
    series.save(state(), 0, run="other")
    assert [s["run"] for s in series.json("log", "--run", "other")["snapshots"]] == ["other"]
    assert [(s["run"], s["step"]) for s in series.json("log", "-n", 1)["snapshots"]] == [("exp", 3), ("other", 0)]
    assert "expected at least 1" in series.fails("log", "-n", 0, code=2)
    lines = series("log").stdout.splitlines()
    assert lines[0].split()[:3] == ["snapshot", "id", "created"]
    assert len(lines) == 6
    assert "loss=4" in lines[1]


def test_log_of_forgotten_snapshots(series):
    series("forget", "exp@1")
    assert [s["step"] for s in series.json("log")["snapshots"]] == [0, 2, 3]
    assert {s["step"]: s["state"] for s in series.json("log", "--all")["snapshots"]}[1] == "forgotten"
    assert "forgotten" in series("log", "--all").stdout
    parent = series.json("show", "exp@1")["snapshot"]["id"]
    (orphan,) = [line for line in series("log").stdout.splitlines() if line.startswith("exp@2")]
    assert f"from {parent[:8]}" in orphan  # the parent of step 2 is no longer in the list
    assert "from" not in series("log", "--all").stdout  # it is the row above
    assert series.json("show", parent[:8])["snapshot"]["id"] == parent  # an id is taken as it is printed


def test_log_fits_80_columns(sh):
    """With tags, forks and several metrics; metrics that do not fit are counted. Also on a terminal."""
    names = ("val_loss", "train_loss", "accuracy", "grad_norm")
    metrics = [word for name in names for word in ("--metric", f"{name}=0.123456")]
    for step in (100_000, 101_000, 102_000):
        sh.save(state(step), step, "--tag", f"t{step}", *metrics, run="llama-sft")
    sh.save(state(9), 1, "--parent", "llama-sft@100000", *metrics, run="exp")
    sh.save(state(10), 2, *metrics, run="exp")
    sh("forget", "exp@1")
    text = sh("log", "--all").stdout
    assert "val_loss=0.1235 +3" in text
    assert "@t100000" in text
    assert "forgotten from " in text
    assert max(map(len, text.splitlines())) <= 80
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", "80")
        with Repository.open(sh.url) as repository:
            inspect._print_log(repository.snapshots(), {})
    assert max(len(re.sub(r"\x1b\[\d*m", "", line)) for line in terminal.getvalue().splitlines()) <= 80


def test_superseded_saves_are_marked(sh):
    """These are two saves of one step in one run; a save in another run does not count."""
    first, second = sh.save(state(1), 5), sh.save(state(2), 5)
    sh.save(state(1), 5, run="other")
    assert sh.json("log")["superseded"] == [first["id"]]
    marked = [line.split()[1] for line in sh("log").stdout.splitlines() if "superseded" in line]
    assert marked == [first["id"][:8]]
    assert sh.json("show", first["id"])["superseded"] is True
    assert sh.json("show", second["id"])["superseded"] is False
    assert "superseded: exp@5 means a newer save" in sh("show", first["id"][:8]).stdout


def test_log_and_stats_of_nothing(sh):
    assert sh.json("stats")["ratio"] == 0
    assert "snapshots 0" in sh("stats").stdout
    result = sh("log")
    assert (result.stdout, result.stderr) == ("", "no snapshots\n")
    assert "has no snapshots" in sh.fails("log", "--run", "x")
    assert "has no snapshots" in sh.fails("log", "--run", "x", "--all")


def record_of(series, step):
    return next(Path(series.url).rglob(f"snapshots/exp/{step:012d}-*"))


def test_a_record_that_is_gone(series):
    """If a listing just left it out, a job would go on from an older step."""
    record = record_of(series, 3)
    data, named = record.read_bytes(), f"exp@3 (id:{record.name[13:25]})"
    record.unlink()
    result = series("log", "--json", code=3)
    assert [s["step"] for s in json.loads(result.stdout)["snapshots"]] == [0, 1, 2]
    assert f"gone from the store: 1 record that the index knows, of {named}; run 'snapstore repair" in result.stderr
    said = series("recode", "--all", "-n", code=3).stderr
    assert f"left out 1 record, unreadable or gone: snapshots/exp/{record.name}; run 'snapstore repair --apply'" in said
    for ref in ("exp@latest", "exp@3", f"id:{record.name[13:20]}"):
        for verb in (["show", ref], ["restore", ref, "-o", series.folder / "x.pt"]):
            said = series.fails(*verb, code=20)
            assert f"may be {named}, whose record is gone: " in said
            assert "repair --apply" in said
            assert "index rebuild --forget-missing" in said
    assert not (series.folder / "x.pt").exists()
    assert "exp@2" in series("restore", "exp@2", "-o", series.folder / "x.pt").stdout
    said = series.fails("index", "rebuild")
    assert "would drop 1 snapshot whose records only the index still has: exp@3 (id:" in said
    for verb in ("gc", "compact"):
        assert "1 known record, first snapshots/exp/" in series.fails(verb, code=20)
    series("repair", "--apply")
    assert record.read_bytes() == data
    assert series("log").stderr == ""
    record.unlink()
    result = series("index", "rebuild", "--forget-missing", "--json")
    assert (json.loads(result.stdout), result.stderr) == ({"snapshots": 3}, "")
    assert series("log").stderr == ""
    assert "that no record explains" in series.fails("gc", code=20)
    assert series.json("gc", "--unexplained")["deleted_objects"]


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_run_of_one_record_that_is_lost_is_no_unknown_run(series, harm):
    series.save(state(), 7, run="only")
    record = next(Path(series.url).rglob("snapshots/only/*"))
    record.unlink() if harm == "gone" else record.write_bytes(b"SNAP")
    assert "may be only@7 (id:" in series.fails("log", "--run", "only", code=20)
    assert "has no snapshots" in series.fails("log", "--run", "other")


def test_a_record_that_cannot_be_read_is_named_by_all_who_pass_over_it(series):
    record = record_of(series, 2)
    data = record.read_bytes()
    record.write_bytes(b"SNAP and no more")
    key = str(record.relative_to(series.url))
    for verb in (["log"], ["recode", "--all"], ["recode", "--all", "-n"], ["index", "rebuild"], ["index", "rebuild"]):
        result = series(*verb, code=3)
        why = ", unreadable or gone" if verb[0] == "recode" else " that cannot be read"
        assert f"left out 1 record{why}: {key}; run 'snapstore check'" in result.stderr
        assert result.stdout
    assert [s["step"] for s in series.json("log", code=3)["snapshots"]] == [0, 1, 3]
    series("repair", "--apply")  # a rebuild keeps what only the index knows about an unreadable record
    assert records.unpack(record.with_suffix(".1").read_bytes(), records.Snapshot, "").metrics == {"loss": 2.0}
    record.write_bytes(data)


def test_reconstructed_records_are_marked(series):
    record = record_of(series, 1)
    record.write_bytes(b"SNAP and no more")
    shutil.rmtree(index_of(Path(series.url)))
    assert "its date and its stored size are guesses" in series("repair", "--apply").stdout
    (name,) = series.json("log")["made_up"]
    assert series.json("log", "--all")["made_up"] == [name]
    assert f"-{name}." in record.name
    result = series("log")
    marked = ["  reconstructed" in line for line in result.stdout.splitlines()]
    assert marked == [False, False, True, False, False]
    assert "its stored size are guesses" in result.stderr
    assert series.json("show", "exp@1")["made_up"] is True
    assert "record    a repair reconstructed the lost record" in series("show", "exp@1").stdout
    assert "reconstructed" not in series("show", "exp@2").stdout
    text = series("check").stdout  # its metrics are lost for good
    assert "a later revision replaces it; only the content of this revision is lost" in text
    assert "nothing is lost" not in text


@pytest.mark.parametrize("ref", ["exp@99", "exp@tag", "none@1", "id:ffffffff", "id:xyz", "exp", "@", ""])
@pytest.mark.parametrize("verb", [["show"], ["restore", "-o", "x.pt"], ["tag", "t"], ["forget"], ["unforget"]])
def test_unknown_references(series, verb, ref):
    if (verb, ref) == (["show"], "exp"):
        ref = "none"  # `show` takes the name of a run
    assert "reference" in series.fails(verb[0], *verb[1:-1], *([verb[-1]] if len(verb) == 3 else []), ref,
                                       *(["t"] if verb == ["tag", "t"] else []))  # fmt: skip


def test_show(series):
    series("tag", "exp@1", "good")
    document = series.json("show", "exp@1")
    assert set(document) == {
        "snapshot", "parent", "children", "reasons", "metadata", "chunks", "new_chunks", "stall_s", "total_s",
        "manifests", "ranks", "tensors", "plain", "superseded", "damaged", "made_up", "unproven",
    }  # fmt: skip
    assert set(document["snapshot"]) == set(document["parent"]) == set(document["children"][0]) == SNAPSHOT_KEYS
    assert (document["parent"]["step"], document["children"][0]["step"]) == (0, 2)
    assert document["reasons"] == ["tag good"]
    assert {m["part"] for m in document["manifests"]} == {"", "model", "extra"}
    assert set(document["manifests"][0]) == {"part", "rank", "sha256", "size_bytes", "logical_bytes"}
    assert document["tensors"][0] == {
        "path": "model.w", "part": "model", "kind": "tensor", "dtype": "float32", "shape": [40, 50], "bytes": 8000,
        "chunks": 2,
    }  # fmt: skip
    text = series("show", "exp@1").stdout
    assert "children  exp@2" in text
    assert "[40, 50]" in text
    assert "parent    none" in series("show", "exp@0").stdout


def test_show_prints_plain_values(sh):
    """Short paths first; a list of plain values is one value; a tensor is none."""
    groups = [{"lr": 0.25, "betas": (0.9, 0.999), "params": list(range(300))}]
    sh.save({"optimizer": {"param_groups": groups, "w": torch.zeros(4)}, "epoch": 3, "nan": float("nan")}, 1)
    plain = {entry["path"]: entry["value"] for entry in sh.json("show", "exp@1")["plain"]}
    assert plain == {
        "optimizer.param_groups.0.lr": 0.25,
        "optimizer.param_groups.0.betas": [0.9, 0.999],
        "optimizer.param_groups.0.params": list(range(300)),
        "epoch": 3,
        "nan": "NaN",
    }
    lines = [line.split(maxsplit=1) for line in sh("show", "exp@1").stdout.split("value  ")[1].splitlines()[1:]]
    assert lines[:3] == [["epoch", "3"], ["nan", "nan"], ["optimizer.param_groups.0.lr", "0.25"]]
    assert lines[4][1].startswith("0, 1, 2, 3,")
    assert lines[4][1].endswith("... (300 in all)")
    sh.save({str(i): i for i in range(70)}, 2)
    assert "and 20 more" in sh("show", "exp@2").stdout
    assert len(sh.json("show", "exp@2")["plain"]) == 70


def test_show_reasons_of_stored_policies_and_of_forgotten(series, monkeypatch):
    with Repository.open(series.url) as repository:
        repository.set_policies("exp", [KeepLast(2)])
    assert series.json("show", "exp@3")["reasons"] == ["last 2", "newest"]
    assert series.json("show", "exp@0")["reasons"] == []
    assert len(series.json("forget", "--run", "exp")["forgotten"]) == 2  # by the stored ones
    assert series.json("show", "exp@0")["reasons"] == ["kept by no policy", "KeepLast(2)"]
    with monkeypatch.context() as unreadable:
        error = StorageError("policies/exp.0: cannot read")
        unreadable.setattr(policy_store, "read", lambda *_: (_ for _ in ()).throw(error))
        assert series.json("show", "exp@3")["reasons"] == ["unknown: policies/exp.0: cannot read"]
    series("gc")
    swept = series.json("show", "exp@0")
    assert (swept["snapshot"]["state"], swept["tensors"]) == ("swept", [])
    assert "swept" in series("show", "exp@0").stdout


def test_diff(series):
    document = series.json("diff", "exp@0", "exp@2")
    assert set(document) == {"a", "b", "tensors", "plain"}
    assert set(document["a"]) == SNAPSHOT_KEYS
    by_path = {t["path"]: t for t in document["tensors"]}
    assert set(by_path["model.w"]) == {"path", "status", "changed_share", "relative_l2", "note"}
    assert by_path["model.w"]["changed_share"] > 0.9
    assert by_path["model.b"]["status"] == "same"
    assert document["plain"] == [{"path": "extra.step", "before": "0", "after": "2"}]
    text = series("diff", "exp@0", "exp@2").stdout
    assert "1 of 2 tensors are the same" in text
    assert series("diff", "exp@0", "exp@0").stdout == "2 of 2 tensors are the same\n"


def test_numbers_that_json_does_not_know(sh):
    sh.save({"z": torch.zeros(4), "gone": torch.ones(2)}, 1, "--metric", "x=-inf", "--metric", "y=nan")
    sh.save({"z": torch.ones(4)}, 2, "--metric", "x=inf")
    tensors = {t["path"]: t for t in sh.json("diff", "exp@1", "exp@2")["tensors"]}
    assert tensors["z"]["relative_l2"] == "Infinity"
    assert tensors["gone"]["changed_share"] is None
    assert sh.json("log")["snapshots"][0]["metrics"] == {"x": "-Infinity", "y": "NaN"}
    assert "removed" in sh("diff", "exp@1", "exp@2").stdout


def test_stats(series):
    document = series.json("stats")
    assert set(document) == {
        "snapshots", "packs", "logical_bytes", "stored_bytes", "ratio", "groups", "codecs", "chunks", "unique_chunks",
        "base_only_bytes", "unneeded_bytes", "depths", "unknown",
    }  # fmt: skip
    assert document["snapshots"] == 4
    assert document["ratio"] == document["logical_bytes"] / document["stored_bytes"]
    assert set(document["groups"]["model"]) == {"logical_bytes", "stored_bytes"}
    assert "model" in series("stats").stdout


# --- tag, untag, forget, unforget, gc


def test_tags(series):
    tagged = series.json("tag", "exp@1", "good")
    assert set(tagged) == {"snapshot", "moved_from"}
    assert tagged["snapshot"]["tags"] == ["good"]
    assert tagged["moved_from"] is series.json("tag", "exp@1", "good")["moved_from"] is None  # it stays
    exp = {step: series.json("show", f"exp@{step}")["snapshot"] for step in (1, 2)}
    assert "is tagged good" in series.fails("forget", "exp@1")
    ids = {step: exp[step]["id"][:12] for step in exp}
    moved = f"exp@2 (id:{ids[2]}) is now tagged good; the tag moved from exp@1 (id:{ids[1]})\n"
    assert series("tag", "exp@2", "good").stdout == moved
    assert series.json("show", "exp@good")["snapshot"]["step"] == 2
    assert series.json("tag", "exp@1", "good")["moved_from"]["id"] == exp[2]["id"]
    assert series("tag", "exp@2", "good").stdout == moved
    assert "no tag 'bad'" in series.fails("untag", "exp@2", "bad")
    assert "no tag 'bad'" in series.fails("untag", "exp@2", "bad", "-n")
    assert "would no longer" in series("untag", "exp@2", "good", "-n").stdout
    assert series.json("show", "exp@2")["snapshot"]["tags"] == ["good"]
    assert series.json("untag", "exp@2", "good")["snapshot"]["tags"] == []
    for name in ("a/b", "latest", "12", "x" * 300):
        assert "tag " in series.fails("tag", "exp@1", name)


def test_a_tag_that_went_elsewhere_at_once(series, monkeypatch):
    """It said "is now tagged", although another process had already moved the tag to a newer snapshot."""
    take = tags.take

    def late(*args):
        monkeypatch.setattr(tags, "take", take)
        series("tag", "exp@2", "good")
        return take(*args)

    monkeypatch.setattr(tags, "take", late)
    error = series.fails("tag", "exp@1", "good", code=11)
    assert "exp@1: another process gave good to another snapshot of the run at the same time" in error
    assert series.json("show", "exp@good")["snapshot"]["step"] == 2
    assert series.json("show", "exp@1")["snapshot"]["tags"] == []
    assert "exp@1 " in series("tag", "exp@1", "good").stdout


def test_forget_by_policy(series):
    ids = [s["id"] for s in series.json("log")["snapshots"]]
    options = ["--run", "exp", "--keep-last", 1, "--keep-best", "loss:1:max"]
    dry = series.json("forget", *options, "-n")
    assert len(series.json("log")["snapshots"]) == 4
    done = series.json("forget", *options)
    assert dry == done
    assert set(done) == {"kept", "forgotten", "unknown", "frees_bytes"}
    assert done["kept"] == [
        {"id": ids[0], "reasons": ["best loss (#1)"]},
        {"id": ids[3], "reasons": ["last 1", "newest"]},
    ]
    assert done["forgotten"] == ids[1:3]


def test_forget_to_free_space_proposes_then_does_it(series):
    rows = {row["name"]: row for row in series.json("du", "exp")["rows"]}
    assert all(row["stored_bytes"] >= row["unshared_bytes"] >= row["freed_bytes"] > 0 for row in rows.values())
    oldest = min(rows, key=lambda name: int(name.partition("@")[2]))
    size = rows[oldest]["freed_bytes"]
    dry = series.json("forget", "--free", str(size), "-n")
    assert (len(dry["forgotten"]), dry["kept"]) == (1, [])
    assert "then frees" in series("forget", "--free", str(size), "-n").stdout
    done = series.json("forget", "--free", str(size), "--run", "exp")
    assert done == dry
    assert series.json("gc")["deleted_bytes"] == done["frees_bytes"] >= size
    series.fails("forget", "--free", "1T")
    for wrong in (["1G", "--keep-last", "1"], ["lots"], ["1G", "exp@1"]):
        series.fails("forget", "--free", *wrong, code=2)


def test_the_help_of_forget_explains_every_policy():
    """Each with its own sentence."""
    text = " ".join(invoke(["forget", "-h"]).stdout.split())
    for words in (
        "--keep-last N Keep the N newest steps",
        "--keep-every STEPS Keep all multiples of STEPS",
        "Keep the N best steps (default 1) by a metric",
        "at most this much older than the newest",
        "--keep-steps STEP,... Keep these",
        *(f"--keep-{each} N Keep the newest of each of the last N {unit} (UTC)" for each, unit in PERIODS.items()),
    ):
        assert words in text


PERIODS = {"hourly": "hours", "daily": "days", "weekly": "weeks", "monthly": "months", "yearly": "years"}


def test_forget_says_why(series):
    text = series("forget", "--run", "exp", "--keep-every", 2, "-n").stdout
    assert "every 2 steps" in text
    assert "would be forgotten" in text
    result = series("forget", "--run", "exp", "--keep-every", 2)
    assert "1 forgotten" in result.stdout
    assert "unforget" in result.stderr


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--keep-every", "3"], [0, 3]),
        (["--keep-best", "loss"], [3]),
        (["--keep-best", "loss:2"], [2, 3]),
        (["--keep-best", "loss:1:max", "--keep-best", "none"], [0, 3]),
        (["--keep-steps", "1, 2"], [1, 2, 3]),
        (["--keep-within", "1d"], [0, 1, 2, 3]),
        (["--keep-hourly", "1"], [3]),
        (["--keep-daily", "1"], [3]),
        (["--keep-weekly", "1"], [3]),
        (["--keep-monthly", "1"], [3]),
        (["--keep-yearly", "1"], [3]),
        (["--keep-bytes", "1"], [3]),
        (["--keep-bytes", "1.5GB"], [0, 1, 2, 3]),
        (["--keep-steps", "77", "--force"], [3]),
        (["--force"], [3]),
    ],
)
def test_every_policy(series, options, steps):
    by_id = {s["id"]: s["step"] for s in series.json("log")["snapshots"]}
    kept = [by_id[s["id"]] for s in series.json("forget", "--run", "exp", *options, "-n")["kept"]]
    assert set(steps) <= set(kept)
    if "hourly" not in options[0]:  # the run of this test may cross the hour
        assert len(kept) <= len(steps) + 1


def test_the_best_by_a_metric_with_a_colon(sh):
    steps = {}
    with Repository.open(sh.url) as repository:
        for step, loss in enumerate((0.5, 0.1, 0.3, 0.2, 0.4)):
            steps[repository.save({"w": step}, run="colons", step=step, metrics={"val:loss": loss}).id] = step
    for option, best in (("val:loss:1", {1}), ("val:loss:2:min", {1, 3}), ("val:loss:2:max", {0, 4})):
        kept = sh.json("forget", "--run", "colons", "--keep-best", option, "-n")["kept"]
        assert {steps[s["id"]] for s in kept} == best | {4}
    assert "such as val:loss:1" in sh.fails("forget", "--run", "exp", "--keep-best", "val:loss", code=2)


def test_policies_that_make_no_sense(series):
    assert "would keep none" in series.fails("forget", "--run", "exp", "--keep-steps", "77")
    assert "no policy is stored" in series.fails("forget", "--run", "exp")
    assert "no snapshots" in series.fails("forget", "--run", "nope", "--keep-last", 1)
    assert "no snapshots" in series.fails("forget", "--run", "nope")
    assert "KeepLast" in series.fails("forget", "--run", "exp", "--keep-last", 0)
    assert "duration" in series.fails("forget", "--run", "exp", "--keep-within", "soon")
    for bad in ("loss:x", "loss:1:best", ":1", "loss:1:min:2", "loss:1:2", "", f"loss:{'9' * 5000}", "val:loss"):
        assert "--keep-best" in series.fails("forget", "--run", "exp", "--keep-best", bad, code=2)
    for bad in ("1,x", "9" * 5000):
        assert "--keep-steps" in series.fails("forget", "--run", "exp", "--keep-steps", bad, code=2)
    assert "not both" in series.fails("forget", "exp@1", "--keep-last", 1, code=2)
    assert "no snapshot named" in series.fails("forget", code=2)
    assert len(series.json("log")["snapshots"]) == 4


def test_forget_and_unforget_by_name(series):
    dry = series.json("forget", "exp@0", "exp@1", "-n")
    assert dry["kept"] == []
    assert len(series.json("log")["snapshots"]) == 4
    assert series.json("forget", "exp@0", "exp@1") == dry
    assert series.json("unforget", "exp@0")["snapshot"]["state"] == "committed"
    assert "is not forgotten" in series.fails("unforget", "exp@0")
    assert "is back" in series("unforget", f"id:{dry['forgotten'][1]}").stdout
    series("forget", "exp@1")
    series("gc")
    assert "cannot come back" in series.fails("unforget", "exp@1")


def test_gc(series):
    series.save({"alone": torch.randn(5000)}, 1, run="gone")
    series.save({"alone": torch.zeros(1)}, 2, run="gone")
    series("forget", "gone@1")
    assert series("check").stdout.splitlines()[-1] == "no problems"  # it names no garbage
    dry = series.json("gc", "-n")
    assert set(dry) == {"deleted_objects", "deleted_bytes", "stored_bytes", "waiting_for", "fenced", "dry_run"}
    assert dry["dry_run"] is True
    done = series.json("gc")
    assert (done["deleted_objects"], done["deleted_bytes"]) == (dry["deleted_objects"], dry["deleted_bytes"])
    assert done["deleted_bytes"] > 18_000
    assert "deleted 0 objects" in series("gc", "--fence-after", "2d").stdout
    assert "would delete 0" in series("gc", "-n").stdout
    for bad in ("soon", "-1", "1y", ""):
        assert "--fence-after" in series.fails("gc", "--fence-after", bad, code=2)


def test_a_dry_gc_waits_where_a_gc_would(series):
    session = Path(series.url, "sessions", "2" * 32)
    for code in (0, 3):
        if code:  # before this there is nothing to delete, so nothing to wait for
            series("forget", "exp@0")
        session.write_bytes(b"\xff" * 100)
        for args in (["gc", "-n"], ["gc"]):
            result = series(*args, "--json", code=code)
            assert json.loads(result.stdout)["waiting_for"] == [session.name] * bool(code)
            assert ("1 save may be running" in result.stderr) == bool(code)
    assert session.exists()


def test_gc_waits_for_living_saves_and_gives_up_dead_ones(series):
    series("forget", "exp@0")
    with Repository.open(series.url) as repository:
        key = record_key("exp", 9, "0" * 32, 0)
        held = this_session("0" * 32, key)
        repository.store.lock(f"sessions/{held.id}", records.encode(held))
        result = series("gc", "--json", code=3)
        assert json.loads(result.stdout)["waiting_for"] == [held.id]
        assert "run 'snapstore gc' again" in result.stderr
        repository.store.release(f"sessions/{held.id}")
        repository.store.put(f"sessions/{held.id}", records.encode(held))  # nobody holds this one
    assert "fenced 1 dead save\n" in series("gc").stdout
    assert {s["state"] for s in series.json("log", "--all")["snapshots"]} >= {"aborted"}
    assert series.json("show", "id:" + "0" * 32)["snapshot"]["state"] == "aborted"


# --- check, index, doctor, demo


@pytest.mark.parametrize("options", [[], ["--apply"], ["--level", "restore"]])
def test_repair_of_a_healthy_repository_says_that_all_is_well(series, options):
    result = series("repair", *options)
    read = r"4 of 4 packs read, \S+ decoded" if "--level" in options else "4 of 4 packs read"
    assert re.fullmatch(rf"no problems: 4 snapshots are restorable \({read}\); nothing to repair\n", result.stdout)
    assert result.stderr == ""


def test_a_tilde_in_the_paths_of_the_shell(sh, monkeypatch):
    """As in --repo=~/repo, which a shell does not expand."""
    home = {"HOME": str(sh.folder)}
    monkeypatch.setenv("HOME", str(sh.folder))
    torch.save(state(), sh.folder / "state.pt")
    sh("save", "~/state.pt", "--run", "a", "--step", 1, "--repo=~/repo", **home)
    sh("restore", "a@1", "--output=~/out.pt", SNAPSTORE_REPO="~/repo", **home)
    assert (sh.folder / "out.pt").exists()
    sh("init", "~/second", **home)
    assert (sh.folder / "second" / "config").exists()
    assert f"{sh.folder}/third: does not exist yet" in sh("doctor", "~/third", **home).stdout


def test_check(series):
    for options in ([], ["--read-data"], ["--read-data=50%"], ["--read-data", "--restore"], ["--restore"]):
        document = series.json("check", *options)
        keys = "ok problems notes restorable damaged unknown packs packs_read decoded_bytes"
        assert set(document) == set(keys.split())
        assert (document["ok"], document["problems"], len(document["restorable"])) == (True, [], 4)
        assert document["packs"] == 4
        assert document["packs_read"] == {(): 0, ("--read-data=50%",): 2}.get(tuple(options), 4)
    packs = [path.name for path in Path(series.url, "packs").rglob("?" * 64)]
    text = series("check", "--read-data=1/3").stdout
    read = sum(int(name[-8:], 16) % 3 == 0 for name in packs)
    assert f"4 snapshots {'are' if read == 4 else 'look'} restorable ({read} of 4 packs read)\n" in text
    series("forget", "exp@0")
    expected = "3 snapshots look restorable, 1 is forgotten (metadata checked; --read-data verifies every byte)\n"
    assert expected in series("check").stdout
    assert "no problems" in text
    assert "packs read" not in series("check").stdout
    for bad in ("0%", "101%", "4/3", "0/3", "x", "5", "5 5%", "%"):
        assert "--read-data" in series.fails("check", f"--read-data={bad}", code=2)
    assert "--read-data=5: expected a share" in series.fails("check", "--read-data", "5", code=2)


def test_the_share_of_a_check_may_have_blanks(series):
    half = ["--read-data=50 %"], ["--read-data=50", "%"], ["--read-data", "50%"], ["--read-data", "50 %"]
    for options in (*half, ["--read-data", "50", "%"]):
        assert series.json("check", *options)["packs_read"] == 2
    assert series.json("check", "--restore", "--read-data", "100%")["packs_read"] == 4
    assert series.json("check", "--read-data", "--restore")["packs_read"] == 4


def test_check_of_damage_is_20(series):
    packs = sorted(Path(series.url, "packs").rglob("*/*"))
    for pack in packs:
        flip_file(pack, pack.stat().st_size // 3)
    assert series.json("check")["ok"] is True
    document = series.json("check", "--read-data", code=20)
    assert document["ok"] is False
    assert set(document["problems"][0]) == {"kind", "key", "message", "snapshots", "command", "help"}
    assert len(document["restorable"]) < 4
    parts = [len(series.json("check", f"--read-data={n}/2", code=c)["problems"])
             for n in (1, 2) for c in [20 if any(int(p.name[-8:], 16) % 2 == n - 1 for p in packs) else 0]]  # fmt: skip
    assert sum(parts) == len(document["problems"])  # the shares are all, each pack once
    text = series("check", "--read-data", code=20).stdout
    worst = max(document["problems"], key=lambda problem: len(problem["snapshots"]))  # packs come by their names
    ids = {s["id"]: f"exp@{s['step']}" for s in series.json("log")["snapshots"]}
    hurt = [ref for one, ref in ids.items() if one in worst["snapshots"]]
    named = f"of which {len(hurt)} lose chunks: {', '.join(hurt)}\n"
    assert worst["message"].endswith(named.rstrip())
    assert len(hurt) > 1
    assert named in text
    assert re.search(r"snapshots? cannot be restored: exp@0", text)
    fine = [ref for one, ref in ids.items() if one in document["restorable"]]
    assert (f"\nrestorable: {', '.join(fine)}\n" in text) == bool(fine)
    assert "SHA-256" in text
    series.fails("restore", "exp@0", "-o", series.folder / "o.pt", code=20)
    assert not (series.folder / "o.pt").exists()


def test_check_names_what_only_another_release_reads(series):
    (record,) = Path(series.url, "snapshots", "exp").glob("*0002-*")
    data = bytearray(record.read_bytes())
    data[5] = 2
    struct.pack_into("<Q", data, 16, checksum(bytes(data[:16]) + bytes(data[24:])))
    record.unlink()
    record.write_bytes(data)
    document = series.json("check", code=20)
    assert (len(document["restorable"]), document["damaged"], len(document["unknown"])) == (3, [], 1)
    text = series("check", code=20).stdout
    assert "format version 2" in text
    found = (
        r"3 snapshots look restorable.*\nrestorable: exp@0, exp@1, exp@3\n"
        r"1 snapshot could not be checked on this machine \(see above\): exp@2 "
    )
    assert re.search(found, text)
    assert "To fix, run:" not in text


# --- compact


def test_compact(sh):
    weight = torch.randn(200, 200, generator=torch.Generator().manual_seed(7))
    for step in range(8):
        sh.save({"model": {"w": weight + step * 1e-3}}, step)
    sh("forget", "--run", "exp", "--keep-last", "2")
    sh("gc")
    keys = sorted(path for path in (sh.folder / "repo").rglob("?" * 64))
    dry = sh.json("compact", "-n")
    assert dry["dry_run"]
    assert sorted(path for path in (sh.folder / "repo").rglob("?" * 64)) == keys
    assert "would be rewritten" in sh("compact", "--dry-run").stdout
    none = sh.json("compact", "--max-repack-size", "0")
    assert (none["rewritten"], none["bytes_written"]) == ([], 0)
    done = sh.json("compact", "--max-repack-size", "10G")
    assert set(done) == {
        "rewritten", "skipped", "failed", "encoded", "moved", "bytes_read", "bytes_written", "bytes_before",
        "bytes_after", "dry_run",
    }  # fmt: skip
    assert done["rewritten"] == dry["rewritten"]
    assert done["bytes_after"] < done["bytes_before"]
    sh("gc")
    again = sh("compact")
    assert again.stdout.startswith("0 snapshots rewritten, 2 unchanged, 0 failed; ")
    assert again.stderr == ""
    assert sh.json("stats")["stored_bytes"] == done["bytes_after"]
    assert sh.json("check", "--restore")["ok"]


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("17", 17), ("3k", 3072), ("10G", 10 * 2**30), ("2MiB", 2**21)]
)
def test_sizes(text, expected):
    assert app.size_of(text, "--size") == expected


def test_compact_usage(series):
    for wrong in ("G", "-1", "1.5", "10X"):
        assert "expected a number of bytes" in series.fails("compact", f"--max-repack-size={wrong}", code=2)
    assert "no such step" in series.fails("compact", "exp@77")


# --- recode


@pytest.fixture
def abroad(sh, monkeypatch):
    """exp@0 and exp@1 in codec 70, exp@2 portable."""
    foreign.readable(monkeypatch)
    with foreign.written():
        sh.save(state(0), 0)
        sh.save(state(1), 1)
    sh.save(state(2), 2, "--full")
    return sh


def test_recode(abroad):
    ids = [s["id"] for s in abroad.json("log")["snapshots"]]
    dry = abroad.json("recode", "--all", "-n")
    assert (dry["recoded"], dry["skipped"], dry["failed"], dry["bytes_after"]) == (ids[:2], ids[2:], [], 0)
    assert dry["dry_run"]
    assert "2 snapshots would be recoded to portable, 1 unchanged" in abroad("recode", "--all", "-n").stdout
    named = abroad.json("recode", "exp@1")
    assert set(named) == {
        "codec", "recoded", "skipped", "failed", "unknown", "blobs", "bytes_before", "bytes_after", "dry_run",
    }  # fmt: skip
    assert named["recoded"] == ids[1:2]
    done = abroad("recode", "--all", "--codec", "portable")
    assert done.stdout.startswith("1 snapshot recoded to portable, 2 unchanged, 0 failed; ")
    assert "gc" in done.stderr
    assert abroad("recode", "--all").stderr == ""
    abroad("gc")
    assert not any("nvCOMP" in name for name in abroad.json("stats")["codecs"])
    assert abroad.json("check", "--restore")["ok"]


def test_recode_of_what_is_damaged(abroad):
    packs = sorted((abroad.folder / "repo" / "packs").rglob("?" * 64), key=lambda path: path.stat().st_mtime_ns)
    gone = packs[0]
    gone.unlink()
    result = abroad.json("recode", "--all", code=3)
    assert result["failed"]
    assert all(gone.name in failed["message"] for failed in result["failed"])
    assert "failed: exp@" in abroad("recode", "--all", code=3).stdout


def test_an_error_names_a_thing_and_an_advice_once(series):
    """It also names the snapshot, what was expected, and what was found."""

    def once(text, *parts):
        assert [text.count(part) for part in (*parts, "run 'snapstore ")] == [1] * (len(parts) + 1), text
        return text

    record = record_of(series, 2)
    flip_file(record, 60)
    shutil.rmtree(index_of(Path(series.url)))
    wrong = r": checksum mismatch: expected [0-9a-f]{16}, got [0-9a-f]{16}: "
    for args in (["gc"], ["compact"], ["show", "exp@2"]):
        assert re.search(wrong, once(series.fails(*args, code=20), f"{record.relative_to(series.url)}"))
    flip_file(record, 60)
    pack = max(Path(series.url, "packs").rglob("?" * 64), key=lambda path: path.stat().st_mtime_ns)
    pack.unlink()
    key = pack.relative_to(series.url)
    assert once(series.fails("gc", code=20), f"{key}").startswith(f"gc: 1 live object missing: {key}; nothing was")
    assert once(series.fails("diff", "exp@2", "exp@3", code=20), f"{key}").startswith("exp@3 (id:")
    result = series("recode", "exp@3", code=3)
    assert result.stderr == ""
    once(result.stdout, "exp@3", f"{key}")


def test_recode_usage(series):
    assert "name snapshots, or pass --all" in series.fails("recode", code=2)
    assert "not both" in series.fails("recode", "exp@1", "--all", code=2)
    assert series("recode", "--all", "--codec", "zip", code=2).stdout == ""
    assert "no such step" in series.fails("recode", "exp@77")
    if not torch.cuda.is_available():
        assert "no CUDA device" in series.fails("recode", "--all", "--codec", "ans")


def test_index_rebuild(series):
    assert series.json("index", "rebuild") == {"snapshots": 4}
    assert "rebuilt the index: 4" in series("index", "rebuild").stdout
    assert series("index", "eat", code=2).stdout == ""


def test_doctor(series):
    before = sorted(Path(series.url).rglob("*"))
    document = series.json("doctor")
    assert set(document) == {"ok", "findings"}
    assert all(set(finding) == {"name", "ok", "message"} for finding in document["findings"])
    found = {finding["name"]: finding for finding in document["findings"]}
    assert document["ok"], found
    assert "4 snapshots" in found["repository"]["message"]
    assert found["repository"]["message"].endswith(str(index_of(Path(series.url))))
    assert {"writing", "create-only", "signs of life", "clock", "throughput", "free space", "file system"} <= set(found)
    assert sorted(Path(series.url).rglob("*")) == before
    assert "torch" in series("doctor").stdout


@pytest.mark.parametrize(
    ("free", "hours", "word", "ok"),
    [
        (10**15, 24, "days", True), (2 * 10**6, 24, "WARNING", None), (1000, 24, "less than two saves", False),
        (10**9, 0.01, "do not tell", None),
    ],
)  # fmt: skip
def test_doctor_tells_when_the_volume_is_full(sh, monkeypatch, free, hours, word, ok):
    """Of the first twelve of 24 saves, two hours apart, the bytes of the forgotten ones do not count."""
    now = time.time()
    with Repository.open(sh.url) as repository:
        for step in range(24):
            monkeypatch.setattr("time.time", lambda step=step: now + step * hours * 300)
            repository.save({"w": torch.randn(30_000)}, run="r", step=step, full=True)
        repository.forget([KeepLast(3), KeepEvery(4)], run="r")
        stays = sum(s.stored_bytes for s in repository.snapshots() if s.step in (4, 8))
    monkeypatch.setattr("time.time", lambda: now + 24 * hours * 300)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**15, 0, free))
    (found,) = [one for one in doctor.place(sh.url) if one.name == "filling"]
    assert word in found.message
    assert found.ok is ok
    if word == "days":
        days = float(found.message.partition("full in ")[2].partition(" ")[0])
        assert days == pytest.approx(free / stays * 11 * hours * 300 / 86400, rel=1e-3)


def test_a_volume_where_only_the_newest_stay_does_not_fill(sh, monkeypatch):
    """A snapshot that a wrong clock dated next year does not count."""
    now = time.time()
    with Repository.open(sh.url) as repository:
        for step in range(20):
            monkeypatch.setattr("time.time", lambda step=step: now + (3e7 if step == 5 else step * 7200))
            repository.save({"w": torch.randn(30_000)}, run="r", step=step, full=True)
            repository.forget(KeepLast(5), run="r")
    monkeypatch.setattr("time.time", lambda: now + 20 * 7200)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**15, 0, 10**6))
    (found,) = [one for one in doctor.place(sh.url) if one.name == "filling"]
    assert found.ok, found


def test_doctor_leaves_no_folder_where_the_cache_cannot_be_used(series, tmp_path, monkeypatch):
    """The repository has a temporary index then."""
    temporary, cache = tmp_path / "temporary", tmp_path / "cache"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    found = {f["name"]: f for f in series.json("doctor", SNAPSTORE_CACHE_DIR=str(cache))["findings"]}
    assert found["repository"]["message"].endswith("; index: temporary")
    assert not list(temporary.iterdir())


def test_doctor_of_other_places(sh, tmp_path):
    (tmp_path / "empty").mkdir()
    places = {tmp_path / "empty": "no repository here", tmp_path / "a" / "b": "does not exist yet"}
    places |= {f"{scheme}{tmp_path}/a%20b": f"{tmp_path}/a b: does not" for scheme in ("FILE://", "file://localhost")}
    for place, word in places.items():
        assert word in sh("doctor", place).stdout
    assert not list((tmp_path / "empty").iterdir())
    assert not (tmp_path / "a").exists()
    assert "FAIL" in sh("doctor", "ftp://x", code=1).stdout
    assert "no repository here" in sh("doctor", "memory://doctor").stdout
    Path(sh.url, "config").write_bytes(b"rubbish")
    assert sh.json("doctor", code=1)["ok"] is False
    assert "writing" not in {f["name"] for f in sh.json("doctor", SNAPSTORE_REPO="")["findings"]}


def test_doctor_of_machines_that_lack_something(sh, monkeypatch):
    findings = {f["name"]: f for f in sh.json("doctor", code=1, SNAPSTORE_THREADS="x")["findings"]}
    assert findings["cores"]["ok"] is False
    assert doctor._version("no-such-library") == "not installed"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 // 0)
    assert doctor._torch().ok is False
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(errno.EROFS, "ro")))
    assert "read-only or no permission" in sh("doctor", code=1).stdout


class OddStore:
    """A store in which some methods are replaced, to break promises."""

    def __init__(self, root, **odd):
        self.store, self.odd = LocalStore(root), odd

    def __getattr__(self, name):
        return self.odd.get(name) or getattr(self.store, name)

    @contextmanager
    def sandbox(self):
        with self.store.sandbox() as trial:
            yield OddStore(trial.root, **self.odd)


def test_doctor_sees_odd_stores(tmp_path):
    def verdict(name, **odd):
        findings = {finding.name: finding for finding in doctor._probe(OddStore(tmp_path, **odd))}
        return findings[name].ok, findings[name].message

    assert verdict("writing", list=lambda prefix: [])[0] is False
    assert verdict("names") == (True, "differ by case")
    assert verdict("names", get=lambda key: b"0")[0] is False
    assert verdict("create-only", put=lambda key, data: None, get=lambda key: b"")[1] == (
        "8 of 8 racing writers won, expected one"
    )
    assert verdict("create-only", get=lambda key: b"other") == (
        False,
        "the stored bytes are those of a writer that lost",
    )

    def broken(*_):
        raise StorageError("no")

    assert verdict("create-only", put=broken, get=lambda key: b"")[0] is False
    wrong = verdict("ranges", get_range=lambda key, offset, length: memoryview(bytes(length)))
    assert wrong == (False, "a range of an object has the wrong bytes")
    refused = verdict("deletes", delete=broken)
    assert refused == (True, "are refused here, so saves and restores work and gc does not: no")
    assert verdict("deletes", delete=lambda keys: None) == (False, "a deleted object is still listed")
    assert verdict("signs of life", is_locked=lambda key: False)[0] is False
    assert verdict("signs of life", is_locked=lambda key: None)[0] is True
    assert verdict("clock", now_s=lambda: time.time() + 500) == (True, "500 s ahead")
    assert "not verified" in verdict("checksums", refuses_damage=lambda: False)[1]
    assert verdict("checksums", refuses_damage=lambda: True)[1].startswith("are verified by the server")
    assert not list(tmp_path.iterdir())


def test_doctor_of_a_cache_on_a_network(monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path))
    assert doctor._cache().ok
    monkeypatch.setattr(cache_module, "on_network", lambda folder: True)
    assert "every start reads all records" in doctor._cache().message
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", "relative")
    assert doctor._tested("index", doctor._cache).ok is False


def test_the_mount_where_proc_is_missing(monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(OSError()))
    assert mount_of(Path("/x")) == ("", "")
    assert not on_network(Path("/x"))


def test_nvcomp_is_looked_for_without_importing():
    assert doctor._present("no_such_parent.child") is False
    assert doctor._present("json.decoder") is True


def test_demo(sh, monkeypatch, tmp_path):
    calls = []

    def run(command, **options):
        calls.append((command, options["stdout"]))
        return subprocess.CompletedProcess(command, codes.pop(0))

    codes = [0, 1, -9]
    monkeypatch.setattr(maintenance.subprocess, "run", run)
    assert sh.json("demo", "--keep", tmp_path / "kept") == {"ok": True, "exit_code": 0}
    assert calls[0][0][1].endswith("tools/demo.py")
    assert calls[0][0][2:] == ["--keep", str(tmp_path / "kept")]
    assert calls[0][1] is not None
    sh("demo", code=1)
    sh("demo", code=1)
    monkeypatch.setattr(maintenance, "__file__", str(tmp_path / "site" / "snapstore" / "cli" / "maintenance.py"))
    assert "clone" in sh.fails("demo")


def test_an_installed_package_does_not_list_the_demo(tmp_path):
    """The demo needs files of a checkout that a wheel does not hold."""
    package = Path(cli.__file__).parents[1]
    shutil.copytree(package, tmp_path / "snapstore", ignore=shutil.ignore_patterns("__pycache__"))
    for root, listed in ((tmp_path, False), (package.parent, True)):
        command = [sys.executable, "-m", "snapstore", "--help"]
        result = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
        assert "  doctor " in result.stdout
        assert ("  demo " in result.stdout) is listed


# --- output


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def test_tables_on_a_terminal_and_in_a_pipe(monkeypatch, capsys):
    rows = [["[bold]a[/]\x1b[31m", 1], ["b" * 150, 22]]
    output.table(["name", ">count"], rows)
    piped = capsys.readouterr().out.splitlines()
    assert piped[0] == "name" + " " * 146 + "  count"
    assert piped[1].startswith(r"[bold]a[/]\x1b[31m ")
    assert [len(line) for line in piped] == [157] * 3
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output.table(["name", ">count"], rows)
    lines = terminal.getvalue().splitlines()
    assert len(lines) == 4  # names, a rule, and no row was folded
    assert lines[3].split() == ["b" * 150, "22"]
    assert r"[bold]a[/]\x1b[31m" in terminal.getvalue()


def test_times_of_clocks_far_off(monkeypatch):
    monkeypatch.setenv("TZ", "EAST-14")
    time.tzset()
    try:
        assert output.local(0) == "1970-01-01 14:00:00"
        assert output.local(1e300) == "9999-12-31T23:59:59.999999Z"  # local time would be after the last day
    finally:
        monkeypatch.undo()
        time.tzset()
    assert output.iso(0) == "1970-01-01T00:00:00.000000Z"
    for mad in (1e300, -1e300, float("nan"), float("inf"), 253402300799.0):
        assert output.iso(mad).endswith("Z")
        assert output.local(mad)


def test_values_that_json_has_no_form_for():
    assert output.plain({1: (b"x", True, None, float("inf"))}) == {"1": ["b'x'", True, None, "Infinity"]}


def test_the_spinner_shows_only_what_takes_long(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with output.spinner("quick"):
        pass
    assert terminal.getvalue() == ""
    monkeypatch.setattr(output, "SPINNER_AFTER_S", 0.0)
    with output.spinner("slow"):
        until(lambda: "slow" in terminal.getvalue())


# --- as a process of its own


def test_main_without_torch(series):
    """--help imports neither torch nor NumPy; verbs that need no tensors import no torch."""
    program = (
        "import json, sys\nfrom snapstore.cli import main\n"
        "for sys.argv[1:] in json.loads(sys.argv[1]):\n"
        "    try: main()\n    except SystemExit as e: code = e.code\n"
        "    print([m for m in ('torch', 'numpy') if m in sys.modules], code, file=sys.stderr)"
    )
    verbs = [["log"], ["gc"], ["check", "--restore"], ["forget", "--run", "exp", "--keep-last", "2"], ["stats"],
             ["show", "exp@3"], ["tag", "exp@3", "x"], ["untag", "exp@3", "x"], ["index", "rebuild"]]  # fmt: skip
    commands = [["--help"], *([*verb, "--json"] for verb in verbs)]
    done = run_python("-c", program, json.dumps(commands), SNAPSTORE_REPO=series.url)
    said = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert said[0] == "[] 0"
    for verb, line in zip(verbs, said[1:], strict=True):
        assert line == "['numpy'] 0", (verb, done.stderr)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len([json.loads(line) for line in found]) == len(verbs)


def test_main(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["anything", "--version"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            cli.main()
        with pytest.raises(SystemExit) as killed:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (end.value.code, killed.value.code) == (0, 143)
    assert capsys.readouterr().out == f"snapstore {records.VERSION} (CPU engine: {engine_in_use()})\n"


def test_module_and_exit_code(tmp_path):
    done = run_python("-m", "snapstore", "log", "--repo", tmp_path / "none")
    assert done.returncode == 10
    assert done.stdout == ""
    assert done.stderr.startswith("snapstore: error: ")


def test_a_reader_that_has_had_enough(series):
    with subprocess.Popen(
        [sys.executable, "-c", "import os\nfrom snapstore.cli import main\nos.close(0)\ninput\nmain()", "log"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "SNAPSTORE_REPO": series.url},
    ) as child:  # fmt: skip
        child.stdout.close()
        errors = child.stderr.read()
    assert child.returncode == 0
    assert errors == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_restore_leaves_no_file(series, number):
    program = (
        "import signal, time\nfrom snapstore.cli import main\nfrom snapstore.convert import files\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "def slow(temp, *_):\n    temp.write_bytes(b'half')\n    print('now', flush=True)\n    time.sleep(60)\n"
        "files._write_torch = slow\nmain()"
    )
    out = series.folder / "out" / "o.pt"
    out.parent.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", program, "restore", "exp@1", "-o", str(out)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "SNAPSTORE_REPO": series.url},
    ) as child:  # fmt: skip
        assert child.stdout.readline() == "now\n"
        assert [p.name for p in out.parent.iterdir()] != []
        child.send_signal(number)
        errors = child.stderr.read()
    assert child.returncode == 128 + number
    assert "Traceback" not in errors
    assert list(out.parent.iterdir()) == []


def test_log_of_a_thousand_snapshots_reads_none_of_them_twice(sh, monkeypatch):
    parent = None
    for step in range(1000):
        snapshot = records.Snapshot(
            id=records.new_id(), run="exp", step=step, seq=step, state="committed", write_id=records.new_id(),
            parent=parent, created=1e9 + step, metrics={"loss": 1.0},
        )  # fmt: skip
        parent = snapshot.id
        path = Path(sh.url, snapshot.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(records.encode(snapshot))
    sh("log")
    read = []
    get = LocalStore.get
    monkeypatch.setattr(LocalStore, "get", lambda store, key, **how: read.append(key) or get(store, key, **how))
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        found = sh.json("log")["snapshots"]
    finally:
        sys.setprofile(None)
    assert len(found) == 1000
    assert [key for key in read if key.startswith("snapshots/")] == []
    assert calls < 200 * 1000


@pytest.mark.parametrize(
    ("verb", "code"),
    [
        (["save", "", "--run", "a", "--step", "1"], 2),
        (["save", "state.pt", "--run", "exp", "--step", "5", "--parent", ""], 1),
        (["import", "", "--run", "exp"], 2),
        (["import", "state.pt", "", "--run", "exp"], 2),
        (["import", "state.pt", "--run", ""], 1),
        (["export", "exp@1", "--to", "hf", "-o", "out", "--config", ""], 2),
        (["--repo", "", "forget", "--run", "exp", "--keep-last", "1"], 2),
        (["forget", "--run", "exp", "--keep-last", "1", "--repo", ""], 2),
        (["init", ""], 2),
        (["log", "--mirror", ""], 1),
        (["doctor", ""], 1),
    ],
)
def test_an_empty_name_is_no_default(series, monkeypatch, tmp_path, verb, code):
    """A script passes it for a variable that is not set. The current folder is one that an import takes."""
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.ones(3)}, "model.safetensors")
    before = series.json("log", "--all")
    series.fails(*verb, code=code) if verb[0] != "doctor" else series(*verb, code=code)
    assert series.json("log", "--all") == before
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        (["check", "--max-decoded", "1G"], "--max-decoded: needs --restore"),
        (["check", "--read-data", "--max-decoded", "1G"], "--max-decoded: needs --restore"),
        (["save", "state.pt", "--run", "exp", "--step", "9", "--follow-links"], "--follow-links: "),
        (["restore", "exp@1", "-o", "out.pt", "--tensors-only"], "--tensors-only: "),
        *(
            (["export", "exp@1", "--to", to, "-o", "out", *option], f"{option[0]}: ")
            for to, options in {
                "torch": (["--config", "."], ["--max-shard-size", "5G"], ["--tensors-only"]),
                "dcp": (["--config", "."], ["--max-shard-size", "1G"], ["--tensors-only"]),
                "safetensors": (["--config", "."], ["--max-shard-size", "1G"]),
            }.items()
            for option in options
        ),
    ],
)
def test_an_option_without_effect_is_an_error(series, monkeypatch, verb, option):
    monkeypatch.chdir(series.folder)
    before = series.json("log", "--all")
    assert series.fails(*verb, code=2).startswith(option)
    assert series.json("log", "--all") == before
    assert not list(series.folder.glob("out*"))


def run_with(series, arguments, **streams):
    command = [sys.executable, "-m", "snapstore", *arguments]
    return subprocess.run(command, env={**os.environ, **series.env}, text=True, check=False, **streams)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_an_output_that_is_full_hides_no_outcome(series, json_):
    with Path("/dev/full").open("w") as full:
        done = run_with(series, [*json_, "tag", "exp@1", "good"], stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 1
        assert done.stderr.endswith("what the verb has done stays done\n")
        assert done.stderr.count("\n") == 1
        assert series.json("show", "exp@1")["snapshot"]["tags"] == ["good"]
        done = run_with(series, [*json_, "forget", "exp@0"], stdout=subprocess.PIPE, stderr=full)
        assert done.returncode == 0
        assert done.stdout


def test_a_stream_that_is_closed_is_no_error(series):
    command = [sys.executable, "-m", "snapstore", "gc"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env={**os.environ, **series.env}, check=False
    )
    assert done.returncode == 0
