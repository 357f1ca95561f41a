"""Sparse, jagged and quantized tensors of torch come back as torch.save brings them back, in place and as new ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kit import rank_saves
from kit.repositories import created, opened
from kit.states import again, through_torch
from snapstore import InvalidInputError, SnapshotManager, UnsupportedLeafError
from snapstore.state.fill.plan import RestorePlan
from snapstore.state.tree.weights_only import to_weights_only
from snapstore.state.values.tensors import StoredPart
from snapstore.state.values.torch_layouts import LAYOUTS, layout_of
from snapstore.state.walk.flatten import flatten, flatten_and_learn
from snapstore.state.walk.learner import DifferentStructureError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated"),  # of torch: quantized tensors
    pytest.mark.filterwarnings("ignore:Sparse"),  # of torch: they are in beta state, and not checked
]


ZEROS = torch.zeros(4, dtype=torch.int64)


def quantized(seed: int, dtype: Any = torch.qint8, zero_points: Any = ZEROS) -> Any:
    torch.manual_seed(seed)
    return torch.quantize_per_channel(torch.randn(4, 3), torch.rand(4) + 0.1, zero_points, 0, dtype)


def jagged(*lengths: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nested.nested_tensor([torch.randn(n, 3) for n in lengths], layout=torch.jagged)


def dense(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(4, 4) * (torch.rand(4, 4) > 0.5)


def unordered(seed: int, axis: int, block: int = 0) -> Any:
    """Return a tensor as SciPy and products make them: its indices in a row are not in order, or there twice."""
    make = [torch.sparse_bsr_tensor if block else torch.sparse_csr_tensor, torch.sparse_csc_tensor][axis]
    values = torch.arange(4.0).reshape(4, *[1] * (2 if block else 0)).expand(4, *[block] * (2 if block else 0)) + seed
    return make(torch.tensor([0, 2, 4]), torch.tensor([1, 0, 1, 1]), values, (2 * (block or 1), 2 * (block or 1)))


INDICES = torch.tensor([[0, 0, 1], [1, 1, 0]])
#: name -> a tensor of a seed; all seeds of a name have one shape.
MAKE: dict[str, Any] = {
    "coo": lambda seed: torch.sparse_coo_tensor(INDICES, torch.arange(3.0) + seed, (4, 4)),
    "coalesced": lambda seed: dense(seed).to_sparse(),
    "hybrid": lambda seed: dense(seed).to_sparse(1),
    "csr": lambda seed: dense(seed).to_sparse_csr(),
    "csc": lambda seed: dense(seed).to(torch.bfloat16).to_sparse_csc(),
    "bsr": lambda seed: dense(seed).to_sparse_bsr((2, 2)),
    "bsc": lambda seed: dense(seed).to_sparse_bsc((2, 2)),
    "unordered coo": lambda seed: torch.sparse_coo_tensor(INDICES, torch.arange(3.0) + seed, (4, 4))._coalesced_(True),
    "unordered csr": lambda seed: unordered(seed, 0),
    "unordered csc": lambda seed: unordered(seed, 1),
    "unordered bsr": lambda seed: unordered(seed, 0, 2),
    "unordered batches": lambda seed: torch.sparse_csr_tensor(
        torch.tensor([[0, 2, 3], [0, 0, 3]]),
        torch.tensor([[1, 0, 2], [2, 1, 1]]),
        torch.arange(6.0).view(2, 3) + seed,
        (2, 2, 3),
    ),
    "empty": lambda seed: (dense(seed) * (seed % 2)).to_sparse(),
    "parameter": lambda seed: torch.nn.Parameter(dense(seed).to_sparse()),
    "grad": lambda seed: dense(seed).to_sparse_csr().requires_grad_(),
    "per tensor": lambda seed: torch.quantize_per_tensor(dense(seed), 0.1 + seed, 3, torch.quint8),
    "per channel": quantized,
    "qint32": lambda seed: quantized(seed, torch.qint32),
    "float qparams": lambda seed: quantized(seed, torch.quint8, torch.tensor([0.5, 1.5, 0.25, 3.0])),
    "jagged": lambda seed: jagged(2, 4, 1, seed=seed),
    "transposed": lambda seed: jagged(2, 4, 1, seed=seed).transpose(1, 2),
    "jagged parameter": lambda seed: torch.nn.Parameter(jagged(2, 4, 1, seed=seed)),
    "narrowed": lambda seed: torch.nested.nested_tensor_from_jagged(
        torch.arange(21.0).view(7, 3) * seed, torch.tensor([0, 3, 7]), torch.tensor([2, 2])
    ),
}  # fmt: skip


def parts_of(value: Any) -> Any:
    """Return all that there is to know of a tensor, as text and dense tensors."""
    grad = value.requires_grad, isinstance(value, torch.nn.Parameter)
    form = type(value), value.dtype, value.layout, re.sub(r"j\d+", "j", str(tuple(value.shape))), *grad
    value = value.detach()
    if value.layout is torch.jagged:
        return form, [value._ragged_idx], list(value.unbind())
    if value.is_quantized and value.qscheme() is torch.per_tensor_affine:
        return form, [value.q_scale(), value.q_zero_point()], [value.int_repr()]
    if value.is_quantized:
        of_channels = [value.q_per_channel_scales(), value.q_per_channel_zero_points()]
        return form, [value.q_per_channel_axis(), value.qscheme()], [value.int_repr(), *of_channels]
    if value.layout is torch.sparse_coo:
        return form, [value.is_coalesced()], [value._indices(), value._values()]
    names = [name for name in dir(value) if name in ("crow_indices", "ccol_indices", "col_indices", "row_indices")]
    found = [getattr(value, name)() for name in names if "indices" in name and name[:3] in _AXES[str(value.layout)]]
    return form, [], [*found, value.values()]


_AXES = {
    f"torch.sparse_{name}": axes
    for name, axes in {
        "csr": ("cro", "col"),
        "csc": ("cco", "row"),
        "bsr": ("cro", "col"),
        "bsc": ("cco", "row"),
    }.items()
}


def alike(one: Any, other: Any) -> None:
    here, there = parts_of(one), parts_of(other)
    assert here[:2] == there[:2]
    for tensor, expected in zip(here[2], there[2], strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


@pytest.fixture
def repository():
    with opened(created()) as found:
        yield found


def state(seed: int) -> dict[str, Any]:
    return {"m": {name: make(seed) for name, make in MAKE.items()}, "w": torch.ones(3) * seed}


@pytest.mark.parametrize("name", MAKE)
def test_it_comes_back_as_from_torch(name):
    value = MAKE[name](1)
    found = again({"v": value})["v"]
    alike(found, value)
    alike(through_torch({"v": value})["v"], found)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("seed", [1, 2], ids=["fresh", "rollback"])
def test_a_tensor_of_the_target_stays_the_object(repository, name, seed):
    repository.save({"a": {"v": MAKE[name](1)}}, run="a", step=0)
    target = {"a": {"v": MAKE[name](seed)}}
    before = target["a"]["v"]
    repository.restore_into("a@0", target)
    assert target["a"]["v"] is before
    alike(before, MAKE[name](1))
    repository.save(target, run="a", step=1)
    alike(repository.restore("a@1")["a"]["v"], MAKE[name](1))


@pytest.mark.parametrize("make", [lambda one: one.t(), lambda one: one.contiguous()], ids=["columns", "rows"])
def test_a_quantized_tensor_has_the_stored_layout(repository, make):
    value = make(MAKE["per tensor"](1))
    repository.save({"v": value}, run="a", step=0)
    found, expected = repository.restore("a@0")["v"], through_torch(value)
    alike(found, expected)
    assert found.stride() == expected.stride() == value.stride()


class Graph(torch.nn.Module):
    """A module with sparse buffers and a quantized weight, whose load_state_dict is torch's own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(dense(seed))
        for name in ("coo", "coalesced", "hybrid", "per tensor", "per channel"):
            self.register_buffer(name, MAKE[name](seed))


