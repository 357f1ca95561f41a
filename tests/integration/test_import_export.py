"""States are imported from the checkpoints of other programs, and exported to them, equal in every bit."""

import collections
import dataclasses
import filecmp
import io
import json
import os
import pickle
import resource
import shutil
import signal
import warnings
import weakref
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kit.forge import MIB, little_memory
from kit.repositories import OPTIONS, same
from kit.samples import examples
from kit.shell import invoke
from snapstore import InvalidInputError, NotFoundError, Repository
from snapstore.convert import (
    ExportOptions,
    export_snapshot,
    hf_export,
    import_checkpoints,
    importing,
    orbax_folder,
    safetensors_file,
)
from snapstore.convert.checkpoint import nest
from snapstore.convert.importing import save_file as save_torch_file
from snapstore.convert.sources import default_run, format_of
from snapstore.errors import AlreadyExistsError, IntegrityError, OutputError
from snapstore.restore.streaming import TensorReader
from snapstore.storage.memory import MemoryStore


@pytest.fixture
def repository():
    with Repository.create(MemoryStore(), chunk_bytes=1024, options=OPTIONS) as opened:
        yield opened


def save_dcp(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def imported(repository, *sources, run="r", **options):
    return list(import_checkpoints(repository, sources, run=run, **options))


def model(step=0):
    torch.manual_seed(0)
    big = torch.randn(3000)
    big[step] += 1
    return {"big": big, "half": torch.randn(5, 7).bfloat16(), "scalar": torch.tensor(step), "empty": torch.empty(0, 3)}


def write_checkpoint(kind, path, step):
    """Write a checkpoint of a format; return the state that an import must give."""
    tensors = model(step)
    if kind == "dcp":
        state = {"model": tensors, "epochs": [step, {"lr": 0.1}], "blob": b"\0" * 9000, "none": None}
        save_dcp(state, path)
    elif kind == "hf":
        path.mkdir()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text('{"model_type": "x"}')
        (path / "extra").mkdir()
        (path / "extra" / "tokenizer.json").write_bytes(bytes(range(256)) * 40)
        torch.save({"state": {0: {"m": torch.ones(3) * step}}}, path / "optimizer.pt")
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        names = ("config.json", "extra/tokenizer.json", "trainer_state.json")
        state = {
            "model": dict(sorted(tensors.items())),
            "optimizer": torch.load(path / "optimizer.pt"),
            "files": {name: (path / name).read_bytes() for name in names},
        }
    elif kind == "lightning":
        state = {"state_dict": tensors, "global_step": step, "loops": {"a": [1, 2]}, "tied": tensors["big"]}
        torch.save(state, path)
    else:
        save_file(tensors, path)
        state = dict(sorted(tensors.items()))
    return state


NAMES = {
    "dcp": "ckpt-{}",
    "hf": "checkpoint-{}",
    "lightning": "epoch=1-step={}.ckpt",
    "safetensors": "m_{}.safetensors",
}


def flat(state):
    """Sort the names: in a .safetensors file the library chooses their order."""
    if not isinstance(state, dict):
        return state
    return {key: flat(state[key]) for key in sorted(state, key=str)}


@pytest.mark.parametrize("kind", NAMES)
def test_a_series_becomes_a_run(repository, tmp_path, kind):
    states = {step: write_checkpoint(kind, tmp_path / NAMES[kind].format(step), step) for step in (10, 2, 1)}
    sources = sorted(tmp_path.iterdir())
    found = imported(repository, *sources[:2])
    assert [one.snapshot.step for one in found] == sorted(one.snapshot.step for one in found)
    again = imported(repository, *sources)
    assert [(one.snapshot.step, one.skipped) for one in again] == [
        (step, step in {one.snapshot.step for one in found}) for step in (1, 2, 10)
    ]
    assert all(one.bytes_read > 12000 for one in again if not one.skipped)
    for step, state in states.items():
        assert same(flat(repository.restore(f"r@{step}")), flat(state))
        assert repository.snapshot(f"r@{step}").metadata["imported"]["from"] == NAMES[kind].format(step)
    assert sum(s.stored_bytes for s in repository.snapshots("r")) < 0.75 * sum(
        s.logical_bytes for s in repository.snapshots("r")
    )
    assert repository.check("restore").problems == []


def test_a_base_shares_chunks_with_another_run(repository, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "tuned").mkdir()
    save_file(model(0), tmp_path / "base" / "model.safetensors")
    save_file(model(1), tmp_path / "tuned" / "model.safetensors")
    alone = imported(repository, tmp_path / "base", run="base")[0].snapshot
    shared = imported(repository, tmp_path / "tuned", run="tuned", bases=["base@0"])[0].snapshot
    assert shared.stored_bytes < alone.stored_bytes / 2
    assert same(flat(repository.restore("tuned@0")["model"]), flat(model(1)))


DTYPES = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int64", "bool",
          "uint16", "uint64", "complex64"]  # fmt: skip


