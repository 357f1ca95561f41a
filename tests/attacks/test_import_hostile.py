"""An import of a foreign checkpoint runs no code, reads no file outside its folder, and says what is wrong with it."""

import copy
import dataclasses
import json
import os
import pickle
import resource
import shutil
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file as save_safetensors

from kit.forge import MIB, little_memory
from kit.repositories import OPTIONS, same
from snapstore import CapabilityError, InvalidInputError, Repository
from snapstore.chunks import limits
from snapstore.convert import ExportOptions, export_snapshot, import_checkpoints, torch_checks
from snapstore.convert.dcp_folder import METADATA
from snapstore.convert.importing import save_file
from snapstore.storage.memory import MemoryStore


@pytest.fixture
def repository():
    with Repository.create(MemoryStore(), options=OPTIONS) as opened:
        yield opened


@pytest.fixture
def fails(repository, tmp_path):
    """Import a path, which must fail, commit nothing, and leave the file `touched` alone."""

    def run(path, **options):
        with pytest.raises(InvalidInputError) as caught:
            list(import_checkpoints(repository, [path], run="r", **options))
        assert repository.snapshots() == []
        assert not (tmp_path / "touched").exists()
        return str(caught.value)

    return run


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, folder):
        self.command = f"touch {folder / 'touched'}"

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def folder(tmp_path):
    """Make a folder of DCP."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": {"w": torch.arange(12.0).reshape(3, 4)}, "lr": 0.1}
        dcp.save(state, checkpoint_id=str(tmp_path / "dcp-1"), no_dist=True)
    return tmp_path / "dcp-1"


def altered(folder, change):
    """Change the metadata of a folder of DCP."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def test_metadata_that_wants_a_command(folder, tmp_path, fails):
    altered(folder, lambda metadata: setattr(metadata, "storage_meta", Command(tmp_path)))
    assert "refused: it names posix.system, which is not of torch.distributed.checkpoint" in fails(folder)
    (folder / METADATA).write_bytes(pickle.dumps(Command(tmp_path), protocol=0))
    assert "refused: it names" in fails(folder)
    #: A name in a module of DCP can be another object than a record of DCP.
    (folder / METADATA).write_bytes(b"ctorch.distributed.checkpoint.filesystem\nos.system\n(S'x'\ntR.")
    assert "refused" in fails(folder)
    (folder / METADATA).write_bytes(b"ctorch.distributed.checkpoint.metadata\nMetadata\n(tR}X\x01\x00\x00\x00aK\x01sb.")
    assert "damaged, or of an unknown version of DCP: KeyError" in fails(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "", "x\0y", 7])
def test_metadata_that_names_files_elsewhere(folder, tmp_path, fails, name):
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())

    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    altered(folder, change)
    assert "names" in fails(folder)


def test_metadata_that_lies(folder, fails):
    def lie(**fields):
        def change(metadata):
            tensor = metadata.state_dict_metadata["model.w"]
            for key, value in fields.items():
                setattr(metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == "model.w")]
                        if key in ("offset", "length") else tensor, key, value)  # fmt: skip

        original = (folder / METADATA).read_bytes()
        altered(folder, change)
        message = fails(folder)
        (folder / METADATA).write_bytes(original)
        return message

    assert "was cut off" in lie(length=10**9)
    assert "was cut off" in lie(offset=-5)
    assert "its shards hold 12 elements, expected 16" in lie(size=torch.Size([4, 4]))
    assert "is not inside of" in lie(size=torch.Size([1, 12]))
    shard = dcp.metadata.ChunkStorageMetadata(torch.Size([0, 1]), torch.Size([3, 3]))
    assert "has no bytes for model.w" in lie(chunks=[shard])
    shard = dcp.metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 2]))
    assert "two of its shards overlap" in lie(chunks=[shard, shard])
    for size in ([-1, 0], [1 << 40, 1 << 40, 0], [0.0]):
        assert "damaged, or of an unknown version" in lie(size=size, chunks=[])
    properties = dcp.metadata.TensorProperties(dtype=torch.float64)
    assert "expected torch.float64[3, 4] at byte" in lie(properties=properties)
    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:-1])
    assert "the file has" in fails(folder)
    (folder / "__0_0.distcp").unlink()
    assert "is missing, but" in fails(folder)
    (folder / METADATA).write_bytes(b"\x80\x04nonsense")
    assert "damaged, or of an unknown version" in fails(folder)
    (folder / METADATA).write_bytes(pickle.dumps([1, 2]))
    assert "expected metadata of DCP, got list" in fails(folder)