def csr(rows: Any, columns: Any, *values: float) -> Any:
    return torch.sparse_csr_tensor(rows, columns, torch.tensor(values), (2, 2))


def pair(kind: str, *, alike: bool) -> tuple[Any, Any]:
    """Return two tensors, and two over one memory: as many values, of which the first two have others in each."""
    rows, columns, other = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([1, 0])
    if kind == "csr":
        saved = csr(rows, columns, 1.0, 2.0), csr(rows, columns if alike else other, 3.0, 4.0)
        return saved, (csr(rows, columns.clone(), 0.0, 0.0), csr(rows, columns, 0.0, 0.0))
    if kind == "jagged":
        first, target = jagged(1, 4), jagged(3, 2)
        saved = first, first * 2 if alike else jagged(2, 3)
        return saved, (target, target * 2)
    whole = torch.quantize_per_tensor(torch.full((6,), 7.0) if alike else torch.arange(6.0), 1.0, 0, torch.qint8)
    target = torch.quantize_per_tensor(torch.zeros(6), 1.0, 0, torch.qint8)
    return (whole[:3], whole[3:]), (target[:3], target[2:5])


@pytest.mark.parametrize("kind", ["csr", "jagged", "quantized"])
def test_tensors_of_the_target_that_share_memory_get_only_equal_values(repository, kind):
    saved, target = pair(kind, alike=True)
    repository.save(dict(zip("ab", saved, strict=True)), run="x", step=1)
    repository.restore_into("x@1", dict(zip("ab", target, strict=True)))
    alike(saved[0], target[0])
    alike(saved[1], target[1])
    saved, target = pair(kind, alike=False)
    if kind == "csr":  # both have the indices of the first
        target = target[1], csr(target[1].crow_indices(), target[1].col_indices(), 0.0, 0.0)
    repository.save(dict(zip("ab", saved, strict=True)), run="x", step=2)
    with pytest.raises(InvalidInputError, match=r"a: shares memory \((values|offsets|col_indices)\) with another"):
        repository.restore_into("x@2", dict(zip("ab", target, strict=True)))


