"""A state of any nesting, dtype, shape, chunk size and history of changes comes back to the bit."""

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.samples import examples
from snapstore import Repository, SaveOptions
from snapstore.engine.cpu import CpuEngine
from snapstore.storage.memory import MemoryStore

# torch warns once that complex32 is experimental, where one is first cloned
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.complex32, torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16,
    torch.uint32, torch.int32, torch.uint64, torch.int64,
]  # fmt: skip
NUMPY = ["<f4", ">f8", "<f2", "|b1", "<i8", ">u2", "<c16", "<U3", "|S5", "<M8[s]"]


def raw(seed, size, kind):
    """Return bytes of a kind: random bits, few different values, or mostly zeros."""
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return rng.integers(0, 256, size, np.uint8)
    if kind == "few":
        return rng.integers(0, 3, size).astype(np.uint8)
    out = np.zeros(size, np.uint8)
    out[:: 1 + seed % 97] = seed % 256
    return out


def tensor(dtype, shape, seed, kind, grad):
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.from_numpy(raw(seed, count, kind) % 2 == 1).reshape(shape)
    if not count:
        return torch.zeros(0, dtype=torch.uint8).view(dtype).reshape(shape)
    made = torch.from_numpy(raw(seed, count * dtype.itemsize, kind)).view(dtype).reshape(shape)
    return made.requires_grad_() if grad and (dtype.is_floating_point or dtype.is_complex) else made


def array(dtype, shape, seed, kind):
    dtype = np.dtype(dtype)
    data = raw(seed, math.prod(shape) * dtype.itemsize, kind)
    if dtype.kind == "b":
        return (data % 2 == 1).reshape(shape)
    if dtype.kind == "U":
        return np.array([chr(65 + b % 26) * (b % 4) for b in data[: math.prod(shape)]], dtype).reshape(shape)
    return data.view(dtype).reshape(shape)


kinds = st.sampled_from(["noise", "few", "sparse"])
seeds = st.integers(0, 2**20)
shapes = st.sampled_from([(), (0,), (1,), (7,), (3, 0, 2), (513,), (31, 33), (2, 1, 1025), (4099,), (64, 64)])
tensors = st.builds(tensor, st.sampled_from(DTYPES), shapes, seeds, kinds, st.booleans())
arrays = st.builds(array, st.sampled_from(NUMPY), shapes, seeds, kinds)
plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=6000)
    | st.complex_numbers() | st.frozensets(st.integers(), max_size=3)
)  # fmt: skip
keys = st.text("abc.é", min_size=1, max_size=4) | st.integers(-5, 5) | st.none()
states = st.recursive(
    tensors | tensors | arrays | plain,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=4)
        | st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=10,
)
roots = st.dictionaries(st.text("model", min_size=1, max_size=5), states, max_size=5)