def test_a_tensor_larger_than_memory(folder, repository, monkeypatch):
    """Its first shard is there; with the second one it has a shape that no machine can hold."""
    monkeypatch.setattr(limits, "MIN_DECODED_BYTES", 1 << 60)  # else it is already too large for its files

    def change(metadata):
        tensor = metadata.state_dict_metadata["model.w"]
        index = next(index for index in metadata.storage_data if index.fqn == "model.w")
        tensor.size = torch.Size([1 << 55, 4])
        tensor.chunks.append(dcp.metadata.ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([(1 << 55) - 3, 4])))
        second = dataclasses.replace(index, offset=torch.Size([3, 0]), index=1)
        metadata.storage_data[second] = metadata.storage_data[index]

    altered(folder, change)
    with pytest.raises(CapabilityError, match=r"model\.w: float32.*: out of memory .*its shape is damaged"):
        list(import_checkpoints(repository, [folder], run="r"))
    (folder / METADATA).write_bytes(b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little"))
    with pytest.raises((CapabilityError, InvalidInputError), match="dcp-1"):
        list(import_checkpoints(repository, [folder], run="r"))
    assert repository.snapshots() == []


def test_a_text_that_is_named_again_and_again_in_a_file_of_torch(tmp_path, fails, repository, monkeypatch):
    """A megabyte names 100 GB."""
    monkeypatch.setattr(torch_checks, "MAX_PLACES", 10_000)
    torch.save({"a": ["x" * 10**6] * 1000}, tmp_path / "x.pt")
    assert "refer to each other and expand to more than" in fails(tmp_path / "x.pt")
    torch.save({"a": ["x" * 10**6] * 5}, tmp_path / "x.pt")
    list(import_checkpoints(repository, [tmp_path / "x.pt"], run="r"))
    assert repository.restore("r@0") == {"a": ["x" * 10**6] * 5}


def test_few_bytes_that_are_expanded(folder, repository, tmp_path, monkeypatch):
    """The sum counts, of one tensor or of many, in a file or in shards."""
    many = torch.zeros(1).expand(10**8)

    def change(metadata):
        index, info = next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "model.w")
        tensor = metadata.state_dict_metadata["model.w"]
        tensor.size, tensor.chunks[0].sizes, tensor.chunks[0].offsets = many.shape, many.shape, torch.Size([0])
        metadata.storage_data[dataclasses.replace(index, offset=torch.Size([0]))] = info
        with (folder / info.relative_path).open("ab") as file:
            info.offset = file.tell()
            torch.save(many, file)
            info.length = file.tell() - info.offset

    altered(folder, change)

    def imported(source):
        return list(import_checkpoints(repository, [source], run="r"))

    def saved(source):
        return save_file(repository, source, run="s", step=1)

    monkeypatch.setenv("SNAPSTORE_MAX_MEMORY", "32MiB")
    torch.save({"model": {"w": many}}, tmp_path / "x.pt")
    for read, source in ((imported, tmp_path / "x.pt"), (imported, folder), (saved, tmp_path / "x.pt")):
        with pytest.raises(CapabilityError, match=r"model\.w: torch.float32\[10{8}\]: needs 400.0MB .*before `expand`"):
            read(source)
    monkeypatch.setattr(limits, "MIN_DECODED_BYTES", 10**8)
    base = torch.ones(10**5)
    for made in ([many], [many[: 10**7 - i] for i in range(20)], [base[i:] for i in range(400)]):
        torch.save({"model": made}, tmp_path / "x.pt")
        for read in (imported, saved):
            with pytest.raises(InvalidInputError, match=r"x\.pt: its tensors have .*, expected at most 100.0MB for"):
                read(tmp_path / "x.pt")
    with pytest.raises(InvalidInputError, match=r"dcp-1: its tensors have 400.0MB .*, expected at most 100.0MB for"):
        imported(folder)
    assert repository.snapshots() == []