def test_a_module_loads_them_as_it_does_from_torch(repository):
    repository.save({"model": Graph(1)}, run="a", step=0)
    model, expected = Graph(2), Graph(2)
    buffers = dict(model.named_buffers())
    repository.restore_into("a@0", {"model": model})
    expected.load_state_dict(through_torch(Graph(1).state_dict()))
    for name, value in expected.state_dict().items():
        if value.layout is torch.strided and not value.is_quantized:
            assert torch.equal(model.state_dict()[name], value)
        else:
            assert dict(model.named_buffers())[name] is buffers[name]
            alike(model.state_dict()[name], value)


def test_a_dynamically_quantized_module_computes_the_same(repository):
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        return torch.ao.quantization.quantize_dynamic(layers, {torch.nn.Linear}, dtype=torch.qint8)

    model, target, expected, inputs = make(0), make(1), make(2), torch.randn(2, 8)
    repository.save({"model": model}, run="a", step=0)
    repository.restore_into("a@0", {"model": target})
    expected.load_state_dict(through_torch(model.state_dict()))
    assert torch.equal(target(inputs), model(inputs))
    assert torch.equal(target(inputs), expected(inputs))


def test_jagged_tensors_of_one_ragged_size_keep_it():
    one = jagged(2, 4)
    state = {"one": one, "two": one * 2}
    for found in (through_torch(state), again(state)):
        assert torch.equal((found["one"] + found["two"]).values(), (one * 3).values())


def test_an_expanded_size_is_computed_again():
    """The longest row is kept with a tensor, and would be that of the old values."""
    target = jagged(4, 2)
    assert target._max_seqlen == 4
    again({"v": jagged(1, 5)}, into={"v": target})
    assert target._max_seqlen == 5


@pytest.mark.parametrize("name", MAKE)
def test_another_kind_shape_or_dtype_does_not_fit(name):
    saved = {"v": MAKE[name](1), "w": torch.zeros(1)}
    value = MAKE[name](2)
    others = [torch.zeros(4, 4), MAKE["coo" if value.layout is torch.sparse_csr else "csr"](2)]
    if not value.is_quantized and not value.is_nested:
        others += [value.detach().to(torch.float64), torch.zeros(3, 4).to_sparse(layout=value.layout)
                   if name not in ("bsr", "unordered bsr", "bsc", "hybrid") else torch.zeros(4, 4)]  # fmt: skip
    for other in others:
        with pytest.raises(InvalidInputError, match=r"v: (type|shape|dtype): expected"):
            again(saved, into={"v": other, "w": torch.zeros(1)})
    with pytest.raises(InvalidInputError, match=r"v: type: expected Tensor as in the target, got torch\."):
        again(saved, into={"v": torch.zeros(4, 4), "w": torch.zeros(1)})


