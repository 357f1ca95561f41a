"""Every state that can be restored becomes a file that `torch.load(weights_only=True)` reads; no change is silent."""

import collections
import datetime
import enum
import fractions
import pathlib
import random
import types
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.states import DTYPES, again, bits, random_tensor, same, through_torch
from snapstore.errors import UnsupportedLeafError
from snapstore.state.tree import weights_only
from snapstore.state.tree.decode import READERS
from snapstore.state.tree.weights_only import to_weights_only
from snapstore.state.values.containers import MAX_DEPTH, children, is_mapping, shown
from snapstore.state.walk.flatten import flatten
from snapstore.state.walk.rng import RngState


class Int(int):
    pass


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")

#: A value of every tag of the tree (state/tree/form.py). A new tag needs one here.
SAMPLES = {
    "int": 2**64,
    "str": "\ud800x",
    "bytes": bytes(5000),
    "bytearray": bytearray(5000),
    "complex": 1 + 2j,
    "list": [1, [2.5]],
    "tuple": (1, (None,)),
    "set": {1, "x", (2, b"")},
    "frozenset": frozenset({1, "x"}),
    "deque": collections.deque([1, 2], maxlen=3),
    "dict": {1: "a", None: b"", (1, "x"): 2, 2.5: True},
    "odict": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("hello"),
    "defaultdict": collections.defaultdict(list, {"k": [1]}),
    "dtype": torch.float8_e4m3fn,
    "size": torch.Size([2, 3]),
    "device": torch.device("cuda:1"),
    "np": np.float32(1.5),
    "npstr": np.str_("a\0"),
    "npbytes": np.bytes_(b"a\0"),
    "npdtype": np.dtype(">i8"),
    "tensor": torch.arange(3.0, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "array": np.arange(4.0),
    "part": torch.nn.Linear(2, 3),
    "columns": [(i, str(i)) for i in range(300)],
    "path": pathlib.PurePosixPath("/a/b"),
    "date": datetime.date(2026, 1, 2),
    "time": datetime.time(1, 2),
    "datetime": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "timedelta": datetime.timedelta(1, 2),
    "timezone": datetime.UTC,
    "enum": Color.RED,
    "object": types.SimpleNamespace(a=1, b=[2]),
    "optimizer": torch.optim.SGD(torch.nn.Linear(2, 3).parameters()),
}

NUMBERS = ["?", "i1", "u1", "<i2", ">u2", "<u4", ">i4", "<u8", "<i8", ">f2", "<f4", ">f8", "<c8", ">c16"]
OTHERS = ["<U3", "S3", "<M8[ms]", "<m8[D]"]


def loaded(state):
    """Return the state that torch loads from a converted file, and the values that changed their type."""
    converted, changed = to_weights_only(state)
    return through_torch(converted, weights_only=True), changed


def plain(array):
    """Return the elements of a flat array of strings or times as a list."""
    return array.tolist() if array.dtype.kind in "US" else [str(value) for value in array]


def differing(before, after, path=()):
    """Yield the path of each value whose type or bits differ. Check that a number or string is still equal."""
    if isinstance(before, torch.Tensor):
        same(before, after)
    elif isinstance(before, np.ndarray):
        yield shown(path)
        if before.dtype.kind in "biufc":
            assert after.numpy().tobytes() == before.astype(before.dtype.newbyteorder("=")).tobytes()
            assert after.shape == before.shape
        else:
            assert after == plain(before)
    elif isinstance(before, dict | list | tuple | collections.deque):
        if type(before) is not type(after):
            yield shown(path)
        assert len(before) == len(after)
        for (element, old, child), (_, new, value) in zip(children(before), children(after), strict=True):
            if is_mapping(before) and bits(old) != bits(new):
                yield shown((*path, element))
            yield from differing(child, value, (*path, element))
    elif bits(before) != bits(after):
        yield shown(path)
        if isinstance(before, int | float | complex | str | bytes) and type(after) is not str:
            assert before == after


@pytest.mark.parametrize("tag", sorted(READERS.keys() - {"rank"}))  # a restore replaces it by a value of this rank
def test_every_type_of_the_tree_is_read_by_torch(tag):
    value = SAMPLES[tag]
    assert any(tag in repr(part.tree) for part in flatten({"a": value}))
    state = again({"a": value})
    found, changed = loaded(state)
    assert set(differing(state, found)) == {change.path for change in changed}
    others = {"frozenset", "deque", "defaultdict", "np", "npstr", "npbytes", "npdtype", "array", "object", "path"}
    times = {"date", "time", "datetime", "timedelta", "timezone"}
    assert bool(changed) == (tag in others | times)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=20),
    st.binary(max_size=3).map(bytearray),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.int4, torch.Size([]), torch.device("cpu"), np.dtype("U7"), np.bool_(True), np.str_("")]),
    st.sampled_from(NUMBERS).map(lambda name: np.dtype(name).type(1)),
    st.tuples(st.sampled_from([*NUMBERS, *OTHERS]), st.sampled_from([(0,), (3,)])).map(lambda a: np.ones(a[1], a[0])),
    st.sampled_from(DTYPES).map(lambda name: random_tensor(name, (2,))),
)
keys = st.recursive(
    st.one_of(st.text(max_size=3), st.integers(), st.none(), st.binary(max_size=2), st.floats(allow_nan=False)),
    lambda below: st.one_of(st.tuples(below, below), st.frozensets(below, max_size=2)),
    max_leaves=4,
)
states = st.recursive(
    scalars,
    lambda below: st.one_of(
        st.lists(below, max_size=4),
        st.lists(below, max_size=4).map(tuple),
        st.lists(below, max_size=4).map(collections.deque),
        st.dictionaries(keys, below, max_size=4),
        st.dictionaries(keys, below, max_size=4).map(collections.OrderedDict),
        st.dictionaries(keys, below, max_size=4).map(collections.Counter),
        st.dictionaries(keys, below, max_size=4).map(lambda d: collections.defaultdict(int, d)),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    ),
    max_leaves=20,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(states)
def test_any_state_is_read_by_torch(state):
    state = again(state)  # a restored frozenset may have another order, and so another text
    try:
        found, changed = loaded(state)
    except UnsupportedLeafError as error:
        assert "would equal another one" in str(error)  # noqa: PT017  a frozenset and a tuple of the same members
        return
    assert set(differing(state, found)) == {change.path for change in changed}


@pytest.mark.parametrize("name", [*NUMBERS, *OTHERS])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_arrays_become_tensors_or_lists(name, shape):
    array = np.arange(6).astype(name)[: int(np.prod(shape))].reshape(shape)
    (found,), (change,) = loaded([array])
    if name in NUMBERS:
        assert np.array_equal(found.numpy(), array)
        assert change == ("0", "numpy.ndarray", "Tensor")
    else:
        flat = plain(array.reshape(-1))
        assert found == (flat[0] if shape == () else [flat[:3], flat[3:]] if flat else flat)


def test_tied_arrays_stay_tied_and_memory_is_shared():
    array = np.arange(4.0)
    converted, changed = to_weights_only({"a": array, "b": [array[:]]})
    assert len(changed) == 2
    array[0] = 7
    assert converted["a"][0] == 7
    found = loaded({"a": array, "b": [array[:]]})[0]
    assert found["a"].data_ptr() == found["b"][0].data_ptr()
    array.flags.writeable = False
    converted = to_weights_only([array])[0]
    assert converted[0].data_ptr() != array.ctypes.data


def test_the_state_of_the_readme_restores_the_same_draws():
    random.gauss(0, 1)  # keeps a second number for the next call
    found, changed = loaded(again({"rng": RngState()}))
    assert {change.path for change in changed} == {"rng.python.words", "rng.numpy.state.key"}

    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()

    want = [draw() for _ in range(3)]
    RngState().load_state_dict(found["rng"])
    assert [draw() for _ in range(3)] == want


def test_metadata_of_an_ordered_dict_stays():
    state = torch.nn.BatchNorm1d(2).state_dict()
    found, changed = loaded(again({"m": state}))
    assert found["m"]._metadata == state._metadata
    assert not changed
    torch.nn.BatchNorm1d(2).load_state_dict(found["m"])
    state._metadata["x"] = np.int64(3)
    found, changed = loaded(again({"m": state}))
    assert (found["m"]._metadata["x"], changed) == (3, [("m._metadata.x", "numpy.int64", "int")])


@pytest.mark.parametrize("number", [0, -1, 2**2039 - 1, -(2**2039), 2**2040 - 1, -(2**2040), 2**2040, 3**5000])
def test_ints_of_any_size(number):
    found, changed = loaded([number])
    assert (found[0] if not changed else int(found[0], 16)) == number
    assert bool(changed) == (number.bit_length() > 2039)


def test_bytes_longer_than_pickle_can_hold_become_a_tensor(monkeypatch):
    monkeypatch.setattr(weights_only, "MAX_BYTES", 4)
    found, changed = loaded([b"1234", b"12345", bytearray(b"54321")])
    assert found[0] == b"1234"
    assert [bytes(tensor.tolist()) for tensor in found[1:]] == [b"12345", b"54321"]
    assert changed == [("1", "bytes", "Tensor"), ("2", "bytearray", "Tensor")]


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (Int(3), 3),
        (Point(1, np.int8(2)), (1, 2)),
        (collections.UserDict(a=1), {"a": 1}),
        (collections.UserList([1]), [1]),
        (range(2), [0, 1]),
        (Color.RED, "Color.RED"),
        (pathlib.PurePosixPath("/a/b"), "/a/b"),
        (datetime.datetime(2026, 1, 2, 3), "2026-01-02 03:00:00"),
        (fractions.Fraction(1, 3), "1/3"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (np.longdouble(1), "1.0"),
        (np.array([np.longdouble(1)]), ["1.0"]),
        (np.datetime64("2020-01-02"), "2020-01-02"),
        ({Color.RED}, {"Color.RED"}),
    ],
)
def test_types_that_the_tree_lacks_take_the_nearest_plain_form(value, form):
    found, changed = loaded({"a": value})
    assert bits(found["a"]) == bits(form)
    assert changed[-1].path == "a"


@pytest.mark.parametrize("value", [print, slice(1), object(), int])
def test_a_value_without_a_plain_form_is_named(value):
    with pytest.raises(UnsupportedLeafError, match=r"^a\.b\.0 \(.*\), a\.c \(.*\)$"):
        to_weights_only({"a": {"b": [value], "c": object(), "d": 1}})


@pytest.mark.parametrize(
    "state",
    [
        {"a": {(1,): 1, frozenset({1}): 2}},
        {"a": {"2020": 1, np.datetime64("2020"): 2}},
        {"a": {(1,), frozenset({1})}},
    ],
)
def test_two_keys_that_become_one_are_an_error(state):
    with pytest.raises(UnsupportedLeafError, match=r"a.*would equal another one"):
        to_weights_only(state)


def test_the_deepest_state():
    deep = None
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert loaded(again({"a": deep})) == ({"a": deep}, [])