@st.composite
def tensors(draw):
    """Draw a tensor of random bits, of any layout; it is a part of a larger storage."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    count = int(np.prod(shape, dtype=int))
    seed = draw(st.integers(0, 2**16))
    bits = np.random.default_rng(seed).integers(
        0, 2 if dtype is torch.bool else 256, (count + 2) * dtype.itemsize, np.uint8
    )
    whole = torch.from_numpy(bits).view(dtype)
    tensor = whole[2:].reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


STATES = st.dictionaries(st.text("ab.é_0*", min_size=1, max_size=6), tensors(), min_size=1, max_size=5)


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(state=STATES, to=st.sampled_from(["hf", "safetensors", "torch", "dcp"]))
def test_out_and_in_again_is_the_same(tmp_path_factory, state, to):
    folder = tmp_path_factory.mktemp("x")
    with Repository.create(MemoryStore(), options=OPTIONS) as repository:
        repository.save(state, run="a", step=1)
        out = folder / {"hf": "h", "safetensors": "s.safetensors", "torch": "t.pt", "dcp": "d"}[to]
        exported = export_snapshot(repository, "a@1", out, to=to, options=ExportOptions(max_shard_bytes=64))
        assert exported.tensors == len(state)
        imported(repository, out, run="b", step=1)
        found = repository.restore("b@1")
        found = found["model"] if to == "hf" else found
        assert same(flat(found), flat(state))
        if to == "torch":
            loaded = torch.load(out, weights_only=True)
            assert same(loaded, state)
            assert zipfile.ZipFile(out).testzip() is None


def test_nested_states_of_a_training_run_go_to_torch_and_dcp(repository, tmp_path):
    layer = torch.nn.Linear(40, 40)
    state = {
        "model": layer.state_dict(),
        "tied": [layer.weight, {"n": np.arange(5.0)}],
        "plain": {"lr": 0.5, "name": "x", "blob": b"\1" * 9000, 3: (1, 2)},
    }
    repository.save(state, run="a", step=1)
    export_snapshot(repository, "a@1", tmp_path / "x.pt", to="torch")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert type(loaded["tied"][0]) is torch.nn.Parameter
    assert loaded["tied"][0].data_ptr() == loaded["model"]["weight"].data_ptr()
    assert same(loaded["tied"][0].detach(), layer.weight.detach())
    assert loaded["tied"][1]["n"].tolist() == [0, 1, 2, 3, 4]
    assert same(loaded["plain"], state["plain"])
    export_snapshot(repository, "a@1", tmp_path / "d", to="dcp")
    target = {
        "model": {name: torch.zeros_like(t) for name, t in layer.state_dict().items()},
        "plain": {"lr": 0, "blob": b""},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    assert same(target["model"], dict(layer.state_dict()))
    assert (target["plain"]["lr"], len(target["plain"]["blob"])) == (0.5, 9000)


def test_arrays_in_the_metadata_of_an_ordered_dict_go_to_torch(repository, tmp_path):
    tied = torch.randn(4)
    state = collections.OrderedDict(a=collections.OrderedDict(w=torch.randn(3)), tied=tied, n=np.arange(2.0))
    state["a"]._metadata = {"scale": torch.randn(5), "array": np.arange(3.0), "blob": b"\1" * 9000}
    state._metadata = {"tied": tied, "scale": torch.randn(6)}
    repository.save({"m": state, "last": torch.randn(7)}, run="a", step=1)
    export_snapshot(repository, "a@1", tmp_path / "x.pt", to="torch")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert same(
        {**loaded["m"], "a": dict(loaded["m"]["a"])},
        {**state, "n": torch.arange(2.0, dtype=torch.float64), "a": dict(state["a"])},
    )
    expected = state["a"]._metadata | {"array": torch.arange(3.0, dtype=torch.float64)}
    assert same(loaded["m"]["a"]._metadata, expected)
    assert same(loaded["m"]._metadata, state._metadata)
    assert loaded["m"]._metadata["tied"].data_ptr() == loaded["m"]["tied"].data_ptr()


def test_one_file_wins_over_shards_as_in_transformers(repository, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    shard = "model-00001-of-00001"
    for write, ending, index in (
        (torch.save, ".bin", "pytorch_model.bin.index.json"),
        (save_file, ".safetensors", "model.safetensors.index.json"),
    ):
        one = "pytorch_model.bin" if ending == ".bin" else "model.safetensors"
        write({"w": torch.zeros(2)}, folder / f"{shard}{ending}")
        (folder / index).write_text(json.dumps({"weight_map": {"w": f"{shard}{ending}"}}))
        write({"w": torch.ones(2)}, folder / one)
        (found,) = imported(repository, folder, run=ending[1:], step=0, format="hf")
        assert same(repository.restore(found.snapshot.ref)["model"]["w"], torch.ones(2))
        assert f"{shard}{ending}" in found.left_out
        (folder / f"{shard}{ending}").unlink()


def write_files(folder, files):
    """Write files of weights, or of these bytes, by name."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write = save_file if name.endswith(".safetensors") else torch.save
        (folder / name).write_bytes(data) if isinstance(data, bytes) else write(data, folder / name)


ONE, OTHER = {"w": torch.ones(2)}, {"w": torch.zeros(3)}