def test_what_belongs_to_the_form_of_the_target_must_be_the_same():
    with pytest.raises(InvalidInputError, match=r"v: scheme: expected per_tensor_affine as in the target, got per_ch"):
        again({"v": quantized(1)}, into={"v": torch.quantize_per_tensor(torch.ones(4, 3), 1.0, 0, torch.qint8)})
    with pytest.raises(InvalidInputError, match=r"v: sizes: expected .* as in the target, got .*5"):
        again({"v": jagged(2, 3)}, into={"v": jagged(1, 3)})


def test_a_manager_recognises_them_and_notices_each_change(repository):
    with SnapshotManager(repository, run="a", async_save=True) as manager:
        for step in range(4):
            manager.save(step, state(step))
    for step in range(4):
        found, expected = repository.restore(f"a@{step}"), state(step)
        for name in MAKE:
            alike(found["m"][name], expected["m"][name])


def known(*names: str) -> tuple[Any, Any]:
    found = {"m": {name: MAKE[name](1) for name in names}, "w": torch.ones(3)}
    _, learnt = flatten_and_learn(found)
    assert learnt is not None
    return found, learnt[0]


def test_a_known_state_is_recognised():
    """Else each save walks the whole state while training waits."""
    found, structure = known(*(name for name in MAKE if name != "empty"))
    expected = flatten(found)
    match = structure.match(found)
    match.confirm()
    assert match.trees == {part.name: part.tree for part in expected}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("coo", lambda value: value.coalesce()),
        ("coalesced", lambda value: dense(3).to_sparse()),
        ("csr", lambda value: dense(1).to_sparse_csc()),
        ("csr", lambda value: value.to_dense()),
        ("grad", lambda value: value.detach()),
        ("per tensor", lambda value: torch.quantize_per_tensor(dense(1), 0.2, 3, torch.quint8)),
        ("per channel", lambda value: quantized(1, torch.quint8)),
        ("jagged", lambda value: jagged(2, 4)),
    ],
)
def test_a_changed_one_is_not_taken_for_the_known_one(name, change):
    found, structure = known(name)
    structure.match(found)
    found["m"][name] = change(found["m"][name])
    with pytest.raises(DifferentStructureError):
        structure.match(found)


def test_ranks_store_them_as_one_process_does(repository):
    snapshot, _ = rank_saves.save(repository, [lambda: state(1)] * 2, 0)
    found = repository.restore(snapshot.ref)
    for name, make in MAKE.items():
        alike(found["m"][name], make(1))


