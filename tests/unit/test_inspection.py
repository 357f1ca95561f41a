"""diff gives exact numbers on known tensors, the figures of stats add up, and every result prints as one line."""

import math
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch

from kit.packs import scan
from snapstore import KeepLast, SaveHandle, SnapshotManager
from snapstore.format.blobs import blob, pack
from snapstore.inspect.diff import TensorDiff
from snapstore.inspect.stats import group_of
from snapstore.options import SaveOptions
from snapstore.repository import Repository
from snapstore.retention import utc
from snapstore.storage.memory import MemoryStore


@pytest.fixture
def repo():
    with Repository.create(MemoryStore(), chunk_bytes=1024, options=SaveOptions(threads=2)) as made:
        yield made


def diff(repo, a, b):
    step = len(repo.snapshots("r"))
    repo.save(a, run="r", step=step)
    repo.save(b, run="r", step=step + 1)
    return repo.diff(f"r@{step}", f"r@{step + 1}")


def by_path(found):
    assert len({t.path for t in found.tensors}) == len(found.tensors)
    return {t.path: t for t in found.tensors}


def test_same_changed_added_removed(repo):
    a = {"m": {"same": torch.arange(5000.0), "small": torch.ones(3), "old": torch.ones(2), "empty": torch.empty(0)}}
    b = {
        "m": {
            "same": torch.arange(5000.0),
            "small": torch.full((3,), 2.0),
            "new": torch.ones(2),
            "empty": torch.empty(0),
        }
    }
    found = diff(repo, a, b)
    assert by_path(found) == {
        "m.same": TensorDiff("m.same", "same"),
        "m.small": TensorDiff("m.small", "changed", 1.0, 1.0),
        "m.old": TensorDiff("m.old", "removed"),
        "m.empty": TensorDiff("m.empty", "same"),
        "m.new": TensorDiff("m.new", "added"),
    }
    assert (found.a.step, found.b.step, found.plain) == (0, 1, [])


NUMBERS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
    torch.float8_e5m2, torch.float8_e5m2fnuz, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32,
    torch.uint32, torch.int64, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("count", [8, 6000])
def test_numbers_of_every_dtype(repo, dtype, count):
    """Half of the elements go from 2 to 4: the change is sqrt(n/2)*2 over sqrt(n)*2."""
    a = torch.full((count,), 2.0, dtype=torch.float64)
    b = a.clone()
    b[::2] = 4.0
    (found,) = diff(repo, {"x": a.to(dtype)}, {"x": b.to(dtype)}).tensors
    assert (found.status, found.changed_share, found.note) == ("changed", 0.5, "")
    assert found.relative_l2 == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", ">f4", "i1", "u2", ">i4", "u8"])
@pytest.mark.parametrize("count", [8, 6000])
def test_numpy_arrays(repo, dtype, count):
    a = np.full(count, 2, dtype)
    b = a.copy()
    b[::4] = 0
    (found,) = diff(repo, {"x": a}, {"x": b}).tensors
    assert found.changed_share == 0.25
    assert found.relative_l2 == pytest.approx(0.5)