def same(a, b, path="state"):
    """Check that two values are equal to the type and the bit."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad), path
        if a.numel():
            x, y = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (a, b))
            assert torch.equal(x, y), path
    elif isinstance(a, np.ndarray):
        assert (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes()), path
    elif isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b)), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}.{i}")
    elif isinstance(a, frozenset):
        assert a == b, path
    else:
        assert repr(a) == repr(b), path


def touched(value, rng):
    """Return the same state with some elements of some arrays changed."""
    if isinstance(value, dict):
        return type(value)((key, touched(child, rng)) for key, child in value.items())
    if isinstance(value, list | tuple):
        return type(value)(touched(child, rng) for child in value)
    if isinstance(value, torch.Tensor) and value.numel() and rng.random() < 0.7:
        new = value.detach().clone()
        flat = new.reshape(-1).view(torch.uint8)
        flat[rng.integers(0, flat.numel(), 1 + flat.numel() // 50)] ^= 1
        return new.requires_grad_(value.requires_grad)
    if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iufc":
        new = value.copy()
        new.reshape(-1)[rng.integers(0, new.size)] = 1
        return new
    return value


chunk_sizes = st.sampled_from([64, 80, 256, 1024, 4096])
quick = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
OPTIONS = SaveOptions(pack_bytes=16384, threads=2)


@quick
@given(st.lists(roots, min_size=1, max_size=2), chunk_sizes, st.lists(st.integers(0, 3), min_size=1, max_size=5), seeds)
def test_any_history_restores_to_the_bit(bases, chunk_bytes, changes, seed):
    """Save states that change slowly, and sometimes completely; every step restores as it was saved."""
    rng = np.random.default_rng(seed)
    store = MemoryStore()
    history = [bases[0]]
    with Repository.create(store, chunk_bytes=chunk_bytes, options=OPTIONS) as repo:
        for change in changes:
            before = history[-1]
            history.append(bases[-1] if change == 0 else before if change == 1 else touched(before, rng))
        for step, state in enumerate(history):
            repo.save(state, run="r", step=step)
        for step, state in enumerate(history):
            same(repo.restore(f"r@{step}"), state)
    with Repository.open(store, options=OPTIONS) as repo:
        assert repo.check("restore").ok
        same(repo.restore("r@latest"), history[-1])


@settings(quick, max_examples=examples(15))
@given(roots, chunk_sizes)
def test_a_local_repository(tmp_path_factory, state, chunk_bytes):
    root = tmp_path_factory.mktemp("repo")
    with Repository.create(root, chunk_bytes=chunk_bytes, options=OPTIONS) as repo:
        repo.save(state, run="r", step=0)
        changed = touched(state, np.random.default_rng(0))
        repo.save(changed, run="r", step=1)
    with Repository.open(root, options=OPTIONS) as repo:
        same(repo.restore("r@0"), state)
        same(repo.restore("r@1"), changed)


def emptied(value):
    """Return the same structure with zeros in its arrays."""
    if isinstance(value, dict):
        return type(value)((key, emptied(child)) for key, child in value.items())
    if isinstance(value, list | tuple):
        return type(value)(emptied(child) for child in value)
    if isinstance(value, torch.Tensor):
        if not value.numel():
            return value.detach().clone().requires_grad_(value.requires_grad)
        new = value.detach().clone()
        new.reshape(-1).view(torch.uint8).zero_()
        return new.requires_grad_(value.requires_grad)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else value


@quick
@given(roots, chunk_sizes)
def test_restore_into(state, chunk_bytes):
    """Tensors are filled in place."""
    with Repository.create(MemoryStore(), chunk_bytes=chunk_bytes, options=OPTIONS) as repo:
        repo.save(state, run="r", step=0)
        target = emptied(state)
        flat = [t for t in torch.utils._pytree.tree_leaves(target) if isinstance(t, torch.Tensor)]
        places = [t.data_ptr() for t in flat]
        assert repo.restore_into("r@0", target).ref == "r@0"
        same(target, state)
        assert [t.data_ptr() for t in flat] == places


# --- what a restore reads, what a save stores ---


class Counting(MemoryStore):
    """Counts the bytes that are read of packs, and notes which packs are read."""

    def __init__(self):
        super().__init__()
        self.read_bytes = 0
        self.packs = set()

    def get_range(self, key, offset, length, into=None):
        if key.startswith("packs/"):
            self.read_bytes += length
            self.packs.add(key)
        return super().get_range(key, offset, length, into)


def floats(seed, count=40_000):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32))


@pytest.fixture
def repo():
    with Repository.create(Counting(), chunk_bytes=4096, options=SaveOptions(threads=2)) as made:
        yield made


def counted(repo, act):
    repo.store.read_bytes, repo.store.packs = 0, set()
    return act(), repo.store.read_bytes, set(repo.store.packs)


def test_keys_read_only_what_they_need(repo):
    state = {"model": {"a": floats(1), "b": floats(2)}, "optimizer": {"m": floats(3)}, "x": 5}
    repo.save(state, run="r", step=0)
    whole, all_bytes, all_packs = counted(repo, lambda: repo.restore("r@0"))
    same(whole, state)
    model, model_bytes, model_packs = counted(repo, lambda: repo.restore("r@0", keys="model.*"))
    same(model, {"model": state["model"]})
    assert model_packs < all_packs
    assert len(model_packs) == 1
    assert model_bytes == pytest.approx(all_bytes * 2 / 3, rel=0.02)
    one, one_bytes, _ = counted(repo, lambda: repo.restore("r@0", keys=["model.b"]))
    same(one, {"model": {"b": state["model"]["b"]}})
    assert one_bytes == pytest.approx(all_bytes / 3, rel=0.02)
    nothing, no_bytes, no_packs = counted(repo, lambda: repo.restore("r@0", keys="x"))
    assert (nothing, no_bytes, no_packs) == ({"x": 5}, 0, set())


def test_tied_tensors_of_several_parts_are_read_once_whatever_keys_select(repo):
    weight = floats(1)
    repo.save({"a": {"w": weight, "v": weight}, "b": {"w": weight, "n": floats(2)}}, run="r", step=0)
    _, once, _ = counted(repo, lambda: repo.restore("r@0", keys="a.w"))
    for keys in (["b.w"], ["a.v"], ["a.v", "b.w"], ["a", "b.w"]):
        restored, read, _ = counted(repo, lambda keys=keys: repo.restore("r@0", keys=keys))
        assert read == pytest.approx(once, rel=0.02)
        arrays = [child for part in restored.values() for child in part.values()]
        assert len({array.data_ptr() for array in arrays}) == 1
        assert len(dict(repo.named_tensors("r@0", keys=keys))) == len(arrays)
        for array in [*arrays, *dict(repo.named_tensors("r@0", keys=keys)).values()]:
            same(array, weight)


def test_keys_into_fill_only_what_they_name(repo):
    state = {"model": {"a": floats(1), "b": floats(2)}, "optimizer": {"m": floats(3)}}
    repo.save(state, run="r", step=0)
    target = emptied(state)
    repo.restore_into("r@0", target, keys="*.a")
    same(target, {**emptied(state), "model": {"a": state["model"]["a"], "b": torch.zeros(40_000)}})


def test_an_unchanged_state_stores_no_chunks(repo):
    state = {"model": {"a": floats(1)}}
    first = repo.save(state, run="r", step=0)
    again = repo.save(state, run="r", step=1)
    assert (first.new_chunks, again.new_chunks) == (first.chunks, 0)
    assert again.stored_bytes < 10_000


def test_renamed_and_repeated_tensors_are_stored_once(repo):
    a, b = floats(1), floats(2)
    first = repo.save({"model": {"a": a, "b": b, "copy": a.clone()}}, run="r", step=0)
    assert first.new_chunks == first.chunks * 2 // 3
    renamed = repo.save({"net": {"x": b, "y": [a], "z": a.reshape(200, 200)}}, run="r", step=1)
    assert renamed.new_chunks == 0
    same(repo.restore("r@1"), {"net": {"x": b, "y": [a], "z": a.reshape(200, 200)}})


def test_another_dtype_or_shape_is_stored_full(repo):
    a = floats(1)
    b = a * 1.00001
    repo.save({"m": {"w": a}}, run="r", step=0)
    assert repo.save({"m": {"w": b}}, run="r", step=1).depth == 1
    for step, other in enumerate([b.reshape(100, 400) * 1.00001, b.double(), b.bfloat16(), b[:-1] * 1.00001], 2):
        saved = repo.save({"m": {"w": other}}, run="r", step=step)
        assert saved.depth == 0
        assert saved.new_chunks == saved.chunks
        same(repo.restore(f"r@{step}"), {"m": {"w": other}})


def test_a_reinterpreted_tensor_is_the_same_bytes_and_a_base(repo):
    """Dedup by content works across dtypes, and so do delta chains: their blobs then have different planes."""
    a = floats(1)
    repo.save({"m": {"w": a}}, run="r", step=0)
    assert repo.save({"m": {"w": a.view(torch.int16)}}, run="r", step=1).new_chunks == 0
    changed = a.view(torch.int16).clone()
    changed[::64] += 1
    saved = repo.save({"m": {"w": changed}}, run="r", step=2)
    assert saved.depth == 1
    again = changed.view(torch.float64)
    repo.save({"m": {"w": again}}, run="r", step=3)
    again = again.clone()
    again[5] = 0
    assert repo.save({"m": {"w": again}}, run="r", step=4).depth == 2
    same(repo.restore("r@4"), {"m": {"w": again}})
    assert repo.check("restore").ok


def test_tensors_of_64_dimensions(repo):
    """NumPy and torch's copy have no more, and the bytes of an element are one dimension more in a box."""
    small = torch.arange(12.0).reshape(3, *(1,) * 62, 4)
    state = {"small": small, "array": small.numpy() + 1, "large": floats(1).reshape(*(1,) * 62, 200, 200)}
    repo.save(state, run="r", step=0)
    same(repo.restore("r@0"), state)
    target = {"small": torch.zeros_like(small), "array": np.zeros_like(small), "large": torch.zeros((200, 200))}
    target["large"] = target["large"].reshape(state["large"].shape)
    repo.restore_into("r@0", target)
    same(target, state)
    for name, handle in repo.tensors("r@0").items():
        same(handle.read(), state[name])
        same(handle[..., 1:4:2], state[name][..., 1:4:2])