def test_a_few_bytes_of_metadata_that_want_much_memory(folder, repository):
    """They number a value 2147483647, state a frame of an exbibyte, and want an array of this size."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    unnamed = folder.rename(folder.with_name("dcp"))  # so that its step is looked for in its contents
    for data in (b"\x02Nr\xff\xff\xff\x7f.", b"\x04\x95" + b"\0" * 7 + b"\x10", b"\x05\x96" + b"\0" * 7 + b"\x10"):
        (unnamed / METADATA).write_bytes(b"\x80" + data)
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, limits[1]))
        try:
            with pytest.raises((CapabilityError, InvalidInputError), match=r"dcp.*(of memory|NoneType|KeyError)"):
                list(import_checkpoints(repository, [unnamed], run="r"))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
    assert repository.snapshots() == []


def test_a_path_of_dcp_without_end(folder, fails):
    altered(folder, lambda metadata: metadata.planner_data.update({"model.w": ("x",) * 50_000}))
    assert "model.w: expected a path of at most 200 keys and positions" in fails(folder)


def doubled(make):
    """Return a value of 60 levels, each of which has the one below it twice."""
    value = make(["x"])
    for _ in range(60):
        value = make([value, value])
    return value


class Raw:
    """A record of DCP with fields of any types, also as a key of a dict."""

    def __init__(self, kind, **fields):
        self.value = (kind, (), fields)

    def __reduce__(self):
        return self.value


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [tuple, list])
@pytest.mark.parametrize(
    "place", ["relative_path", "offset", "transform_descriptors", "fqn", "index", "path", "size", "chunk", "dtype"]
)
def test_a_doubled_value_takes_no_time(folder, fails, place, make):
    """The file has a few bytes for each level; to hash or to print the value would never end."""

    def change(metadata):
        value, tensor = doubled(make), metadata.state_dict_metadata["model.w"]
        index, info = next(iter(metadata.storage_data.items()))
        if place in ("fqn", "index"):
            fields = {"fqn": index.fqn, "offset": index.offset, "fqn" if place == "fqn" else "offset": value}
            metadata.storage_data = {Raw(type(index), **fields): info}
        elif place == "path":
            metadata.planner_data["model.w"] = make([value])
        elif place == "size":
            tensor.size = value
        elif place == "chunk":
            tensor.chunks[0].offsets = make([value] * 3)
        elif place == "dtype":
            tensor.properties.dtype = value
        else:
            setattr(info, place, value)

    altered(folder, change)
    assert "damaged" in fails(folder)


RECORD, SIZE, FOLDER, ORDERED = (
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    b"ctorch\nSize\n",
    b"cpathlib\nPosixPath\n",
    b"ccollections\nOrderedDict\n",
)
DOUBLED = b"(K\x01t" + b"2\x86" * 60
MANY = b"(" + b"K\x01" * 500_000 + b"t"
PAIRS = b"](" + b"".join(b"M" + number.to_bytes(2, "little") + b"N\x86" for number in range(60_000)) + b"e"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "data",
    [
        b"}" + DOUBLED + b"Ns.",
        b"}(" + DOUBLED + b"Nu.",
        b"(" + DOUBLED + b"Nd.",
        b"(" + DOUBLED + b"\x91.",
        b"\x8f(" + DOUBLED + b"\x90.",
        FOLDER + DOUBLED + b"\x85R.",
        ORDERED + b"](" + DOUBLED + b"N\x86e\x85R.",
        FOLDER + b"q\x00(h\x00)}}tb)R.",  # a function that calls itself
        ORDERED + b"N}X\x0b\x00\x00\x00__setitem__" + RECORD + b"s\x86b.",
        MANY + b"q\x01}(" + b"h\x01N" * 200_000 + b"u.",
        SIZE + b"q\x00" + MANY + b"\x85q\x010(" + b"h\x00h\x01R" * 100_000 + b"l.",
        RECORD + b"q\x00" + MANY + b"q\x010(" + b"h\x00h\x01R" * 100_000 + b"l.",
        RECORD + b"q\x00" + MANY + b"q\x010(" + b"h\x00h\x01\x81" * 100_000 + b"l.",
        ORDERED + b"q\x00" + PAIRS + b"\x85q\x010(" + b"h\x00h\x01R" * 100_000 + b"l.",
    ],
    ids=str.split("key keys dict frozen set path ordered itself class long sizes records new dicts"),
)
def test_a_pickle_of_dcp_takes_time_and_memory_as_it_is_long(folder, fails, data):
    (folder / METADATA).write_bytes(b"\x80\x04" + data)
    assert str(folder / METADATA) in fails(folder)


@pytest.mark.timeout(60)
def test_records_of_dcp_that_are_used_again_and_again(folder, fails):
    """Each of many names has the same shards, the same long path, or the same bytes of a file."""
    original = (folder / METADATA).read_bytes()
    numbers = range(20_000)

    def shards(metadata):
        tensor = metadata.state_dict_metadata["model.w"]
        (tensor.chunks[0].offsets, tensor.chunks[0].sizes), empty = [(0,), (0,)], tensor.chunks[0]
        tensor.size, tensor.chunks = (0,), [empty] * len(numbers)
        info = next(iter(metadata.storage_data.values()))
        for number in numbers:
            index = dcp.metadata.MetadataIndex(str(number), (0,))
            metadata.state_dict_metadata[str(number)], metadata.storage_data[index] = tensor, info

    def paths(metadata):
        path = ("a",) * 100_000
        for number in numbers:
            metadata.state_dict_metadata[str(number)] = metadata.state_dict_metadata["lr"]
            metadata.planner_data[str(number)] = path

    def same_bytes(metadata):
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == "lr")
        for number in numbers:
            metadata.state_dict_metadata[str(number)] = metadata.state_dict_metadata["lr"]
            metadata.storage_data[dcp.metadata.MetadataIndex(str(number))] = info

    for change, message in (
        (shards, "bytes, but its files have"),
        (paths, "expected a path of at most 200"),
        (same_bytes, "bytes, but its files have"),
    ):
        (folder / METADATA).write_bytes(original)
        altered(folder, change)
        assert message in fails(folder)


def test_two_values_with_one_path_in_dcp(folder, fails):
    altered(folder, lambda metadata: metadata.planner_data.update({"model.w": ("lr",)}))
    assert "lr: two values have this path" in fails(folder)


def test_a_value_of_dcp_that_is_an_object(tmp_path, fails):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": Command(tmp_path)}, checkpoint_id=str(tmp_path / "dcp-1"), no_dist=True)
    message = fails(tmp_path / "dcp-1")
    assert "a: refused: it holds a Python object (posix.system)" in message
    assert "save plain state instead" in message


@pytest.mark.timeout(60)
def with_metadata(values):
    """Return an OrderedDict with these values in the attribute that torch's state dicts have."""
    made = OrderedDict()
    made._metadata = dict(enumerate(values))
    return made