@pytest.mark.parametrize(("dtype", "bits"), [("<f4", 0x7FA00000), (">f4", 0x0000A07F)])
def test_a_signaling_nan_is_no_warning(repo, dtype, bits):
    """NumPy warns when it casts one, and a program may have made warnings errors."""
    a = np.full(8, bits, np.uint32).view(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = diff(repo, {"x": a}, {"x": np.zeros_like(a)}).tensors
    assert found.changed_share == 1.0
    assert math.isnan(found.relative_l2)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_complex(repo, dtype):
    a = torch.full((3000, 2), 1.0).to(
        {torch.complex32: torch.float16, torch.complex128: torch.float64}.get(dtype, torch.float32)
    )
    b = a.clone()
    b[:, 1] = 0
    (found,) = diff(repo, {"x": torch.view_as_complex(a)}, {"x": torch.view_as_complex(b)}).tensors
    assert found.changed_share == 1.0
    assert found.relative_l2 == pytest.approx(math.sqrt(0.5))
    (found,) = diff(repo, {"x": a.numpy().view("c16" if dtype == torch.complex128 else a.numpy().dtype)},
                    {"x": b.numpy().view("c16" if dtype == torch.complex128 else b.numpy().dtype)}).tensors  # fmt: skip
    assert found.relative_l2 == pytest.approx(math.sqrt(0.5))


def test_bool(repo):
    a = torch.ones(10_000, dtype=torch.bool)
    b = a.clone()
    b[:100] = False
    for x, y in ((a, b), (a.numpy(), b.numpy())):
        (found,) = diff(repo, {"x": x}, {"x": y}).tensors
        assert (found.changed_share, found.relative_l2) == (0.01, pytest.approx(0.1))


def test_nan_inf_zero_and_the_ends_of_float64(repo):
    zero, one = torch.zeros(10), torch.ones(10)
    signaling = np.full(10, 0x7F800001, np.uint32).view(np.float32)
    cases = [
        (zero, one, math.inf),
        (one, zero, 1.0),
        (zero, -zero, 0.0),
        (one, one / 0, math.nan),
        (one / 0, one, math.nan),
        (signaling, np.ones(10, np.float32), math.nan),  # NumPy warns if it casts one
    ]
    for scale in (1e-200, 1e200):  # their squares are zero or infinite
        cases.append((one.double() * scale, one.double() * scale * 1.5, 0.5))
    for a, b, expected in cases:
        (found,) = diff(repo, {"x": a}, {"x": b}).tensors
        assert found.status == "changed"
        assert found.changed_share == 1.0
        assert found.relative_l2 == pytest.approx(expected, nan_ok=True)


def test_a_nan_that_keeps_its_bits_is_the_same(repo):
    x = torch.full((5000,), math.nan)
    assert diff(repo, {"x": x}, {"x": x.clone()}).tensors == [TensorDiff("x", "same")]


def test_diffs_without_numbers(repo):
    words = np.array(["abc", "hello"] * 1000)  # 20 bytes an element: chunks of 1 KiB end within one
    other = words.copy()
    other[:500] = "x"
    times = np.arange(2000).astype("M8[s]")
    a = {"w": words, "t": times, "b": b"x" * 6000, "s": np.array([b"abc"] * 3000)}
    b = {"w": other, "t": times + np.timedelta64(1, "s"), "b": b"x" * 5999 + b"y", "s": np.array([b"abd"] * 3000)}
    found = by_path(diff(repo, a, b))
    assert {p: (t.changed_share, t.relative_l2) for p, t in found.items()} == {
        "w": (0.25, None), "t": (1.0, None), "b": (1 / 6000, None), "s": (1.0, None)
    }  # fmt: skip


def test_bits_and_odd_float_dtypes(repo):
    """Tensors of bits have no relative change; those of float8_e8m0fnu have one."""
    for dtype in (torch.bits8, torch.bits16, torch.float8_e8m0fnu):
        a, b = torch.zeros(8000, dtype=torch.uint8), torch.ones(8000, dtype=torch.uint8)
        (found,) = diff(repo, {"x": a.view(dtype)}, {"x": b.view(dtype)}).tensors
        assert found.changed_share == 1.0
        assert (found.relative_l2 is None) == (dtype is not torch.float8_e8m0fnu)


def test_another_shape_or_dtype_is_a_note(repo):
    found = by_path(
        diff(repo, {"x": torch.ones(2, 3), "y": torch.ones(4)}, {"x": torch.ones(6), "y": torch.ones(4).half()})
    )
    assert found["x"] == TensorDiff("x", "changed", note="float32 [2, 3] -> float32 [6]")
    assert found["y"] == TensorDiff("y", "changed", note="float32 [4] -> float16 [4]")


def test_paths_that_look_alike_are_kept_apart(repo):
    a = {"a.b": torch.ones(3), "a": {"b": torch.ones(4)}, 1.5: torch.zeros(5), "1.5": torch.zeros(6)}
    b = {"a.b": torch.ones(3), "a": {"b": torch.zeros(4)}, 1.5: torch.ones(5), "1.5": torch.zeros(6)}
    found = diff(repo, a, b)
    assert sorted((t.path, t.status) for t in found.tensors) == [
        ("1.5", "changed"),
        ("1.5", "same"),
        ("a.b", "changed"),
        ("a.b", "same"),
    ]


def test_plain_values(repo):
    a = {
        "lr": 0.1,
        "same": [1, (2, None)],
        "gone": "x",
        "deep": {"a": [1, 2]},
        "long": "x" * 500,
        "kind": 1,
        "none": {},
    }
    b = {
        "lr": 0.2,
        "same": [1, (2, None)],
        "deep": {"a": [1, 3, 4]},
        "long": "x" * 499,
        "kind": 1.0,
        "none": {},
        "new": True,
    }
    found = diff(repo, a, b)
    assert found.tensors == []
    long = next(change for change in found.plain if change[0] == "long")
    assert sorted(found.plain) == [
        ("deep.a.1", "2", "3"), ("deep.a.2", "", "4"), ("gone", "'x'", ""), ("kind", "1", "1.0"), long,
        ("lr", "0.1", "0.2"), ("new", "", "True"),
    ]  # fmt: skip
    assert all(len(text) <= 200 for _, before, after in found.plain for text in (before, after))


def test_plain_values_that_are_shown_alike_still_differ(repo):
    a = {"long": "x" * 500, "huge": 10**5000, "zero": 0.0, "set": {1, 2, 3}, "nan": math.nan}
    b = {"long": "x" * 499 + "y", "huge": 10**5000 + 1, "zero": -0.0, "set": {3, 2, 1}, "nan": math.nan}
    found = diff(repo, a, b)
    assert sorted(path for path, _, _ in found.plain) == ["huge", "long", "zero"]
    assert ("huge", "<int>", "<int>") in found.plain


def test_values_under_keys_of_one_text_are_compared_one_by_one(repo):
    found = diff(repo, {"k": {1.5: 1, "1.5": 2}}, {"k": {1.5: 5, "1.5": 2}})
    assert found.plain == [("k.1.5", "1", "5")]
    found = diff(repo, {2.0: 1, "2.0": 2}, {2.0: 1})
    assert found.plain == [("2.0", "2", "")]


def test_containers_of_another_type(repo):
    """Only types that differ are named, and not those of containers that come or go."""
    tensor = torch.ones(3)
    repo.save({"l": [1, [2]], "t": (tensor,), "d": {"a": 1}, "same": [1], "gone": [1]}, run="c", step=0)
    after = {"l": (1, [2]), "t": [tensor], "d": OrderedDict(a=1), "same": [1], "new": (2,), "empty": []}
    repo.save(after, run="c", step=1)
    assert sorted(repo.diff("c@0", "c@1").plain) == [
        ("d", "dict", "OrderedDict"),
        ("empty", "", "[]"),
        ("gone.0", "1", ""),
        ("l", "list", "tuple"),
        ("new.0", "", "2"),
        ("t", "tuple", "list"),
    ]
    assert repo.diff("c@1", "c@1").plain == []


def test_only_what_differs_is_read(repo):
    a = {"big": torch.arange(50_000.0), "x": torch.arange(2000.0) + 0.25}
    b = {"big": a["big"], "x": a["x"] + 1}
    repo.save(a, run="q", step=0)
    repo.save(b, run="q", step=1)
    read = []
    original = repo.store.get_range

    def counting(key, offset, length, into=None):
        read.append(length)
        return original(key, offset, length, into)

    repo.store.get_range = counting
    found = by_path(repo.diff("q@0", "q@1"))
    assert (found["big"].status, found["x"].changed_share) == ("same", 1.0)
    assert sum(read) < 30_000


def test_many_tensors_are_read_together(repo):
    """Each of many tensors keeps its own numbers; some are the same, gone, new, or have another shape."""
    a, b = {}, {}
    for i in range(60):
        a[f"{i}"] = torch.full((200 + 900 * (i % 3),), float(i))
        b[f"{i}"] = a[f"{i}"].clone()
        b[f"{i}"][:i] += 1
    a["gone"], b["new"] = torch.ones(2000), torch.ones(2000)
    b["7"] = b["7"].reshape(2, -1)
    read = []
    repo.store.get_range = lambda *given, original=repo.store.get_range: read.append(given[0]) or original(*given)
    found = by_path(diff(repo, a, b))
    assert len(read) <= 8
    for i in set(range(60)) - {0, 7}:
        assert found[f"{i}"].changed_share == i / (200 + 900 * (i % 3))
        assert found[f"{i}"].relative_l2 == pytest.approx(math.sqrt(i) / (i * math.sqrt(200 + 900 * (i % 3))))
    assert [found[name].status for name in ("0", "7", "gone", "new")] == ["same", "changed", "removed", "added"]


@pytest.mark.parametrize(
    ("path", "group"),
    [
        (["model", "layers.0.w"], "model"),
        (["optimizer", "state", 3, "exp_avg"], "optimizer.*.exp_avg"),
        (["optimizer", "param_groups", 0, "lr"], "optimizer.*.lr"),
        (["x"], "x"),
        ([], "(root)"),
    ],
)
def test_groups(path, group):
    assert group_of(path) == group


def test_stats_sum_up(repo):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    sizes = 0
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        sizes += repo.save({"model": model, "optimizer": optimizer, "k": step}, run="r", step=step).logical_bytes
    repo.forget_snapshots(["r@1"])
    stats = repo.stats()
    snapshots = repo.snapshots()
    infos = [*repo.store.list("packs/"), *repo.store.list("manifests/")]
    assert (stats.snapshots, stats.packs) == (3, len(list(repo.store.list("packs/"))))
    assert stats.stored_bytes == sum(info.size_bytes for info in infos)
    assert stats.logical_bytes == sum(s.logical_bytes for s in snapshots) == sizes * 3 // 4
    assert sum(group.logical_bytes for group in stats.groups.values()) == stats.logical_bytes
    assert set(stats.groups) == {"model", "optimizer.*.step", "optimizer.*.exp_avg", "optimizer.*.exp_avg_sq"}
    assert stats.chunks == sum(s.chunks for s in snapshots) == sum(stats.depths.values())
    assert 0 < stats.unique_chunks <= stats.chunks
    assert max(stats.depths) == max(s.depth for s in snapshots) > 0
    assert stats.ratio == stats.logical_bytes / stats.stored_bytes
    assert stats.unneeded_bytes == repo.gc(dry_run=True).deleted_bytes > 0
    assert 0 < stats.base_only_bytes < stats.stored_bytes
    planes_bytes = overhead = 0
    for info in repo.store.list("packs/"):
        listing = pack.read_listing(repo.store, info.key, info.size_bytes)
        planes_bytes += int(listing.entries["plane_bytes"].sum())
        data = memoryview(repo.store.get(info.key))
        headers = [header for _, header in scan(data, "x")]
        overhead += info.size_bytes - sum(header.payload_bytes for header in headers)
    assert sum(stats.codecs.values()) == planes_bytes
    packs = sum(info.size_bytes for info in repo.store.list("packs/"))
    assert packs == planes_bytes + overhead
    assert set(stats.codecs) <= {"raw", "zstd", "deflate"}


def test_every_blob_belongs_to_one_group(repo):
    repo.save({"a": {"w": torch.randn(5000)}, "b": {"w": torch.randn(3000)}}, run="r", step=0)
    stats = repo.stats()
    stored = {}
    for info in repo.store.list("packs/"):
        listing = pack.read_listing(repo.store, info.key, info.size_bytes)
        stored[listing.part] = int(listing.entries["length"].sum())
    assert {name: group.stored_bytes for name, group in stats.groups.items()} == stored
    assert stats.base_only_bytes == 0
    assert stats.depths == {0: stats.chunks}
    assert blob.HEADER.size == 80


def test_stats_of_nothing(repo):
    stats = repo.stats()
    assert (stats.snapshots, stats.ratio, stats.groups, stats.codecs, stats.depths) == (0, 0.0, {}, {}, {})


def test_objects_and_results_print_as_one_line(repo):
    """The repr of an object or result is short: a notebook or debugger shows no pages of snapshots or tensors."""
    for step in range(12):
        state = {str(i): torch.full((2000,), step + i) for i in range(12)} | {"plain": list(range(step, step + 50))}
        repo.save(state, run="r", step=step, metrics={f"m{i}": i for i in range(12)})
    first = repo.snapshot("r@0")
    assert repr(first) == (
        f"Snapshot('r@0', id='{first.id[:12]}', state='committed', created='{utc(first.created):%Y-%m-%d %H:%M:%S}Z', "
        "size='192.0kB', metrics='m0=0, m1=1, m2=2, m3=3, m4=4 and 7 more')"
    )
    results = [repo.stats(), repo.diff("r@0", "r@11"), repo.forget(KeepLast(11), run="r"), repo.gc(dry_run=True)]
    results += [repo.recode(), repo.compact()]
    for key in [info.key for info in repo.store.list("packs/")]:
        repo.store.delete([key])
    checked = repo.check("data")
    results += [checked, checked.problems[0], repo.repair()]
    with SnapshotManager(repo, run="r") as snapshots:
        assert repr(snapshots) == f"SnapshotManager({repo.url!r}, run='r')"
        handle = snapshots.save(12, {"n": 1})
        assert "(Snapshot('r@12'" in repr((handle, handle.result())[0])
        assert repr(SaveHandle(skipped=True)) == "SaveHandle('skipped')"
        assert repr(SaveHandle()) == "SaveHandle('running')"
    assert {type(result).__name__ for result in results} > {"CheckResult", "RepairResult", "Problem", "StatsResult"}
    for result in results:
        text = repr(result)
        assert text.startswith(type(result).__name__)
        assert len(text) < 600, text
        assert "\n" not in text
    assert "restorable=<0 items>" in repr(checked)
    assert f"problems=<{len(checked.problems)} items>" in repr(checked)