def test_tensors_that_appear_and_disappear(repo):
    a, b = floats(1), floats(2)
    saves = [{"m": {"a": a}}, {"m": {"a": a, "b": b}, "o": {}}, {"m": {"b": b}, "o": {"s": a}}, {}, {"m": {"a": a}}]
    new = [repo.save(state, run="r", step=step).new_chunks for step, state in enumerate(saves)]
    assert new == [40, 40, 0, 0, 40], "only the parent is a base, and it holds nothing at step 3"
    for step, state in enumerate(saves):
        same(repo.restore(f"r@{step}"), state)


def test_states_larger_than_any_batch(repo, monkeypatch):
    monkeypatch.setattr(CpuEngine, "batch_bytes", 10_000)
    monkeypatch.setattr(CpuEngine, "decode_bytes", 15_000)
    monkeypatch.setattr(CpuEngine, "batch_chunks", 7)
    state = {"m": {"a": floats(1), "b": floats(2, 999)}, "o": {"c": floats(3, 30_001), "d": torch.arange(5)}}
    for step in range(4):
        repo.save(state, run="r", step=step)
        state = {part: {name: t * 2 for name, t in named.items()} for part, named in state.items()}
    expected = {
        "m": {"a": floats(1) * 8, "b": floats(2, 999) * 8},
        "o": {"c": floats(3, 30_001) * 8, "d": torch.arange(5) * 8},
    }
    same(repo.restore("r@3"), expected)
    target = emptied(expected)
    repo.restore_into("r@3", target)
    same(target, expected)