@pytest.mark.parametrize("make", [list, tuple, lambda values: dict(enumerate(values)), with_metadata])
def test_a_doubled_value_in_a_file_of_torch(tmp_path, fails, repository, make):
    """Its file has a kilobyte, and as a tree it has 2^60 values. Values that people share are imported."""
    torch.save({"a": doubled(make)}, tmp_path / "x.pt")
    assert "x.pt: its" in fails(tmp_path / "x.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": (doubled(make),)}, checkpoint_id=str(tmp_path / "dcp-2"), no_dist=True)
    assert "a: its" in fails(tmp_path / "dcp-2")
    shared = {"betas": (0.9, 0.999), "names": [["a"] * 30] * 30}
    torch.save({"groups": [shared] * 300}, tmp_path / "y.pt")
    list(import_checkpoints(repository, [tmp_path / "y.pt"], run="y"))
    assert repository.restore("y@0") == {"groups": [shared] * 300}


@pytest.mark.parametrize("name", ["last.ckpt", "h/optimizer.pt", "h/pytorch_model.bin"])
def test_a_pickle_with_an_object(tmp_path, fails, name):
    (tmp_path / "h").mkdir()
    torch.save({"state_dict": {"w": torch.zeros(2)}, "callback": Command(tmp_path)}, tmp_path / name)
    if name.startswith("h/opt"):
        save_safetensors({"w": torch.zeros(2)}, tmp_path / "h" / "model.safetensors")
    message = fails((tmp_path / name).parent if name.startswith("h/") else tmp_path / name)
    assert "refused: it holds a Python object (posix.system)" in message
    (tmp_path / name).write_bytes(pickle.dumps(Command(tmp_path)))
    message = fails((tmp_path / name).parent if name.startswith("h/") else tmp_path / name)
    assert "no state of plain values that torch.save has written" in message