@pytest.mark.parametrize(
    ("files", "copies"),
    [
        ({"model.safetensors": ONE, "model_1.safetensors": OTHER, "optimizer_1.bin": OTHER, "scheduler.bin": b"s"}, ()),
        ({"model.safetensors": ONE, "2_Dense/model.safetensors": OTHER, "3_Dense/pytorch_model.bin": OTHER}, ()),
        ({"adapter_model.safetensors": ONE, "x/adapter_model.safetensors": OTHER, "adapter_model.bin": ONE}, (2,)),
        ({"model.safetensors": ONE, "adapter_model.safetensors": OTHER, "pytorch_model.bin": ONE}, (2,)),
        ({"model-00001-of-00001.safetensors": ONE, "v_head.safetensors": b"v", "model.onnx": b"o"}, (2,)),
        ({"emb.safetensors": ONE, "pytorch_model.bin": OTHER, "replay.h5": b"r", "opt_state.msgpack": b"m"}, ()),
    ],
)
def test_a_folder_may_hold_other_weights_than_those_of_its_model(repository, tmp_path, files, copies):
    """Accelerate saves several models; sentence-transformers and PEFT have folders with weights of their own."""
    write_files(tmp_path / "m", files)
    names = list(files)
    if names[0].startswith("model-"):
        (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": names[0]}}))
    (found,) = imported(repository, tmp_path / "m", format="hf")
    state = repository.restore(found.snapshot.ref)
    left_out = [names[at] for at in copies]
    assert found.left_out == left_out
    assert same(state["model"], ONE)
    kept = {name: (tmp_path / "m" / name).read_bytes() for name in names[1:] if name not in left_out}
    assert state.get("files", {}) == kept


def test_no_hidden_file_is_lost_in_silence(repository, tmp_path):
    """A folder of DCP in a checkpoint, such as FSDP's, is nothing without its `.metadata`."""
    folder = tmp_path / "m"
    write_files(folder, {"model.safetensors": ONE, ".gitattributes": b"a", ".git/config": b"g", ".git/x/.y": b"g"})
    save_dcp({"model": model()}, folder / "pytorch_model_fsdp_0")
    (folder / "pytorch_model_fsdp_0" / ".cache").mkdir()
    (folder / ".#notes").symlink_to("nowhere")  # of an editor
    (folder / ".env").symlink_to(tmp_path)
    (found,) = imported(repository, folder, step=0)
    assert found.left_out == [".#notes", ".env", ".git", "pytorch_model_fsdp_0/.cache"]
    export_snapshot(repository, "r@0", tmp_path / "out", to="hf")
    kept = [".gitattributes", "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp"]
    assert sorted(repository.restore("r@0")["files"]) == kept
    assert all((tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes() for name in kept)
    imported(repository, tmp_path / "out" / "pytorch_model_fsdp_0", run="fsdp")
    assert same(repository.restore("fsdp@0"), {"model": model()})


def test_empty_containers_of_orbax_are_leaves():
    tree = {"stats": {}, "layers": [[1, 2], (), {"w": 3, "none": None}, [{}]], "list": []}
    leaves = {}
    orbax_folder._walk(tree, (), leaves)
    assert nest(leaves.items(), Path("x")) == tree
    assert leaves["layers", 1] == ()
    leaves = {}
    orbax_folder._walk({}, (), leaves)
    assert nest(leaves.items(), Path("x")) == {}


def test_a_second_optimizer_is_one_of_the_files(repository, tmp_path):
    write_files(tmp_path / "m", {"model.safetensors": ONE, "optimizer.pt": {"a": 1}, "optimizer.bin": {"b": 2}})
    imported(repository, tmp_path / "m", step=0)
    files = {"optimizer.bin": (tmp_path / "m" / "optimizer.bin").read_bytes()}
    assert same(repository.restore("r@0"), {"model": ONE, "optimizer": {"a": 1}, "files": files})


def test_a_link_to_another_folder_is_refused(repository, tmp_path):
    """The files behind it would be missing in the snapshot."""
    write_files(tmp_path / "m", {"model.safetensors": ONE, "real/tokenizer.json": b"{}"})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "m" / "extra").symlink_to("real")
    imported(repository, tmp_path / "m", step=0)
    assert list(repository.restore("r@0")["files"]) == ["real/tokenizer.json"]
    (tmp_path / "m" / "real" / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInputError, match=r"m.real.more: is a link to .*elsewhere, which is not in .*put a copy"):
        imported(repository, tmp_path / "m", step=1)


@pytest.mark.parametrize("target", ["nowhere", "odd", None])
def test_a_name_that_leads_to_no_file_is_refused(repository, tmp_path, target):
    """It is a link to nothing, a link to itself, or a pipe."""
    write_files(tmp_path / "m", {"model.safetensors": ONE})
    if target is None:
        os.mkfifo(tmp_path / "m" / "odd")
    else:
        (tmp_path / "m" / "odd").symlink_to(target)
    with pytest.raises(InvalidInputError, match=r"m.odd: is neither a file nor a link to one; remove it"):
        imported(repository, tmp_path / "m", step=0)
    assert default_run([tmp_path / "m" / "odd"]) in ("odd", "nowhere")


def test_a_memory_that_is_shorter_than_its_tensor_is_refused(repository, tmp_path):
    """torch would map the bytes that follow its storage in the file."""
    torch.save({"a": torch.arange(1000.0), "b": torch.arange(5000.0)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as old, zipfile.ZipFile(tmp_path / "short.pt", "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            new.writestr(entry.filename, data[:100] if entry.filename.endswith("/data/0") else data)
    with pytest.raises(InvalidInputError, match=r"short.pt: names 1000 elements .* in data/0, which has 100 bytes"):
        list(import_checkpoints(repository, [tmp_path / "short.pt"], run="a"))
    assert not repository.snapshots()


def test_empty_tensors_over_one_storage_keep_their_dtypes(repository, tmp_path):
    """torch gives them all the dtype of the first if it maps the file."""
    empty = torch.empty(0, 3, dtype=torch.float16)
    state = {"a": empty, "b": empty.view(torch.uint8), "c": empty.view(torch.bfloat16), "d": torch.arange(5.0)}
    torch.save(state, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")
    assert same(loaded, state)
    imported(repository, tmp_path / "x.pt", step=0)
    save_torch_file(repository, tmp_path / "x.pt", run="s", step=0)
    assert same(repository.restore("r@0"), loaded)
    assert same(repository.restore("s@0"), loaded)


def test_a_storage_with_a_part_of_an_element_behind_it(repository, tmp_path):
    """torch 2.13 writes such a file, and cannot read it back unless it maps it."""
    torch.save({"w": torch.arange(10, dtype=torch.uint8)[:8].view(torch.float32)}, tmp_path / "x.pt")
    imported(repository, tmp_path / "x.pt", step=0)
    assert same(repository.restore("r@0"), torch.load(tmp_path / "x.pt", mmap=True))


def test_a_compressed_file_of_torch_is_unpacked(repository, tmp_path):
    torch.save({"a": torch.arange(50.0)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    imported(repository, tmp_path / "b.pt", step=0)
    assert same(repository.restore("r@0")["a"], torch.arange(50.0))


def test_tensors_in_tuples_go_to_dcp(repository, tmp_path):
    one, two = torch.arange(5.0), torch.arange(3).to(torch.bfloat16)
    state = {"b": [1, {"c": (one, 7, {"d": [two]})}], "own": two, "a": (one, two), "z": (torch.zeros(0, 2),)}
    repository.save(state, run="a", step=1)
    export_snapshot(repository, "a@1", tmp_path / "d", to="dcp")
    imported(repository, tmp_path / "d", run="back", step=1)
    back = repository.restore("back@1")
    assert sorted(back) == sorted(state)
    assert all(same(back[key], state[key]) for key in state)


def test_arrays_of_numpy_come_back_from_dcp_and_from_an_import(repository, tmp_path):
    """A program that saved NumPy arrays loads into NumPy arrays, and DCP refuses tensors in their place."""
    repository.save({"w": torch.ones(2), "rng": {"words": np.arange(9)}}, run="a", step=1)
    export_snapshot(repository, "a@1", tmp_path / "d", to="dcp")
    target = {"w": torch.zeros(2), "rng": {"words": np.zeros(9, np.int64)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    assert same(target, repository.restore("a@1"))
    imported(repository, tmp_path / "d")
    assert same(flat(repository.restore("r@0")), flat(repository.restore("a@1")))


def test_what_dcp_cannot_hold_is_named(repository, tmp_path, monkeypatch):
    repository.save({"a": {1: torch.zeros(2), "1": torch.ones(2)}}, run="a", step=1)
    with pytest.raises(InvalidInputError, match=r"a@1: DCP cannot hold this state: .*duplicate"):
        export_snapshot(repository, "a@1", tmp_path / "d", to="dcp")
    for step, dtype in enumerate((torch.bits8, torch.bits16), start=3):
        bits = torch.arange(64, dtype=torch.uint8).view(dtype)
        repository.save({"a": {"w": bits}}, run="a", step=step)
        with pytest.raises(InvalidInputError, match=rf"DCP cannot hold this state: a\.w: a tensor of {dtype}; write a"):
            export_snapshot(repository, f"a@{step}", tmp_path / "d", to="dcp")
    repository.save({"a": torch.zeros(2)}, run="a", step=2)

    def damaged(self):
        raise IntegrityError("a chunk is damaged")
        yield

    monkeypatch.setattr(TensorReader, "__iter__", damaged)
    with pytest.raises(IntegrityError, match="a chunk is damaged"):
        export_snapshot(repository, "a@2", tmp_path / "d", to="dcp")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ties", [True, False])
def test_from_pretrained_loads_an_export_without_a_warning(repository, tmp_path, monkeypatch, caplog, ties):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=ties)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "config")
    repository.save({"model": model, "step": 1}, run="a", step=1)
    options = ExportOptions(config=tmp_path / "config", max_shard_bytes=5000)
    exported = export_snapshot(repository, "a@1", tmp_path / "h", to="hf", options=options)
    assert exported.tied == (["lm_head.weight"] if ties else [])
    assert f"model-00001-of-0000{6 if ties else 7}.safetensors" in exported.files
    assert all(path.stat().st_size < 7000 for path in (tmp_path / "h").iterdir())
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    with caplog.at_level("WARNING"), warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "h", output_loading_info=True)
    assert [record.getMessage() for record in caplog.records] == []
    assert not any(info.values())
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    # An import of a folder of transformers gives the same model; its export has the same files beside the weights.
    model.save_pretrained(tmp_path / "saved-1")
    imported(repository, tmp_path / "saved-1", run="b", bases=["a@1"])
    found = repository.restore("b@1")["model"]
    assert same(found, {name: model.state_dict()[name] for name in found})
    export_snapshot(repository, "b@1", tmp_path / "again", to="hf")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "saved-1" / name).read_bytes()
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == found.keys()


@pytest.mark.parametrize("ties", [True, False])
def test_ties_that_a_model_does_not_declare_are_written(repository, tmp_path, monkeypatch, ties):
    """`from_pretrained` would leave random values in a tensor that is missing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=ties)
    model = transformers.LlamaForCausalLM(config)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    if not ties:  # the user's own tie, against the config
        model.lm_head.weight = model.model.embed_tokens.weight
    config.save_pretrained(tmp_path / "config")
    repository.save({"model": model}, run="a", step=1)
    exported = export_snapshot(
        repository, "a@1", tmp_path / "h", to="hf", options=ExportOptions(config=tmp_path / "config")
    )
    assert exported.tied == (["lm_head.weight"] if ties else [])
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "h")
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_without_a_config_all_tied_names_are_written(repository, tmp_path):
    layer, head = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    names = {"k": layer, "q": layer, "embed_tokens": head, "lm_head": head}
    repository.save({"model": torch.nn.ModuleDict(names)}, run="a", step=1)
    for name, config in (("h1", None), ("h2", "{"), ("h3", "[]"), ("h4", "{}")):
        options = ExportOptions()
        if config is not None:
            (tmp_path / f"c{name}").mkdir()
            (tmp_path / f"c{name}" / "config.json").write_text(config)
            options = ExportOptions(config=tmp_path / f"c{name}")
        exported = export_snapshot(repository, "a@1", tmp_path / name, to="hf", options=options)
        found = load_file(tmp_path / name / "model.safetensors")
        assert (exported.tied, exported.tensors) == ([], 8)
        assert all(same(found[f"{name}.weight"], layer.weight.detach()) for name, layer in names.items())


def test_files_of_the_folder_of_a_config_are_copied_in_pieces(repository, tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    with (tmp_path / "config" / "corpus.txt").open("wb") as file:
        file.write(b"first")
        file.truncate(64 * MIB)
    repository.save({"model": {"w": torch.ones(2)}}, run="a", step=1)
    options = ExportOptions(config=tmp_path / "config")
    with little_memory(16 * MIB):
        exported = export_snapshot(repository, "a@1", tmp_path / "h", to="hf", options=options)
    assert exported.files == ["config.json", "corpus.txt", "model.safetensors"]
    assert filecmp.cmp(tmp_path / "config" / "corpus.txt", tmp_path / "h" / "corpus.txt", shallow=False)

    def refused(path, *args, **options):
        raise PermissionError(13, "Permission denied") if path.name == "corpus.txt" else AssertionError

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InvalidInputError, match=r"corpus.txt: cannot be read: Permission denied"):
        hf_export._copy(tmp_path / "config" / "corpus.txt", tmp_path / "x")


def test_an_imported_file_whose_name_has_a_backslash(repository, tmp_path):
    """On Windows it would name a folder. The weights can be exported with the other files of a folder."""
    (tmp_path / "in").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "in" / "model.safetensors")
    for name in ("config.json", "a\\b.json"):
        (tmp_path / "in" / name).write_text("{}")
    imported(repository, tmp_path / "in", step=0)
    with pytest.raises(InvalidInputError, match=r"names a folder on Windows; .* export with --config, a folder"):
        export_snapshot(repository, "r@0", tmp_path / "h", to="hf")
    export_snapshot(repository, "r@0", tmp_path / "h", to="hf", options=ExportOptions(config=tmp_path / "in"))
    assert (tmp_path / "h" / "a\\b.json").exists()


@pytest.mark.parametrize("to", ["hf", "safetensors", "torch", "dcp"])
def test_a_file_that_cannot_grow_fails_an_export(repository, tmp_path, to):
    """The second export would replace the first one."""
    repository.save({"model": {"w": torch.randn(300, 1000)}}, run="r", step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    out = tmp_path / "out"
    try:
        for force in (False, True):
            found = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
            resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))
            with pytest.raises(OutputError, match=r"out: cannot be written: .*; nothing was left behind"):
                export_snapshot(repository, "r@1", out, to=to, options=ExportOptions(force=force))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == found
            if not force:
                export_snapshot(repository, "r@1", out, to=to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_model_of_diffusers_comes_back_under_its_names(repository, tmp_path, is_whole):
    """Diffusers looks for these names only; it knows its own config by the version in it."""
    name, about = "diffusion_pytorch_model", {"format": "pt"}
    config = json.dumps({"_class_name": "UNet2DModel", "_diffusers_version": "0.30.0"})
    write_files(tmp_path / "a", {"config.json": config.encode(), f"{name}.bin": {"x": torch.ones(1)}})
    if is_whole:
        save_file(model(), tmp_path / "a" / f"{name}.safetensors", about)
    else:
        numbered = enumerate(model().items(), 1)
        shards = {f"{name}-{i:05}-of-00004.safetensors": {key: value} for i, (key, value) in numbered}
        for shard, tensors in shards.items():
            save_file(tensors, tmp_path / "a" / shard, about)
        index = {"weight_map": {key: shard for shard, tensors in shards.items() for key in tensors}}
        (tmp_path / "a" / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    (one,) = imported(repository, tmp_path / "a")
    assert one.left_out == [f"{name}.bin"]
    assert repository.restore("r@0")["files"] == {"config.json": config.encode()}
    options = ExportOptions(max_shard_bytes=10**9 if is_whole else 1)
    exported = export_snapshot(repository, "r@0", tmp_path / "b", to="hf", options=options)
    assert exported.files == sorted(path.name for path in (tmp_path / "a").iterdir() if path.suffix != ".bin")
    assert all(same(load_file(path), load_file(tmp_path / "a" / path.name)) for path in (tmp_path / "b").glob("*.s*rs"))
    force = ExportOptions(config=tmp_path / "a", force=True)
    export_snapshot(repository, "r@0", tmp_path / "b", to="hf", options=force)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["config.json", f"{name}.safetensors"]


def test_an_adapter_comes_back_under_its_name(repository, tmp_path):
    """PEFT loads an adapter from one file of this name only."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    save_file(model(), tmp_path / "a" / "adapter_model.safetensors", {"format": "pt"})
    imported(repository, tmp_path / "a", step=1)
    options = ExportOptions(max_shard_bytes=100)
    exported = export_snapshot(repository, "r@1", tmp_path / "b", to="hf", options=options)
    assert exported.files == ["adapter_config.json", "adapter_model.safetensors"]
    found = (tmp_path / "b" / "adapter_model.safetensors").read_bytes()
    assert found == (tmp_path / "a" / "adapter_model.safetensors").read_bytes()


def test_no_shard_replaces_another_file_of_the_folder(repository, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    save_file(model(), tmp_path / "a" / "adapter_model.safetensors")
    save_file(model(1), tmp_path / "a" / "model-00001-of-00002.safetensors")
    imported(repository, tmp_path / "a", step=1)
    options = ExportOptions(max_shard_bytes=12000)
    with pytest.raises(InvalidInputError, match=r"model-00001-of-00002.* names both weights and"):
        export_snapshot(repository, "r@1", tmp_path / "b", to="hf", options=options)
    export_snapshot(repository, "r@1", tmp_path / "b", to="hf")
    found = (tmp_path / "b" / "model-00001-of-00002.safetensors").read_bytes()
    assert found == (tmp_path / "a" / "model-00001-of-00002.safetensors").read_bytes()


def test_names_lose_the_prefixes_of_wrappers(repository, tmp_path):
    weight = torch.arange(6.0)
    repository.save({"model": {"module._orig_mod.a.w": weight, "module.b._orig_mod.w": weight + 1}}, run="a", step=1)
    export_snapshot(repository, "a@1", tmp_path / "h", to="hf")
    assert sorted(load_file(tmp_path / "h" / "model.safetensors")) == ["a.w", "b.w"]
    options = ExportOptions(part="model", strip=["module."])
    for to, name in (("torch", "x.pt"), ("safetensors", "x.safetensors")):
        export_snapshot(repository, "a@1", tmp_path / name, to=to, options=options)
    expected = ["_orig_mod.a.w", "b._orig_mod.w"]
    assert sorted(torch.load(tmp_path / "x.pt")) == sorted(load_file(tmp_path / "x.safetensors")) == expected
    with pytest.raises(InvalidInputError, match=r"strip: no name begins with 'modul\.'; the names are module\._orig"):
        export_snapshot(repository, "a@1", tmp_path / "h2", to="torch", options=ExportOptions("model", ["modul."]))
    repository.save({"model": {"w": weight, "module.w": weight}}, run="two", step=1)
    with pytest.raises(InvalidInputError, match=r"two names in \(root\) would become 'w'"):
        export_snapshot(repository, "two@1", tmp_path / "h2", to="hf")
    with pytest.raises(NotFoundError, match="part 'nope': not in this snapshot"):
        export_snapshot(repository, "a@1", tmp_path / "h2", to="hf", options=ExportOptions(part="nope"))
    assert not (tmp_path / "h2").exists()


def test_an_export_replaces_nothing_but_an_export(repository, tmp_path, monkeypatch):
    repository.save({"w": torch.zeros(3)}, run="a", step=1)
    out, force = tmp_path / "out", ExportOptions(force=True)
    export_snapshot(repository, "a@1", out, to="hf")
    with pytest.raises(AlreadyExistsError, match="exists; choose another name"):
        export_snapshot(repository, "a@1", out, to="dcp")
    export_snapshot(repository, "a@1", out, to="dcp", options=force)
    assert sorted(p.name for p in out.iterdir()) == [".metadata", "__0_0.distcp"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    with pytest.raises(AlreadyExistsError, match="is not an export"):
        export_snapshot(repository, "a@1", mine, to="hf", options=force)
    (out / "notes").mkdir()
    (out / "notes" / "thesis.tex").touch()
    with pytest.raises(AlreadyExistsError, match="has notes, which this export does not write"):
        export_snapshot(repository, "a@1", out, to="dcp", options=force)
    assert (out / "notes" / "thesis.tex").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"]
    shutil.rmtree(out / "notes")
    monkeypatch.chdir(out)
    with pytest.raises(InvalidInputError, match="expected the name of a new folder"):
        export_snapshot(repository, "a@1", ".", to="hf", options=force)
    repository.save({"model": {}}, run="a", step=2)
    with pytest.raises(InvalidInputError, match="the state has no tensors"):
        export_snapshot(repository, "a@2", tmp_path / "none", to="hf")
    with pytest.raises(InvalidInputError, match=r"strip 'model\.': expected a sequence of prefixes"):
        export_snapshot(repository, "a@1", tmp_path / "none", to="torch", options=ExportOptions(strip="model."))


def test_an_export_deletes_only_files_that_an_export_makes(repository, tmp_path):
    """Other weights may have endings of the same formats."""
    repository.save({"w": torch.zeros(3)}, run="a", step=1)
    shard = "model-00001-of-00002.safetensors"
    older = ("model.safetensors", shard, "model.safetensors.index.json", "adapter_model.safetensors", "__0_0.distcp")
    mine = (
        "a.safetensors",
        "v_head.safetensors",
        "x/" + shard,
        "a.safetensors.index.json",
        "__1_0.distcp",
        "y/.metadata",
    )
    for to in ("hf", "dcp"):
        for name in mine:
            out = tmp_path / to
            write_files(out, {".metadata": b"", "model.safetensors": b"", name: b"mine"})
            with pytest.raises(
                AlreadyExistsError, match=rf"has {name.split('/')[0]}.*, which this export does not write"
            ):
                export_snapshot(repository, "a@1", out, to=to, options=ExportOptions(force=True))
            assert (out / name).read_bytes() == b"mine"
            shutil.rmtree(out)
        write_files(out, {".metadata": b"", **dict.fromkeys(older, b"")})
        export_snapshot(repository, "a@1", out, to=to, options=ExportOptions(force=True))
        assert len(list(out.iterdir())) == (1 if to == "hf" else 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_export_that_ends_between_its_renames_leaves_the_old_one(repository, tmp_path, monkeypatch, error):
    for step in (1, 2):
        repository.save({"w": torch.full((3,), step)}, run="a", step=step)
    export_snapshot(repository, "a@1", tmp_path / "out", to="hf")
    rename = Path.rename

    def interrupted(path, target):
        renamed = rename(path, target)
        if target.suffix == ".old":
            raise error
        return renamed

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(OutputError if error is OSError else error):
        export_snapshot(repository, "a@2", tmp_path / "out", to="hf", options=ExportOptions(force=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [1, 1, 1]


def test_steps_come_from_names_and_contents(repository, tmp_path):
    for name, content in (
        ("a.ckpt", 7),
        ("epoch=2.ckpt", 8),
        ("b-12.pt", 3),
        ("epoch=3-step=5.ckpt", 99),
        ("last.pt", None),
    ):
        torch.save({"w": torch.zeros(1), **({"global_step": content} if content else {})}, tmp_path / name)
    found = imported(
        repository, *(tmp_path / name for name in ("a.ckpt", "epoch=2.ckpt", "b-12.pt", "epoch=3-step=5.ckpt"))
    )
    assert [one.snapshot.step for one in found] == [5, 7, 8, 12]
    assert imported(repository, tmp_path / "last.pt", run="one")[0].snapshot.step == 0
    with pytest.raises(InvalidInputError, match=r"last\.pt: no step found"):
        imported(repository, *tmp_path.iterdir(), run="x")
    for number, name in enumerate(("loss=0.35.pt", "v1.5.pt", "lr=1e-05.pt")):
        torch.save({"w": torch.zeros(1)}, tmp_path / name)
        assert imported(repository, tmp_path / name, run=f"r{number}")[0].snapshot.step == 0
    for number, name in enumerate(
        ("step10k", "step2M", "model_step1e5", "ckpt_step=0.35", "step-3.5", "step" + 19 * "1")
    ):
        torch.save({"w": torch.zeros(1), **({"global_step": 10_000} if number == 0 else {})}, tmp_path / f"{name}.pt")
        step = imported(repository, tmp_path / f"{name}.pt", run=f"no{number}")[0].snapshot.step
        assert step == (10_000 if number == 0 else 0), name
    for name, step in (("step5b1", 5), ("step100ema", 100), ("step10kept_x", 10), ("step2k_step7", 7), ("step8.v2", 8)):
        torch.save({"w": torch.zeros(1)}, tmp_path / f"{name}.pt")
        assert imported(repository, tmp_path / f"{name}.pt", run=name)[0].snapshot.step == step
    with pytest.raises(InvalidInputError, match=r"step2M\.pt: no step found: its name has no whole"):
        imported(repository, tmp_path / "step2M.pt", tmp_path / "b-12.pt", run="x")
    torch.save({}, tmp_path / "c-12.pt")
    with pytest.raises(InvalidInputError, match="has step 12, as"):
        imported(repository, tmp_path / "c-12.pt", tmp_path / "b-12.pt", run="x")
    with pytest.raises(InvalidInputError, match="step 3: is given for 2 sources"):
        imported(repository, tmp_path / "c-12.pt", tmp_path / "a.ckpt", run="x", step=3)
    assert default_run([tmp_path / "old" / "checkpoint-1", tmp_path / "old" / "checkpoint-2"]) == "old"
    assert default_run([tmp_path / "all-minilm-v2"]) == "all-minilm-v2"


def test_a_source_that_is_no_checkpoint(tmp_path):
    (tmp_path / "series" / "checkpoint-1").mkdir(parents=True)
    save_file(model(), tmp_path / "series" / "checkpoint-1" / "model.safetensors")
    for path, message in (
        (tmp_path / "series", r"holds checkpoints \(checkpoint-1\); name them"),
        (tmp_path, "expected a folder of DCP"),
        (tmp_path / "missing", "is missing"),
        (Path(__file__), "expected a folder, or a file named"),
        (Path("/dev/null"), "expected a folder, or a file named"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            format_of(path)


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_an_export_has_no_name_of_another_format(repository, tmp_path, to):
    repository.save(model(), run="a", step=1)
    others = ("x.pt", "x.PTH", "x.bin", "x.ckpt") if to == "safetensors" else ("x.safetensors",)
    for name in others:
        with pytest.raises(InvalidInputError, match=rf"{name}: is the name of a file of .* but the export is to {to}"):
            export_snapshot(repository, "a@1", tmp_path / name, to=to)
    assert list(tmp_path.iterdir()) == []
    for name in ("x", "x.1", "x.pt" if to == "torch" else "x.safetensors"):
        export_snapshot(repository, "a@1", tmp_path / name, to=to)
    for name in ("hf.pt", "dcp.pt"):
        export_snapshot(repository, "a@1", tmp_path / name, to=name.partition(".")[0])


def test_many_tensors_pass_one_by_one(tmp_path, monkeypatch):
    large = {f"large.{i}": torch.full((17 * 2**20,), i, dtype=torch.uint8) for i in range(2)}
    small = {f"small.{i}": torch.tensor([float(i)]) for i in range(600)}
    save_file(large | small, tmp_path / "x-1.safetensors")
    torch.save({"model": large | small}, tmp_path / "x-2.pt")
    alive, most = [], []
    read = safetensors_file._tensor

    def counted(*args):
        tensor = read(*args)
        alive.append(weakref.ref(tensor))
        most.append(sum(one() is not None for one in alive[-20:]))
        return tensor

    monkeypatch.setattr(safetensors_file, "_tensor", counted)
    with Repository.create(MemoryStore()) as repository:
        imported(repository, tmp_path / "x-1.safetensors", tmp_path / "x-2.pt")
        assert len(most) == 602
        assert max(most) == 1
        assert same(flat(repository.restore("r@1")), flat(large | small))
        assert same(flat(repository.restore("r@2")["model"]), flat(large | small))


def test_an_import_that_fails_goes_on_where_it_was(repository, tmp_path):
    for step in (1, 2, 3):
        write_checkpoint("hf", tmp_path / f"checkpoint-{step}", step)
    sources = sorted(tmp_path.iterdir())
    damaged = sources[1] / "model.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-5])
    with pytest.raises(InvalidInputError, match=r"checkpoint-2.model\.safetensors: not a safetensors file, or damaged"):
        imported(repository, *sources)
    assert [snapshot.step for snapshot in repository.snapshots("r")] == [1]
    damaged.write_bytes(whole)
    assert [one.skipped for one in imported(repository, *sources)] == [True, False, False]


@pytest.mark.parametrize("kind", NAMES)
def test_a_checkpoint_that_changes_while_it_is_imported_is_not_committed(repository, tmp_path, monkeypatch, kind):
    """As by a training that writes its newest checkpoint over the one before."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_checkpoint(kind, tmp_path / folder / NAMES[kind].format(1), 1 + (folder == "b"))
    source, other = (tmp_path / folder / NAMES[kind].format(1) for folder in ("a", "b"))

    def replaced(*args):
        for path in [*filter(Path.is_file, source.rglob("*"))] or [source]:
            path.write_bytes((other / path.relative_to(source)).read_bytes())
            os.utime(path, ns=(0, 0))
        return save(*args)

    save = importing.save
    monkeypatch.setattr(importing, "save", replaced)
    with pytest.raises(InvalidInputError, match="changed while it was read; nothing was committed"):
        imported(repository, source)
    assert repository.snapshots("r") == []
    monkeypatch.setattr(importing, "save", save)
    imported(repository, source)
    assert repository.check("restore").problems == []


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_file_that_changes_while_the_shell_saves_it_is_not_committed(tmp_path, monkeypatch, kind):
    path, other = (tmp_path / folder / f"x.{kind}" for folder in "ab")
    for step, one in enumerate((path, other)):
        one.parent.mkdir()
        save_file(model(step), one) if kind == "safetensors" else torch.save(model(step), one)

    def replaced(*args):
        path.write_bytes(other.read_bytes())
        os.utime(path, ns=(0, 0))
        return save(*args)

    save = importing.save
    place = ["--repo", str(tmp_path / "repo")]
    assert not invoke(["init", *place]).exit_code
    arguments = ["save", str(path), "--run", "r", "--step", "1", *place]
    monkeypatch.setattr(importing, "save", replaced)
    result = invoke(arguments)
    assert result.exit_code
    assert f"{path}: changed while it was read; nothing was committed" in " ".join(result.stderr.split())
    monkeypatch.setattr(importing, "save", save)
    assert not invoke(arguments).exit_code
    with Repository.open(tmp_path / "repo") as repository:
        assert same(flat(repository.restore("r@1")), flat(model(1)))


def test_a_skipped_step_with_other_files_is_reported(repository, tmp_path):
    """Two trainings may have folders of one name, and files of one size."""
    sizes = {"x": 3, "y": 3}
    for name, size in sizes.items():
        source = tmp_path / name / "output" / "checkpoint-5"
        large = torch.zeros(100_000)
        large[50_000:] = ord(name)
        write_files(source, {"model.safetensors": {"w": large}, "a.txt": b"a" * size})
    first, second = (tmp_path / name / "output" / "checkpoint-5" for name in sizes)
    assert not imported(repository, first)[0].differs
    shutil.copytree(first, tmp_path / "copy" / "checkpoint-5")
    again = [imported(repository, source)[0] for source in (first, tmp_path / "copy" / "checkpoint-5", second)]
    assert [(one.skipped, one.differs) for one in again] == [(True, False), (True, False), (True, True)]
    torch.save({"s": 1}, first / "optimizer.pt")  # a training that went on writing
    assert imported(repository, first)[0].differs
    write_files(tmp_path, {"z-5.pt": {"w": 1}})
    for metadata in (None, {"imported": {"from": "older"}}, {"imported": 1}, [1]):
        repository.save({}, run="other", step=5, metadata=metadata)
        assert [one.differs for one in imported(repository, tmp_path / "z-5.pt", run="other")] == [False]
        repository.forget_snapshots(["other@5"], force=True)


def test_weights_in_files_of_torch_with_an_index(repository, tmp_path):
    tensors = model()
    names = sorted(tensors)
    weight_map = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in names if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "tf_model.h5").write_bytes(b"weights once more")
    (one,) = imported(repository, tmp_path)
    assert one.left_out == ["tf_model.h5"]
    assert same(flat(repository.restore("r@0")["model"]), flat(tensors))


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_metadata_of_all_shards_and_of_the_index_comes_back(repository, tmp_path, ending):
    folder, stem = tmp_path / "m", "model" if ending == "safetensors" else "pytorch_model"
    folder.mkdir()
    names = [f"{stem}-0000{number}-of-00002.{ending}" for number in (1, 2)]
    for name, key, about in zip(names, "ab", ({"format": "pt", "one": "1"}, {"format": "x", "two": "2"}), strict=True):
        if ending == "bin":
            torch.save({key: torch.ones(2)}, folder / name)
        else:
            save_file({key: torch.ones(2)}, folder / name, about)
    about = {"total_size": 3, "total_parameters": 4, "note": "x", "nested": {"y": 1}}
    index = {"metadata": about, "weight_map": dict(zip("ab", names, strict=True))}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    (found,) = imported(repository, folder, step=1)
    safetensors = ending == "safetensors"
    conflict = ["model-00002-of-00002.safetensors (metadata 'format')"] if safetensors else []
    assert found.left_out == [*conflict, f"{stem}.{ending}.index.json (metadata 'nested')"]
    export_snapshot(repository, "r@1", tmp_path / "out", to="hf", options=ExportOptions(max_shard_bytes=8))
    expected = {"format": "pt", "one": "1", "two": "2"} if safetensors else {"format": "pt"}
    for shard in (tmp_path / "out").glob("*.safetensors"):
        assert safetensors_file.read(shard)[1] == expected
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_parameters": 4, "note": "x", "total_size": 16}
    for number, value in enumerate(([1], None, "x", 10**40)):
        index["metadata"] = {"n": value} if value == 10**40 else value
        (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
        assert imported(repository, tmp_path / "out", run=f"again-{number}", step=1)[0].left_out == []


def test_a_folder_of_lightning_has_its_values_in_a_file(repository, tmp_path):
    folder = tmp_path / "epoch=0-step=4.ckpt"
    save_dcp({"state_dict": model()}, folder)
    torch.save({"global_step": 4, "loops": [1]}, folder / "meta.pt")
    (one,) = imported(repository, folder)
    assert one.snapshot.step == 4
    assert same(repository.restore("r@4"), {"global_step": 4, "loops": [1], "state_dict": model()})


def test_files_that_dcp_does_not_name_are_reported(repository, tmp_path):
    """Megatron keeps the arguments, the schedulers and the iteration in a file beside those of DCP."""
    save_dcp({"model": model()}, tmp_path / "ckpt-1")
    write_files(
        tmp_path / "ckpt-1", {"common.pt": {"iteration": 1}, "more/metadata.json": b"{}", ".x/y": b"", ".z": b""}
    )
    (one,) = imported(repository, tmp_path / "ckpt-1")
    assert one.left_out == [".x", ".z", "common.pt", "more/metadata.json"]
    assert same(repository.restore("r@1"), {"model": model()})


def in_shards(folder, shards):
    """Make a folder of DCP with a tensor `w`, of which it has one shard after the other as they are given."""
    whole = torch.zeros(len(shards), *shards[0].shape[1:], dtype=shards[0].dtype)
    save_dcp({"w": whole}, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index, info), *_ = metadata.storage_data.items()
    chunks, zeros = [], [0] * (whole.dim() - 1)
    metadata.storage_data = {}
    with (folder / info.relative_path).open("wb") as file:
        for number, shard in enumerate(shards):
            offsets, start = torch.Size([number, *zeros]), file.tell()
            data = io.BytesIO()
            torch.save(shard, data)
            file.write(data.getvalue())
            place = dataclasses.replace(info, offset=start, length=file.tell() - start)
            metadata.storage_data[dataclasses.replace(index, offset=offsets)] = place
            chunks.append(dcp.metadata.ChunkStorageMetadata(offsets, shard.shape))
    metadata.state_dict_metadata["w"].chunks = chunks
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_shards_of_any_form_become_whole_tensors(repository, tmp_path):
    """A shard may be conjugated or negated only in name, lie in other strides, or repeat its memory."""
    values = torch.tensor([[1 + 2j, 3 - 4j]])
    for step, shards in enumerate(
        [
            [values.conj(), values],
            [values.to(torch.complex128).conj(), values.to(torch.complex128)],
            [values.conj().imag, values.imag],
            [torch.ones(2, 1).t(), torch.ones(1, 1).expand(1, 2), torch.ones(1, 2, requires_grad=True)],
        ]
    ):
        in_shards(tmp_path / f"ckpt-{step}", shards)
        imported(repository, tmp_path / f"ckpt-{step}")
        assert same(repository.restore(f"r@{step}"), {"w": torch.cat(shards).detach().resolve_conj().resolve_neg()})
    for other in (torch.ones(1, 2).to_sparse(), torch.ones(1, 2, device="meta")):
        for number, shards in enumerate(([other], [torch.ones(1, 2), other])):
            in_shards(tmp_path / f"{other.layout}-{other.device}-{number}", shards)
            with pytest.raises(InvalidInputError, match=r"w: expected torch\.float32\[1, 2\] at byte \d+, got a"):
                imported(repository, tmp_path / f"{other.layout}-{other.device}-{number}", run="s")


def test_empty_containers_that_dcp_has_lost(repository, tmp_path):
    """DCP puts None in their place in a list. A list that lacks most of its positions is not of DCP."""
    state = {"states": [{}, model(), {}], "more": {"deep": [[[], {}, {"w": torch.ones(2)}]]}}
    save_dcp(state, tmp_path / "ckpt-1")
    imported(repository, tmp_path / "ckpt-1")
    expected = {"states": [None, model()], "more": {"deep": [[[], None, {"w": torch.ones(2)}]]}}
    assert same(repository.restore("r@1"), expected)
    metadata = pickle.loads((tmp_path / "ckpt-1" / ".metadata").read_bytes())
    for position in (-1, 1002, 10**18):
        metadata.planner_data["more.deep.0.2.w"] = ("more", "deep", 0, position, "w")
        (tmp_path / "ckpt-1" / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(InvalidInputError, match=r"\.metadata: more\.deep\.0: a list lacks some of its positions"):
            imported(repository, tmp_path / "ckpt-1", run="s")


def test_shards_of_ranks_become_whole_tensors(repository, tmp_path):
    """In DCP each rank writes its own rows; a bfloat16 NaN keeps its payload."""
    rows = torch.arange(12, dtype=torch.int16).reshape(4, 3).view(torch.bfloat16)
    rows.view(torch.int16)[2, 1] = 0x7F81
    save_dcp({"a": rows[:3].clone(), "b": rows[3:].clone()}, tmp_path / "ckpt-1")
    metadata = pickle.loads((tmp_path / "ckpt-1" / ".metadata").read_bytes())
    entry, chunks = metadata.state_dict_metadata.pop("a"), metadata.state_dict_metadata.pop("b").chunks
    shard = dataclasses.replace(chunks[0], offsets=torch.Size([3, 0]))
    whole = dataclasses.replace(entry, size=torch.Size([4, 3]), chunks=[*entry.chunks, shard])
    metadata.state_dict_metadata["w"] = whole
    metadata.storage_data = {
        dataclasses.replace(index, fqn="w", offset=torch.Size([3 * (index.fqn == "b"), 0])): info
        for index, info in metadata.storage_data.items()
    }
    metadata.planner_data = {"w": ("model", "w")}
    (tmp_path / "ckpt-1" / ".metadata").write_bytes(pickle.dumps(metadata))
    imported(repository, tmp_path / "ckpt-1")
    assert same(repository.restore("r@1"), {"model": {"w": rows}})


def test_the_verbs_print_what_they_did(tmp_path):
    def shell(*args, code=0):
        found = invoke([*map(str, args)], env={"SNAPSTORE_REPO": str(tmp_path / "repo")})
        assert found.exit_code == code, found.output
        return found

    shell("init")
    for step in (1, 2):
        write_checkpoint("hf", tmp_path / f"checkpoint-{step}", step)
    sources = [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]
    document = json.loads(shell("import", *sources, "--run", "old", "--json").stdout)
    assert [one["snapshot"]["step"] for one in document["imported"]] == [1, 2]
    assert set(document["imported"][0]) == {"source", "snapshot", "skipped", "bytes", "left_out", "differs"}
    assert document["bytes"] == sum(one["bytes"] for one in document["imported"])
    assert document["stored_bytes"] == sum(one["snapshot"]["stored_bytes"] for one in document["imported"])
    assert "skipped, old@2 is there" in shell("import", *sources, "--run", "old").stdout
    (tmp_path / "checkpoint-2" / "new").touch()
    for format in ([], ["--json"]):
        warned = shell("import", *sources, "--run", "old", *format, code=3)
        assert "checkpoint-2: its files are not those of old@2 (id:" in warned.stderr
        assert "checkpoint-1: its files" not in warned.stderr
    assert [one["differs"] for one in json.loads(warned.stdout)["imported"]] == [False, True]
    text = shell("import", sources[0], "--run", "one", "--base", "old@2", "--format", "hf").stdout
    assert "imported 1 checkpoint into one: " in text
    assert " times smaller" in text
    assert (
        "format 'x': expected one of dcp, orbax, hf, file"
        in shell("import", sources[0], "--format", "x", code=1).stderr
    )
    exported = json.loads(shell("export", "old@2", "--to", "hf", "-o", tmp_path / "out", "--json").stdout)
    assert exported["files"] == ["config.json", "extra/tokenizer.json", "model.safetensors", "trainer_state.json"]
    assert (exported["tensors"], exported["part"], exported["to"]) == (4, "model", "hf")
    assert exported["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.*") if path.is_file())
    assert (
        "exported old@2" in shell("export", "old@2", "--to", "torch", "--root", "model", "-o", tmp_path / "x.pt").stdout
    )
    assert same(flat(torch.load(tmp_path / "x.pt")), flat(model(2)))
    assert "to 'y': expected one of hf" in shell("export", "old@2", "--to", "y", "-o", tmp_path / "y", code=1).stderr
    assert (
        "expected a number of bytes"
        in shell("export", "old@2", "--to", "hf", "-o", tmp_path / "y", "--max-shard-size", "many", code=2).stderr
    )


@dataclasses.dataclass
class Moments:
    """A user's class, as an optimizer may have it in its state."""

    first: torch.Tensor
    count: int


def test_an_export_says_which_values_lose_their_class(tmp_path):
    """torch.load(weights_only=True) would refuse the class, so the file has a dict; a training cannot go on with it."""
    with Repository.create(tmp_path / "r") as repo:
        repo.save({"state": [Moments(torch.ones(3), 2)], "w": torch.ones(2)}, run="r", step=1)
        found = export_snapshot(repo, "r@1", tmp_path / "x.pt", to="torch")
        assert [(one.path, one.was.rpartition(".")[2]) for one in found.changed] == [("state.0", "Moments")]
        assert torch.load(tmp_path / "x.pt", weights_only=True)["state"][0]["count"] == 2
        assert not export_snapshot(repo, "r@1", tmp_path / "y.pt", to="torch", options=ExportOptions(part="w")).changed
