"""A reader that knows docs/format.md alone restores the golden repositories, and what else the format can hold."""

import argparse
import dataclasses
import datetime
import enum
import json
import os
import random
import shutil
import subprocess
import sys
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path, PurePosixPath, PureWindowsPath

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from kit import forge
from kit.processes import ROOT
from snapstore import Repository, SaveOptions
from snapstore.errors import FormatError, IntegrityError
from snapstore.format import hashing
from snapstore.format.blobs import blob as stored_blob
from snapstore.format.blobs import chain_decode, planes
from snapstore.state.tree.decode import decode
from snapstore.state.values.tensors import StoredPart, TensorSpec

sys.path.insert(0, str(ROOT / "tools"))

import reader
from make_golden import describe, summary

GOLDEN = sorted((ROOT / "tests" / "golden").glob("v*"))
V1 = ROOT / "tests" / "golden" / "v1"
#: Runs the reader where an import of snapstore, or of torch, fails.
ALONE = "import runpy, sys; sys.modules |= dict.fromkeys(('snapstore', 'torch')); sys.argv.pop(0)"
ALONE += "; runpy.run_path(sys.argv[0], run_name='__main__')"


def run(folder, *arguments):
    """Run the reader by itself."""
    command = [sys.executable, "-c", ALONE, ROOT / "tools" / "reader.py", folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def read(folder, *arguments):
    """Return the lines of the reader."""
    done = run(folder, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def record_of(folder, run, step):
    """Return the ruling record of a snapshot."""
    (record,) = (r for r in reader.Repository(folder).records() if (r["run"], r["step"]) == (run, step))
    return record


def snapshot(folder, run, step):
    """Return a snapshot, as the reader sees it in this process."""
    return reader.Snapshot(reader.Repository(folder), record_of(folder, run, step))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_golden_repositories_restore_to_the_bit(golden):
    expected = json.loads((golden / "expected.json").read_text())["snapshots"]
    found = read(golden)
    for line in found:
        if line.get("leaves"):
            line["leaves"] = summary(line["leaves"])
        if line.get("ranks"):
            line["ranks"] = list(map(summary, line["ranks"]))
    assert [{name: line[name] for name in e} for line, e in zip(found, expected, strict=True)] == expected
    metadata = {(line["run"], line["step"]): line.get("metadata") for line in found}
    if golden == V1:
        assert metadata["main", 4] == "{'step': 4}"
        assert metadata["fork", 6] == "'forked'"


@pytest.mark.parametrize("name", ["snapstore", "torch"])
def test_the_reader_runs_where_neither_can_be_imported(name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import {name}")
    done = subprocess.run([sys.executable, "-c", ALONE, script], capture_output=True, text=True, timeout=60)
    assert f"import of {name} halted" in done.stderr


def test_ties_are_one_memory():
    state = snapshot(V1, "main", 4).state()
    ref = state["optimizer"]["state"][0]["ref"]
    assert ref.data is state["model"]["w"].data is state["model"]["tied"].data


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float64", "int16", "int8"])
def test_sparse_deltas(tmp_path, name):
    """Steps of one unit and of any size; many elements in some groups, so that they are dense; and runs."""
    rng = np.random.default_rng(0)
    bits = getattr(torch, f"int{8 * getattr(torch, name).itemsize}")
    weights = torch.from_numpy(rng.normal(0, 20, 20_000)).to(getattr(torch, name))
    with Repository.create(tmp_path / "repo") as repository:
        for step in range(4):
            repository.save({"w": weights}, run="r", step=step)
            weights = weights.clone()
            moved = torch.from_numpy(rng.random(weights.numel()) < (0.02 if step < 2 else 0.2))
            moved |= weights.double().abs() < 3 * step
            moved[5000:12_000] = False
            moved[100 : 200 * step] = True
            sizes = torch.from_numpy(rng.integers(1, 3 if step == 0 else 100, weights.numel()))
            weights.view(bits)[moved] += sizes.to(bits)[moved]
        assert "sparse" in repository.stats().codecs
        for step in range(4):
            found = snapshot(tmp_path / "repo", "r", step).state()["w"]
            expected = repository.restore(f"r@{step}")["w"].view(torch.uint8).numpy()
            np.testing.assert_array_equal(found.data.view(np.uint8), expected)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", [planes.BYTES, planes.ROTATED])
def test_both_layouts_of_each_element_size(size, layout):
    """No writer makes layout 1 of one byte: it is not rotated."""
    chunk = np.random.default_rng(size).integers(0, 256, 4096, np.uint8)
    chunk[::2] = 7  # a plane that is coded
    statistics = planes.statistics(planes.histograms(planes.sample(chunk, size, layout)))
    found, digest = np.empty(stored_blob.bound(chunk.size, size), np.uint8), hashing.digest(chunk, 0)
    stored = bytes(stored_blob.encode(chunk, size, layout, statistics, (digest, None), found))
    assert reader.Blob(stored).decoded.tobytes() == chunk.tobytes()
    out = np.empty_like(chunk)
    chain_decode.decode_chain([memoryview(stored)], ["the blob"], digest, out, seed=0)
    np.testing.assert_array_equal(out, chunk)


class Colour(enum.Enum):
    RED = "red"
    BOTH = (1, 2)


@dataclasses.dataclass
class Fields:
    a: int
    b: list


Pair = namedtuple("Pair", "x y")


class Named(dict):
    pass


def values():
    """Plain values that the golden repository lacks."""
    zone = datetime.timezone(datetime.timedelta(hours=2), "CEST")
    hooked = OrderedDict(a=1)
    hooked._metadata = OrderedDict({"": {"version": 1}})
    return {
        "paths": [Path("/a/b"), PureWindowsPath("c:\\x"), PurePosixPath("q")],
        "times": [datetime.time(1, 2, 3, 4, tzinfo=zone, fold=1), datetime.time(5), datetime.date(2020, 1, 2)],
        "dates": [datetime.datetime(2020, 1, 2, 3, 4, 5, 6), datetime.datetime(2020, 1, 2, tzinfo=zone, fold=1)],
        "zones": [zone, datetime.UTC, datetime.timezone(-datetime.timedelta(hours=3.5))],
        "delta": datetime.timedelta(-1, 5, 7),
        "numpy": [np.bytes_(b"ab"), np.str_("\ud800x"), np.dtype("<M8[25s]"), np.datetime64("2020-01-01", "ms")],
        "ints": [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, -(2**200)],
        "long": [b"z" * 4096, b"y" * 4097, bytearray(b"x" * 5000), bytearray()],
        "empty": [[], (), {}, set(), frozenset(), "", b"", deque(maxlen=3), torch.Size([]), defaultdict(None, {1: 2})],
        "spaces": [types.SimpleNamespace(a=1, b=[2]), argparse.Namespace(lr=0.1)],
        "keys": {1.0: 1, b"k": 4, (1, (2,)): 5, frozenset({1}): 7, datetime.date(2020, 1, 1): 8, 2**70: 9},
        "hooked": hooked,
        "classes": [Colour.RED, Colour.BOTH, Fields(1, [torch.ones(2)]), Pair(1, "q"), Named(a=1)],
        "same path": {1.0: torch.ones(2), "1.0": torch.zeros(2000)},
    }


def columns():
    """Large plain values of every kind of column, more than 64 KiB of them."""
    draw = random.Random(5)
    return {
        "words": [f"{draw.getrandbits(120):x}" for _ in range(4000)],
        "mixed": [[i, str(i), None, (i,), {"k": i}, b"q", 2**70][i % 7] for i in range(700)],
        "lists": [[i] * (i % 5) for i in range(300)],
        "tuples": [(i,) * (i % 3) for i in range(300)],
        "rows": [[i, i + 1, "x"] for i in range(300)],
        "tuple rows": [(i, [i], 0.5) for i in range(300)],
        "dicts": [dict.fromkeys(range(i % 4), i) for i in range(300)],
        "dict rows": [{"a": i, "b": [i, i], "c": {"d": None}} for i in range(300)],
        "no members": [[[] for _ in range(300)], [{} for _ in range(300)], [()] * 300],
    }


def tensors(step):
    """Arrays that the golden repository lacks: strides, orders, an own memory in two parts, deltas of most sizes."""
    numbers = torch.arange(9000.0) / 7
    return {
        "strided": numbers.reshape(90, 100)[:, ::3].T,
        "big_endian": np.arange(3000, dtype=">f8"),
        "fortran": np.asfortranarray(np.arange(3000).reshape(50, 60)),
        "text": np.array(["ab", "c"] * 2000),
        **{str(dtype): (numbers + step * 1e-3).to(dtype) for dtype in (torch.float64, torch.float16, torch.complex64)},
        "zeros": torch.zeros(40000, dtype=torch.int16),
    }


def test_whatever_a_save_can_hold(tmp_path):
    folder = tmp_path / "repo"
    with Repository.create(folder, chunk_bytes=4096, options=SaveOptions(threads=2)) as repo:
        for step in range(3):
            repo.save({"values": values(), "columns": columns(), "t": tensors(step)}, run="many", step=step)
        for step, lone in enumerate((None, 5, [1, torch.ones(2000)], torch.ones(3), columns()["words"])):
            repo.save(lone, run="lone", step=step, metadata={"at": datetime.date(2020, 1, 1), "rows": list(range(300))})
        repo.tag("many@1", "kept")
        repo.compact()
        expected = {s.id: describe(repo.restore(f"id:{s.id}")) for s in repo.snapshots()}
        assert max(s.depth for s in repo.snapshots()) > 0
    found = read(folder)
    for line in found:
        assert line["leaves"] == json.loads(json.dumps(expected[line["id"]])), (line["run"], line["step"])
    assert len(found) == len(expected) == 8
    assert snapshot(folder, "many", 0).state()["values"]["hooked"]._metadata == {"": {"version": 1}}


def restore_all(folder):
    repository = reader.Repository(folder)
    for record in repository.records():
        reader.shown(repository, record)


def test_damage_is_refused(tmp_path):
    random.seed(1)
    folders = ("config", "snapshots/main", "manifests", "packs")
    for number, under in enumerate(folders * 2):
        folder = tmp_path / str(number)
        shutil.copytree(V1, folder)
        victims = sorted(path for path in [folder / under, *(folder / under).rglob("*")] if path.is_file())
        if under.startswith("snapshots"):  # only the last revision of each is read
            victims = list({path.stem: path for path in victims}.values())
        victim = random.choice(victims)
        data = bytearray(victim.read_bytes())
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        victim.write_bytes(data)
        with pytest.raises((ArithmeticError, LookupError, TypeError, ValueError)):
            restore_all(folder)


@pytest.mark.parametrize("harm", ["damaged", "of a newer version", "of several runs"])
def test_a_record_that_is_refused_hides_its_own_snapshot_only(tmp_path, harm):
    folder = tmp_path / "repo"
    shutil.copytree(V1, folder)
    victim, wanted = record_of(V1, "main", 1), {line["id"]: line for line in read(V1)}
    last = max((folder / "snapshots" / "main").glob(f"*-{victim['id']}.*"), key=lambda path: int(path.suffix[1:]))
    data = bytearray(last.read_bytes())
    if harm == "of several runs":
        last.with_name(f"000000000077-{victim['id']}.0").write_bytes(data)
    else:
        data[5 if harm == "of a newer version" else 60] ^= 2
        last.write_bytes(data)
    done = run(folder)
    assert {line["id"]: line for line in map(json.loads, done.stdout.splitlines())} == {
        name: line for name, line in wanted.items() if name != victim["id"]
    }
    assert (done.returncode, done.stderr.count("id:")) == (1, 1)
    assert f"id:{victim['id']}: " in done.stderr
    other = next(name for name in wanted if name != victim["id"])
    assert read(folder, "--id", other) == [wanted[other]]
    assert run(folder, "--id", victim["id"]).returncode == 1
    with pytest.raises(reader.DamagedError):
        restore_all(folder)


@pytest.mark.parametrize("harm", ["a sparse file of 8 TiB", "a FIFO"])
def test_a_manifest_that_cannot_be_read_hides_its_own_snapshots_only(tmp_path, harm):
    folder = tmp_path / "repo"
    shutil.copytree(V1, folder)
    name = record_of(V1, "main", 1)["manifests"][0]["sha256"]
    records = reader.Repository(V1).records()
    hidden = {r["id"] for r in records if name in (m["sha256"] for m in r["manifests"])}
    path = folder / "manifests" / name[:2] / name
    if harm == "a FIFO":
        path.unlink()
        os.mkfifo(path)
    else:
        os.truncate(path, 8 << 40)
    done = run(folder)
    found = {json.loads(line)["id"] for line in done.stdout.splitlines()}
    hidden -= {r["id"] for r in records if r["state"] not in ("committed", "forgotten")}
    assert (found, done.returncode) == ({r["id"] for r in records} - hidden, 1)
    assert done.stderr.count(f"DamagedError: manifests/{name[:2]}/{name} ") == len(hidden)


def test_an_object_for_which_memory_is_too_small_is_refused(monkeypatch, capsys):
    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(reader.Snapshot, "state", fails)
    monkeypatch.setattr(sys, "argv", ["reader.py", str(V1)])
    monkeypatch.setattr(sys, "setrecursionlimit", lambda _: None)
    monkeypatch.setattr(sys, "set_int_max_str_digits", lambda _: None)
    assert reader.main() == 1
    assert "MemoryError: no room" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["<U0", "|S0"])
def test_only_a_leaf_may_be_a_dtype_of_no_bytes(tmp_path, dtype):
    """NumPy makes arrays of "<U0" as "<U1": terabytes that no stored bytes pay for. snapstore stores no such array."""
    with pytest.raises(reader.UnknownError, match="an array of dtype"):
        reader.Entry([["x"], "array", dtype, [2**40], False, None, [], None])
    with Repository.create(tmp_path / "repo") as repository:
        repository.save({"x": np.dtype(dtype), "y": np.str_(""), "z": np.array([""])}, run="r", step=0)
    assert read(tmp_path / "repo")[0]["leaves"]["/'x'"] == [type(np.dtype(dtype)).__name__, repr(np.dtype(dtype))]


def test_lower_revisions_mean_nothing(tmp_path):
    """They may be damaged, as repair leaves them, or missing; ten digits of revision are no key of a record."""
    folder = tmp_path / "repo"
    shutil.copytree(V1, folder)
    record, wanted = record_of(V1, "main", 1), read(V1)
    (path,) = (folder / "snapshots" / "main").glob(f"*-{record['id']}.{record['revision'] - 1}")
    path.write_bytes(b"damaged")
    path.with_suffix(".1000000000").write_bytes(b"of another program")
    assert read(folder) == wanted
    path.unlink()
    assert read(folder) == wanted


FULL = reader.struct.pack("<4BIII8sII16s16s", 0, 1, 0, 0, 4, 4, 65536, bytes(8), 0, 0, bytes(16), bytes(16)) + b"abcd"


def blob(at, value):
    """A blob of the chunk "abcd" in which one byte behind the checksum is another."""
    body = bytearray(FULL)
    body[at - 16] = value
    return b"SNBL\1\0\0\0" + xxhash.xxh3_64_digest(body)[::-1] + bytes(body)


def in_pack(stored, **changes):
    """Return a blob as a reader finds it in a pack, whose footer has some other fields."""
    entry = np.frombuffer(bytearray(stored_blob.entry(memoryview(stored), 64)), stored_blob.ENTRY)
    for name, (at, value) in changes.items():
        entry[name][0, at] = value
    footer = entry.tobytes()
    data = b"SNAPPACK\1\0".ljust(64, b"\0") + stored + bytes(-len(stored) % 8)
    data += footer + reader.struct.pack("<QII", len(data), 1, 0) + xxhash.xxh3_64_digest(footer)[::-1] + b"SNAPFOOT"
    return reader.Pack(data).blob(64, len(stored))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_codecs_beyond_the_element_size_are_ignored(size):
    """The page calls them zero; the library ignores them too. The header and the footer of a pack have them."""
    chunk = np.arange(4096, dtype=np.uint8)
    chunk[::2] = 7
    statistics = planes.statistics(planes.histograms(planes.sample(chunk, size, planes.BYTES)))
    out, digest = np.empty(stored_blob.bound(chunk.size, size), np.uint8), hashing.digest(chunk, 0)
    plain = bytes(stored_blob.encode(chunk, size, planes.BYTES, statistics, (digest, None), out))
    codecs = plain[32 : 32 + size].ljust(8, b"\x46")
    stored = forge.rewrite(plain, codecs=codecs)
    assert reader.Blob(stored).decoded.tobytes() == chunk.tobytes()
    chain_decode.decode_chain([memoryview(stored)], ["the blob"], digest, decoded := np.empty_like(chunk), seed=0)
    np.testing.assert_array_equal(decoded, chunk)
    for data in (plain, stored):
        for changes in (
            {},
            {"codecs": (7, 1)},
            {"plane_bytes": (7, 1)},
            {"codecs": (size, 3), "plane_bytes": (size, 9)},
        ):
            assert in_pack(data, **changes).decoded.tobytes() == chunk.tobytes()
    for name in ("codecs", "plane_bytes"):
        with pytest.raises(reader.DamagedError, match="contradicts the footer"):
            in_pack(stored, **{name: (size - 1, 9)})


@pytest.mark.parametrize("plane", range(1, 8))
@pytest.mark.parametrize("size", [1, 4])
def test_codecs_of_the_other_planes_of_a_sparse_delta_are_refused(size, plane):
    base = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    chunk = base.copy()
    chunk[[8, 800]] += 1
    difference, out = np.empty_like(chunk), np.empty(8192, np.uint8)
    planes.difference(chunk, base, size, difference)
    digests = hashing.digest(chunk, 0), hashing.digest(base, 0)
    stored = bytes(stored_blob.encode_sparse(difference, base, size, planes.BYTES, digests, 8192, out))
    assert in_pack(stored).on(base).tobytes() == chunk.tobytes()
    assert in_pack(stored, plane_bytes=(plane, 1)).on(base).tobytes() == chunk.tobytes()
    wrong = forge.rewrite(stored, codecs=b"\3".ljust(plane, b"\0").ljust(plane + 1, b"\1").ljust(8, b"\0"))
    with pytest.raises(reader.DamagedError, match="sparse"):
        reader.Blob(wrong)
    with pytest.raises(IntegrityError, match="sparse, but codecs"):
        chain_decode.decode_chain([memoryview(wrong)], ["the blob"], digests[0], chunk.copy(), base, seed=0)


@pytest.mark.parametrize("name", [None, 5, "0" * 63])
def test_a_record_without_the_manifest_list_that_it_needs(name):
    repository, record = reader.Repository(V1), record_of(V1, "values", 1)
    reader.Snapshot(repository, record)
    del record["manifest_list"]
    with pytest.raises(reader.DamagedError, match="manifest list"):
        reader.Snapshot(repository, record | ({} if name is None else {"manifest_list": name}))


def test_what_is_unknown_is_refused():
    assert reader.Blob(blob(16, 0)).decoded.tobytes() == b"abcd"
    for at, value in ((16, 3), (18, 2), (32, 70)):  # transform, layout, codec
        with pytest.raises(reader.UnknownError):
            reader.Blob(blob(at, value))
    tree = reader.Tree(snapshot(V1, "main", 0))
    for node in (["later", 1], ["int", b"\1", 2], ["columns", ["later", b""]], ["object", "later", "m", "n", None]):
        with pytest.raises(reader.UnknownError):
            tree.value(node, 0)
    with pytest.raises(reader.DamagedError, match="never a map"):
        reader.unpack(b"\x91\x80")
    with pytest.raises(reader.DamagedError, match="occurs twice"):
        tree.value(["dict", [1, True], [0, 0]], 0)
    with pytest.raises(reader.DamagedError, match="share a hash"):
        tree.value(["set", [["int", ((2**61 - 1) * i).to_bytes(16, "little")] for i in range(257)]], 0)


@pytest.mark.parametrize(
    "node",
    [
        ["np", "|S3", b"abc"],
        ["np", "<U1", b"a\0\0\0"],
        ["dtype", "nothing"],
        ["device", "No Such"],
        ["device", "cuda:"],
        ["size", ["a"]],
        ["size", [True]],
        ["deque", True, []],
        ["time", "01:02:03", True, None],
        ["timedelta", True, 0, 0],
        ["set", [1, True]],
        ["enum", "m", "n", "x", ["list", []]],
        ["object", "subclass", "m", "n", ["object", "subclass", "m", "n", 1]],
        ["object", "subclass", "m", "n", True],
        ["object", "dataclass", "m", "n", ["dict", [1], [2]]],
        ["object", "dataclass", "m", "n", 1],
        ["object", "namedtuple", "m", "n", ["tuple", [1]], ["a", "b"]],
        ["object", "namedtuple", "m", "n", ["tuple", [1]], [1]],
        ["object", "namespace", "types", "SimpleNamespace", 5],
        ["optimizer", [["float32", [2]]], [1], ["dict", [], []]],
        ["optimizer", [["float32", [2]]], [True], ["dict", [], []]],
        ["optimizer", [["float32", [-2]]], [0], ["dict", [], []]],
        ["optimizer", [["float32"]], [0], ["dict", [], []]],
        ["optimizer", [[5, [2]]], [0], ["dict", [], []]],
        ["optimizer", [], [], ["list", []]],
        ["optimizer", [], [], ["optimizer", [], [], ["dict", [], []]]],
    ],
    ids=str,
)
def test_nodes_that_the_page_rules_out(node):
    """The package refuses them as well."""
    with pytest.raises(reader.DamagedError):
        reader.Tree(snapshot(V1, "main", 0)).value(node, 0)
    with pytest.raises(FormatError):
        decode([StoredPart("", node, [])])


@pytest.mark.parametrize(
    "node",
    [
        ["dtype", "qint8"],
        ["dtype", "bits2x4"],
        ["device", "cuda"],
        ["size", [2, -1]],
        ["enum", "m", "n", None, 5],
        ["object", "namedtuple", "m", "n", ["tuple", [1]], ["a"]],
        ["object", "subclass", "m", "n", "text"],
        ["optimizer", [["later", []], ["float32", [2, 0]]], [1, 0, 1], ["odict", [], []]],
    ],
    ids=str,
)
def test_nodes_that_the_page_allows(node):
    reader.Tree(snapshot(V1, "main", 0)).value(node, 0)
    decode([StoredPart("", node, [])])


def mixed(levels):
    """Columns in columns."""
    column = ["values", b"\x91\x07"]
    for _ in range(levels):
        column = ["mixed", b"\0", [column]]
    return ["columns", column]


def around(levels):
    """Columns nodes around each other."""
    node = 7
    for _ in range(levels):
        node = ["columns", ["values", [node]]]
    return node


@pytest.mark.parametrize(("nested", "most"), [(mixed, 97), (around, 96)])
def test_how_deep_columns_may_be(nested, most):
    assert reader.Tree(snapshot(V1, "main", 0)).value(nested(most), 0) == 7
    assert decode([StoredPart("", nested(most), [])]) == 7
    with pytest.raises(reader.DamagedError):
        reader.Tree(snapshot(V1, "main", 0)).value(nested(most + 1), 0)
    with pytest.raises(FormatError):
        decode([StoredPart("", nested(most + 1), [])])


@pytest.mark.parametrize(
    "node",
    [
        ["dict", [["tensor", 0, False]], [1]],
        ["dict", [["tuple", [["tensor", 0, False]]]], [1]],
        ["set", [["tensor", 0, False]]],
        ["dict", [["rank", 0]], [1]],
        ["columns", ["values", [["tensor", 0, False]]]],
        ["columns", ["values", [["rank", 0]]]],
    ],
    ids=str,
)
def test_no_arrays_where_only_plain_values_may_be(node):
    """snapstore made a key of its own record of a tensor, which the caller got."""
    whole = snapshot(V1, "main", 0)
    whole.rank = None
    with pytest.raises(reader.REFUSED):
        reader.Tree(whole, "model").value(node, 0)
    spec = TensorSpec(("a",), "tensor", "float32", (3,), False, None)
    with pytest.raises(FormatError):
        decode([StoredPart("", node, [spec])])


def plant(folder, world):
    for key in world.store.list(""):
        (folder / key.key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key.key).write_bytes(world.store.get(key.key))
    return folder


def test_sections_that_are_unknown_are_ignored(tmp_path):
    world = forge.World()
    data = world.manifest(tree=7, save_id=b"\xaa" * 16)
    sections = [*forge.header_of(data).sections, ("novel", 0, 1, 2**60, 9)]
    world.commit(forge.reheader(data, sections=sections), write_id="0" * 32, depth=0)
    assert world.restore() == 7
    assert snapshot(plant(tmp_path, world), "r", 0).state() == 7


def test_the_most_dimensions_and_digits(tmp_path):
    """The ints have more digits than Python prints by default."""
    state = {"w": torch.arange(2000.0).reshape([1] * 63 + [2000]), "b": torch.ones([1] * 64), "i": -(10**5000)}
    with Repository.create(tmp_path / "repo") as repository:
        repository.save(state, run="r", step=0, metadata={"i": 10**5000})
    (line,) = read(tmp_path / "repo")
    assert [line["leaves"][f"/'{name}'"][2] for name in "wb"] == [[1] * 63 + [2000], [1] * 64]
    assert line["leaves"]["/'i'"] == ["int", "-1" + "0" * 5000]


@pytest.mark.parametrize("more", [0, 1])
def test_metadata_of_more_than_a_mebibyte_are_refused(tmp_path, more):
    world = forge.World()
    node = msgspec.msgpack.encode("x" * (2**20 - 5 + more))
    assert len(node) == 2**20 + more
    data = world.manifest(tree=7, save_id=b"\xaa" * 16)
    record = world.commit(data, write_id="0" * 32, metadata_node=msgspec.Raw(node))
    folder = plant(tmp_path, world)
    if more:
        with pytest.raises(reader.DamagedError, match="its metadata is too long"):
            snapshot(folder, "r", 0)
        with pytest.raises(FormatError, match="metadata of 1048577 bytes, expected at most 1048576"):
            _ = record.metadata
    else:
        assert len(snapshot(folder, "r", 0).metadata) == len(record.metadata) == 2**20 - 5


def test_a_manifest_may_have_other_chunk_bytes_than_the_config(tmp_path):
    """A config that a repair has reconstructed has those of most manifests."""
    with Repository.create(tmp_path / "repo", chunk_bytes=4096) as repository:
        repository.save({"w": torch.arange(9000.0)}, run="r", step=0)
    wanted = read(tmp_path / "repo")
    rewrite_config(tmp_path / "repo", b"\xabchunk_bytes\xcd\x10\x00", b"\xabchunk_bytes\xcd\x20\x00")
    assert read(tmp_path / "repo") == wanted
    with Repository.open(tmp_path / "repo") as repository:
        assert torch.equal(repository.restore("r@0")["w"], torch.arange(9000.0))
        assert repository.check("restore").ok


def rewrite_config(folder, old, new):
    """Replace bytes of the config by others, and sign it again."""
    config = folder / "config"
    payload = config.read_bytes()[24:].replace(old, new)
    begin = b"SNAP\1\1\0\0" + len(payload).to_bytes(8, "little")
    config.write_bytes(begin + xxhash.xxh3_64_digest(begin + payload)[::-1] + payload)


def test_an_unknown_feature_is_refused(tmp_path):
    shutil.copytree(V1, tmp_path / "repo")
    rewrite_config(tmp_path / "repo", b"\xa8features\x90", b"\xa8features\x91\xa5later")
    with pytest.raises(reader.UnknownError, match="later"):
        reader.Repository(tmp_path / "repo")