def header(path, change):
    """Change the header of a file of safetensors."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    found = json.loads(data[8 : 8 + size])
    change(found)
    text = json.dumps(found).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_safetensors_that_are_cut_off_or_lie(tmp_path, fails):
    home = tmp_path / "h"
    home.mkdir()
    path = home / "model.safetensors"
    for change in (
        lambda h: h["w"].update(data_offsets=[0, 10**12]),
        lambda h: h["w"].update(data_offsets=[-4, 4]),
        lambda h: h["w"].update(shape=[2**62, 4]),
        lambda h: h["w"].update(dtype="F4000"),
        lambda h: h["v"].update(data_offsets=h["w"]["data_offsets"]),
        lambda h: h.clear(),
    ):
        save_safetensors({"w": torch.zeros(2), "v": torch.ones(2)}, path)
        header(path, change)
        assert f"{path}: not a safetensors file, or damaged" in fails(home)
    save_safetensors({"w": torch.zeros(2)}, path)
    whole = path.read_bytes()
    for size in (0, 7, 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "not a safetensors file, or damaged" in fails(home)


def test_an_index_that_names_files_elsewhere(tmp_path, fails):
    home = tmp_path / "h"
    home.mkdir()
    save_safetensors({"secret": torch.zeros(2)}, tmp_path / "elsewhere.safetensors")
    save_safetensors({"w": torch.zeros(2)}, home / "model-1.safetensors")
    index = home / "model.safetensors.index.json"
    for name in ("../elsewhere.safetensors", str(tmp_path / "elsewhere.safetensors"), "missing", None, ["x"]):
        try:
            index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "secret": name}}))
            assert str(index) in fails(home)
        finally:
            index.unlink()
    (home / "link.safetensors").symlink_to("../elsewhere.safetensors")
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "secret": "link.safetensors"}}))
    assert "is a link to" in fails(home)
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "v": "model-1.safetensors"}}))
    assert "names v, but 'model-1.safetensors' does not hold it" in fails(home)
    for text in ("{", "[]", '{"weight_map": []}', "[" * 100_000):
        index.write_text(text)
        assert str(index) in fails(home)
    index.unlink()
    (home / "link.safetensors").unlink()
    (home / "config.json").symlink_to("/etc/hostname")
    assert "is a link to /etc/hostname" in fails(home)


def test_links_of_a_hub_cache_are_followed(tmp_path, repository):
    blobs, home = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    home.mkdir(parents=True)
    save_safetensors({"w": torch.ones(2)}, blobs / "1")
    (home / "model.safetensors").symlink_to("../../blobs/1")
    (found,) = import_checkpoints(repository, [home], run="hub")
    assert repository.restore(found.snapshot.ref)["model"]["w"].tolist() == [1, 1]


def test_a_snapshot_whose_files_would_leave_the_export(tmp_path, repository):
    for name in ("../evil.json", "/evil.json", "a/../../evil.json", "a\\..\\evil", "./x"):
        state = {"model": {"w": torch.ones(2)}, "files": {name: b"{}"}}
        repository.save(state, run="a", step=1, metadata={"imported": {"format": "hf", "files": 1}})
        with pytest.raises(InvalidInputError, match="leads out of the export"):
            export_snapshot(repository, "a@latest", tmp_path / "out", to="hf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["\ud800", "e\udcff.json", "a\n\x1b[31mb", "a\0b", "\x9b31m", "d/\x7f"])
def test_a_snapshot_with_a_file_whose_name_is_not_printable(tmp_path, repository, name):
    state = {"model": {"w": torch.ones(2)}, "files": {"config.json": b"{}", name: b"{}"}}
    repository.save(state, run="a", step=1, metadata={"imported": {"format": "hf", "files": 1}})
    with pytest.raises(InvalidInputError, match=r"a@1: holds a file named .* has a control character, or a surrogate"):
        export_snapshot(repository, "a@1", tmp_path / "out", to="hf")
    assert list(tmp_path.iterdir()) == []
    for to, output in (("torch", "x.pt"), ("dcp", "d"), ("safetensors", "x.safetensors")):
        export_snapshot(repository, "a@1", tmp_path / output, to=to, options=ExportOptions(part="model"))


@pytest.mark.parametrize("name", ["\ud800", "a\0", "x" * 300])
def test_an_export_to_a_name_that_no_file_can_have(tmp_path, repository, name):
    repository.save({"model": {"w": torch.ones(2)}}, run="a", step=1)
    for to, ending in (("hf", ""), ("dcp", ""), ("torch", ".pt"), ("safetensors", ".safetensors")):
        with pytest.raises(InvalidInputError, match="cannot be the name of a file here"):
            export_snapshot(repository, "a@1", tmp_path / (name + ending), to=to)
    assert list(tmp_path.iterdir()) == []


def test_tensors_without_a_form_are_refused(tmp_path, repository, fails):
    sparse = torch.eye(3).to_sparse()
    torch.save({"ok": torch.ones(1), "bad": sparse}, tmp_path / "x.pt")
    assert "bad: torch.sparse_coo tensor has no stored form" in fails(tmp_path / "x.pt")
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    repository.save({"w": packed, "v": torch.zeros(2, dtype=torch.float8_e4m3fnuz)}, run="a", step=1)
    export_snapshot(repository, "a@1", tmp_path / "y.pt", to="torch")
    loaded = torch.load(tmp_path / "y.pt", weights_only=True)
    assert loaded["w"].view(torch.uint8).tolist() == [0, 0, 0, 0]
    repository.save({"model": {"w": torch.zeros(3, dtype=torch.complex128)}}, run="b", step=1)
    with pytest.raises(InvalidInputError, match="safetensors cannot hold a tensor of complex128"):
        export_snapshot(repository, "b@1", tmp_path / "z", to="hf", options=ExportOptions(tensors_only=True))


def test_an_export_that_fails_leaves_nothing(tmp_path, repository, monkeypatch):
    repository.save({"w": torch.ones(9)}, run="a", step=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for to, name in (("hf", "h"), ("dcp", "d"), ("torch", "x.pt"), ("safetensors", "x.safetensors")):
        with pytest.raises(Exception, match="cannot be written: No space left on device; nothing was left behind"):
            export_snapshot(repository, "a@1", tmp_path / name, to=to)
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(tmp_path)
    with pytest.raises(InvalidInputError, match="is not a folder; create it first"):
        export_snapshot(repository, "a@1", Path(tmp_path, "h"), to="hf")


#: (1, 1), then a pair of this pair, and so on; its hash visits 2^60 values.
DOUBLED = b"K\x01q\x00" + b"h\x00\x86q\x00" * 60
TEXT = b"X" + struct.pack("<I", 100_000) + b"a" * 100_000 + b"q\x00"
LATIN1 = b"X\x06\x00\x00\x00latin1"
HUGE = b"\x8a\x05" + (8 << 30).to_bytes(5, "little")
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n%bX\x03\x00\x00\x00cpu%btQ"
WASTEFUL = {
    "a key": b"}" + DOUBLED + b"Ns.",
    "one of several keys": b"}(K\x02N" + DOUBLED + b"Nu.",
    "a deep key": b"}K\x01" + b"\x85" * 40_000 + b"Ns.",
    "a member": b"cbuiltins\nset\n]" + DOUBLED + b"a\x85R.",
    "a key of a pair": b"ccollections\nOrderedDict\n]](" + DOUBLED + b"Nea\x85R.",
    "the name of a storage": STORAGE % (DOUBLED, b"K\x01") + b".",
    "one text as bytes": TEXT + b"](" + (b"c_codecs\nencode\nh\x00" + LATIN1 + b"\x86R") * 1000 + b"e\x86.",
    "one list as sets": b"](" + b"K\x01" * 4_000 + b"eq\x00(" + b"cbuiltins\nset\nh\x00\x85R" * 1000 + b"t\x86.",
    "one dict as attributes": b"}(" + b"".join(b"J%bN" % struct.pack("<I", i) for i in range(4_000)) + b"uq\x00("
    + b"ccollections\nOrderedDict\n)Rh\x00b" * 1000 + b"t\x86.",
    "hexadecimal of itself": b"c_codecs\nencode\n" * 40
    + b"X\x01\x00\x00\x00a" + b"X\x03\x00\x00\x00hex\x86R" * 40 + b".",
    "a number of bytes": b"cbuiltins\nbytearray\n" + HUGE + b"\x85R.",
    "a number of bytes in Python 2": b"c__builtin__\nbytearray\n" + HUGE + b"\x85R.",
    "a number of elements": b"ctorch\nFloatTensor\n" + HUGE + b"\x85R.",
    "a new tensor": b"ctorch\nFloatTensor\n" + HUGE + b"\x85\x81.",
    "a storage": b"ctorch.storage\nUntypedStorage\n" + HUGE + b"\x85R.",
    "a number of bytes for a subclass": b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\n"
    + b"ctorch\nTensor\n" + HUGE + b"\x85}tR.",
}  # fmt: skip


def torch_file(path, pickled, name="data.pkl", method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(f"x/{name}", b"\x80\x02" + pickled)
        archive.writestr("x/byteorder", b"little")
        archive.writestr("x/data/0", bytes(4))
        archive.writestr("x/version", b"3\n")


def legacy_file(path, pickled):
    """Write torch's form before zip archives."""
    with path.open("wb") as file:
        for value in (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {}):
            pickle.dump(value, file, protocol=2)
        file.write(b"\x80\x02" + pickled)
        pickle.dump([], file, protocol=2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", WASTEFUL)
@pytest.mark.parametrize("write", [torch_file, legacy_file])
def test_a_small_file_of_torch_that_takes_much_time_or_memory(tmp_path, fails, monkeypatch, what, write):
    """Its pickle is followed before torch reads it; torch itself would take hours, or all memory."""
    monkeypatch.setattr(torch_checks, "MAX_PLACES", 100_000)  # a million are counted in seconds
    write(tmp_path / "x.pt", WASTEFUL[what])
    with little_memory(128 * MIB):
        assert "the file is damaged or hostile" in fails(tmp_path / "x.pt")


@pytest.mark.timeout(60)
def test_a_pickle_is_followed_under_each_name_and_in_each_method(tmp_path, fails):
    torch_file(tmp_path / "x.pt", WASTEFUL["a key"], "DATA.PKL")
    assert "damaged or hostile" in fails(tmp_path / "x.pt")
    torch_file(tmp_path / "x.pt", WASTEFUL["a key"], method=zipfile.ZIP_DEFLATED)
    assert "damaged or hostile" in fails(tmp_path / "x.pt")


def test_tensors_without_bytes_in_an_old_file_of_torch(tmp_path, fails):
    """Before zip archives torch took memory for the elements that the pickle names."""
    legacy_file(tmp_path / "x.pt", STORAGE.replace(b"tQ", b"NtQ") % (b"X\x01\x00\x00\x000", HUGE) + b".")
    assert "but its tensors have more elements" in fails(tmp_path / "x.pt")


def test_an_archive_whose_entries_share_bytes_or_are_hidden(tmp_path, fails):
    torch_file(tmp_path / "x.pt", b"}.")
    whole = (tmp_path / "x.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as archive:
        archive.writestr("x/data/1", bytes(4096))
        shared = archive.infolist()[-1]
        for number in range(2, 100):
            archive.filelist.append(copy.copy(shared))
            archive.filelist[-1].filename = f"x/data/{number}"
    assert "its entries have" in fails(tmp_path / "x.pt")
    for data in (whole + b"x", whole + whole[-22:], whole[:4] + whole):
        (tmp_path / "x.pt").write_bytes(data)
        assert "not a PyTorch file, or damaged" in fails(tmp_path / "x.pt")


def test_a_compressed_archive_that_does_not_fit_into_memory(tmp_path, repository, monkeypatch):
    torch.save({"w": torch.zeros(16 * 2**20)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w", 8) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    monkeypatch.setenv("SNAPSTORE_MAX_MEMORY", "32MiB")
    with pytest.raises(CapabilityError, match=r"y.pt, unpacked: needs 67.*MB"):
        list(import_checkpoints(repository, [tmp_path / "y.pt"], run="r"))
    monkeypatch.delenv("SNAPSTORE_MAX_MEMORY")
    list(import_checkpoints(repository, [tmp_path / "y.pt"], run="r"))


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_people_save_is_no_waste(tmp_path, repository, is_zip):
    state = {
        "keys": {(1, ("a", i)): i for i in range(50)},
        "plain": [b"ab" * 5000, bytearray(b"abc"), {1, 2}, 1j, 2**100, None, Counter("aab"), torch.Size([2, 3])],
        "model": OrderedDict(w=torch.nn.Parameter(torch.ones(3)), half=torch.ones(2).bfloat16(), none=torch.ones(0)),
        "shared": [b"x" * 1000] * 1000,
    }
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    list(import_checkpoints(repository, [tmp_path / "x.pt"], run="r"))
    assert same(repository.restore("r@0"), torch.load(tmp_path / "x.pt"))


def test_an_ordered_dict_of_python_2(tmp_path, repository):
    torch_file(tmp_path / "x.pt", b"ccollections\nOrderedDict\n](](U\x01aK\x01e](U\x01bK\x02ee\x85R.")
    list(import_checkpoints(repository, [tmp_path / "x.pt"], run="r"))
    assert repository.restore("r@0") == OrderedDict(a=1, b=2)