def test_the_file_that_restore_writes_has_them():
    """torch.load(weights_only=True) reads all of them, so they stay as they are."""
    written, changed = to_weights_only(again(state(1)))
    assert not changed
    for name, value in through_torch(written)["m"].items():
        alike(value, MAKE[name](1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.ones(2, 2).to_mkldnn(), "torch._mkldnn tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.strided), r"list\(tensor.unbind\(\)\)"),
    ],
    ids=["mkldnn", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_layouts_are_refused(make, text):
    with pytest.raises(UnsupportedLeafError, match=rf"v: .*{text}"):
        flatten({"v": make()})


def test_a_freed_storage_is_refused_and_stays_as_it_is():
    value = quantized(1)
    value.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeafError, match="v: tensor whose storage was freed"):
        flatten({"v": value})
    assert value.untyped_storage().nbytes() == 0


def test_an_iterator_takes_none(repository):
    with pytest.raises(UnsupportedLeafError, match=r"torch.sparse_coo tensor has no stored form: save it in a nested"):
        repository.save(iter([("v", MAKE["coo"](1))]), run="a", step=0)


# --- hostile snapshots ---


def forged(name: str, **changes: Any) -> Any:
    """Return what a restore makes of a tensor with other tensors in it, or another context or shape."""
    (_, part) = flatten({"a": {"v": MAKE[name](1)}})
    keys, nodes = part.tree[2][0][4][1:]
    value = dict(zip(keys, nodes, strict=True))
    specs, arrays = list(part.specs), [held.value for held in part.arrays]
    for key, change in changes.items():
        if key in value and isinstance(change, torch.Tensor):
            (_, other) = flatten({"a": [change]})
            value[key] = ["tensor", len(specs), False]
            specs += other.specs
            arrays.append(change)
        elif key == "shape":
            value["__shape__"] = ["size", change]
        else:
            context = value["__context__"]
            context[2][context[1].index(key)] = change
    tree = ["object", "dataclass", "torch", layout_of(MAKE[name](1)).__qualname__, ["dict", keys, list(value.values())]]
    plan = RestorePlan([StoredPart("", tree, specs)])
    for want in plan.wants:
        plan.buffers.buffer(want)[:] = arrays[want.entry].contiguous().view(-1).view(torch.uint8).numpy()
        plan.buffers.complete(want)
    return plan.finish()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("coo", {"indices": torch.full((2, 3), 9)}),
        ("coo", {"is_coalesced": 1}),
        ("coo", {"dtype": ["dtype", "float64"]}),
        ("coo", {"shape": [1, 1]}),
        ("coo", {"shape": [-1, 4]}),
        ("csr", {"col_indices": torch.full((dense(1).count_nonzero(),), 77)}),
        ("csr", {"crow_indices": torch.tensor([0, 1, 2, 3, 99])}),
        ("csr", {"crow_indices": torch.tensor([0, 2**62, -(2**63), -(2**62), 0])}),
        ("csr", {"crow_indices": torch.tensor([0, 3, 1, 2, dense(1).count_nonzero()])}),
        ("csr", {"crow_indices": torch.tensor([0, dense(1).count_nonzero()])}),
        ("csr", {"col_indices": torch.full((dense(1).count_nonzero(),), -1)}),
        ("bsr", {"col_indices": torch.tensor([0, 1, 0, 2])}),
        ("unordered batches", {"col_indices": torch.tensor([[1, 0, 2], [2, 1, 3]])}),
        ("unordered csc", {"row_indices": torch.tensor([1, 0, 2, 1])}),
        ("csr", {"requires_grad": "yes"}),
        ("per channel", {"axis": 5}),
        ("per channel", {"axis": -1}),
        ("per channel", {"scales": torch.ones(9, dtype=torch.float64)}),
        ("per channel", {"values": torch.ones(2, 2, dtype=torch.int8)}),
        ("per channel", {"scheme": "per_tensor_affine"}),
        ("per channel", {"dtype": ["dtype", "float32"]}),
        ("per tensor", {"scale": "a"}),
        ("jagged", {"offsets": torch.tensor([0, 2, 6, 700])}),
        ("jagged", {"offsets": torch.tensor([0, 6, 2, 7])}),
        ("jagged", {"offsets": torch.tensor([-5, 2, 6, 7])}),
        ("jagged", {"offsets": torch.tensor([[0, 7]])}),
        ("jagged", {"offsets": torch.zeros(0, dtype=torch.int64)}),
        ("jagged", {"offsets": torch.tensor([0.0, 2.0, 6.0, 7.0])}),
        ("jagged", {"ragged": 9}),
        ("jagged", {"shape": [9, -1, 3]}),
        ("narrowed", {"lengths": torch.tensor([2, 99])}),
        ("narrowed", {"lengths": torch.tensor([2, -1])}),
        ("narrowed", {"lengths": torch.tensor([2])}),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(name, changes):
    alike(forged(name), MAKE[name](1))
    with pytest.raises(InvalidInputError, match=r"cannot make a torch\..* of what is stored"):
        forged(name, **changes)


def test_each_kind_has_a_name_that_no_class_has():
    assert set(LAYOUTS) == {*(f"sparse_{name}" for name in ("coo", "csr", "csc", "bsr", "bsc")), "quantized", "jagged"}
    assert all((kind.__module__, kind.__qualname__) == ("torch", name) for name, kind in LAYOUTS.items())
