"""The typed tree round-trips exactly, refuses values it cannot hold, and rejects hostile nodes."""

import collections
import math
import struct

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.processes import run_python
from kit.states import bits, spec
from snapstore.errors import FormatError, InvalidInputError, UnsupportedLeafError
from snapstore.state.tree.decode import decode, decode_plain
from snapstore.state.tree.encode import encode_plain
from snapstore.state.values.containers import MAX_DEPTH
from snapstore.state.values.tensors import StoredPart


def packed(value):
    return decode_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(encode_plain(value))))


class Complex(complex):
    pass


class Default(collections.defaultdict):
    pass


PLAIN = [
    *(None, True, False),
    *(0, -1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**64), 3**5000),
    *(0.0, -0.0, math.inf, -math.inf),
    *(
        struct.unpack("<d", struct.pack("<Q", b))[0]
        for b in (0x7FF8000000000001, 0xFFF0000000000001, 0x7FF0000000000001)
    ),
    *("", "a", "日本\0", "\ud800x"),
    *(b"", b"\0\xff", b"x" * 4096, bytearray(b"ab")),
    *(1 + 2j, complex(-0.0, math.nan)),
    *([], (), {}, set(), frozenset()),
    [1, [2, (3,)]],
    {1, 2, "x", (1, 2.0), frozenset({3})},
    frozenset({None, b"k"}),
    {
        "a": 1,
        2: "b",
        None: 3,
        True: 4,
        2.5: 5,
        b"z": 6,
        (1, ("x", None)): 7,
        torch.float32: 8,
        np.int8(9): 10,
        2**70: 11,
    },
    {"z": 1, "a": 2, "\ud800": 3},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter("hello"),
    *(collections.defaultdict(f, {"k": 1}) for f in (None, int, float, str, list, dict, set, tuple, bool)),
    collections.deque([1, 2], maxlen=3),
    collections.deque(),
    *(torch.float8_e4m3fn, torch.int4, torch.qint8),
    *(torch.Size([2, 3]), torch.Size([])),
    *(torch.device("cuda:1"), torch.device("cpu")),
    *(np.float32(1.5), np.float64(-0.0), np.float16(np.nan)),
    *(np.int64(3), np.uint8(4), np.bool_(True), np.complex64(1j)),
    *(np.datetime64("2020-01-01T00:00", "ns"), np.datetime64("NaT", "s"), np.timedelta64(5, "ms")),
    *(np.str_("a\0"), np.str_(""), np.bytes_(b"a\0")),
    *map(np.dtype, ("<f4", ">i8", "U7", "S0", "M8[25us]")),
]


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_value_comes_back_to_the_bit_and_the_type(value):
    assert bits(packed(value)) == bits(value)


@pytest.mark.filterwarnings("ignore:.*generic.*:DeprecationWarning")  # of NumPy 2.5
def test_a_date_without_a_unit():
    value = np.datetime64("NaT")
    assert bits(packed(value)) == bits(value)


def test_metadata_of_an_ordered_dict():
    state = torch.nn.BatchNorm1d(2).state_dict()
    names = collections.OrderedDict.fromkeys(state)
    names._metadata = state._metadata
    again = packed(names)
    assert bits(again) == bits(names)
    assert bits(again._metadata) == bits(state._metadata)


def test_a_set_has_one_form_whatever_its_order():
    assert encode_plain({"b", "a", 3}) == encode_plain({3, "a", "b"}) == ["set", [3, "a", "b"]]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=20),
    st.complex_numbers(allow_nan=False),
)
keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.tuples(st.text(max_size=2), st.integers()))
values = st.recursive(
    scalars,
    lambda below: st.one_of(
        st.lists(below, max_size=4),
        st.lists(below, max_size=4).map(tuple),
        st.dictionaries(keys, below, max_size=4),
        st.dictionaries(keys, below, max_size=4).map(collections.OrderedDict),
        st.sets(keys, max_size=4),
    ),
    max_leaves=20,
)


@given(values)
def test_any_plain_value(value):
    assert bits(packed(value)) == bits(value)


@given(st.integers(0, 2**64 - 1))
def test_any_float_bits(number):
    value = struct.unpack("<d", struct.pack("<Q", number))[0]
    assert bits(packed({"a": [value, complex(value, value)]})) == bits({"a": [value, complex(value, value)]})


def slice_and_friends():
    counter = collections.Counter("a")
    counter.note = 1
    return {
        "user dict": collections.UserDict(),
        "default dict": Default(int),
        "complex": Complex(1),
        "function": print,
        "slice": slice(1),
        "range": range(3),
        "object": object(),
        "type": int,
        "factory": collections.defaultdict(lambda: 0),
        "long": np.longdouble(1),
        "void": np.void(b"ab"),
        "struct": np.dtype("i4,f4"),
        "counter": counter,
        "set": {Complex(1)},
        "metadata": np.dtype("i4", metadata={"a": 1}),
        "tensor": torch.zeros(1),
        "array": np.zeros(1),
        "bytes": bytes(5000),
    }


@pytest.mark.parametrize(("name", "value"), slice_and_friends().items())
def test_a_value_without_a_form_is_named(name, value):
    with pytest.raises(UnsupportedLeafError, match=name):
        encode_plain({name: [value]})


def test_a_key_without_a_form_is_named():
    with pytest.raises(UnsupportedLeafError, match=r"dict key of type .*Complex"):
        encode_plain({Complex(1): 1})
    with pytest.raises(UnsupportedLeafError, match=r"tuple holds a .*Complex"):
        encode_plain({(1, Complex(1)): 1})


def test_cycles_and_depth():
    cycle = {"a": {}}
    cycle["a"]["b"] = [cycle["a"]]
    with pytest.raises(InvalidInputError, match=r"a\.b\.0: contains itself \(it is also a\)"):
        encode_plain(cycle)
    deep = 1
    for _ in range(MAX_DEPTH):
        deep = {"k": deep} if _ % 2 else (deep,)
    assert packed(deep) == deep
    with pytest.raises(InvalidInputError, match="levels deep"):
        encode_plain((deep,))
    deep = None
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert packed(deep) == deep
    with pytest.raises(InvalidInputError, match="levels deep"):
        encode_plain([deep])
    key = ()
    for _ in range(MAX_DEPTH + 1):
        key = (key,)
    with pytest.raises(UnsupportedLeafError, match="levels deep"):
        encode_plain({key: 1})


def nested(tag, depth):
    node = ["list", []]
    for _ in range(depth):
        node = [tag, [node]]
    return node


#: tag -> arguments that no save has written for it
WRONG_ARGUMENTS = {
    "nope": [()],
    "list": [(), (1,), ([1], 2), ("ab",), ({},)],
    "tuple": [(None,)],
    "dict": [(["a"], []), ([["list", []]], [1]), (["a", "a"], [1, 2]), ([1, True], [1, 2]), ("ab", [1, 2])],
    "odict": [([], [], None, None)],
    "defaultdict": [("eval", [], []), (["list", []], [], [])],
    "set": [([["list", []]],), ([["dict", [], []]],), ([1, 1],), ([1, True],)],
    "frozenset": [(["a", "b", "a"],)],
    "int": [(5,), ("5",)],
    "str": [(b"\xff",), ("a",)],
    "complex": [(1, 2.0), (1.0,)],
    "bytearray": [("a",), (0,)],
    "bytes": [(0,), (-1,), (True,)],
    "tensor": [(0, True), (10**30, True), (0,)],
    "array": [(0,)],
    "parameter": [(0, 1)],
    "part": [("x",), ("",)],
    "dtype": [("nn",), ("float",), (3,), ("os",)],
    "size": [([2**63],), (["a"],), (10**9,), ([True],)],
    "device": [("cuda:-1",), ("nowhere",), ("cpu\0",), ("c" * 10**6,)],
    "np": [("<f4", b"123"), ("O", b"12345678"), ("<U1000000000", b""), ("<f16", bytes(16)), ("|V4", b"1234"),
           ("<M8[evil]", bytes(8))],
    "npdtype": [("i4,f4",), ("O",), (4,)],
    "npstr": [(1,)],
    "npbytes": [("a",)],
    "deque": [(0, [1]), ("1", []), (-1, []), (2**70, [])],
    "value": [(1,)],
    "_slot": [(1,)],
    "__init__": [(1,)],
}  # fmt: skip
HOSTILE = [
    *([tag, *given] for tag, cases in WRONG_ARGUMENTS.items() for given in cases),
    *([], [1, 2], {}, {"a": 1}, [["list", []]], msgspec.msgpack.Ext(1, b"a")),
    *(nested("list", MAX_DEPTH + 1), nested("tuple", 600)),
]


@pytest.mark.parametrize("node", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_node_is_a_format_error(node):
    with pytest.raises(FormatError):
        decode_plain(node)
    with pytest.raises(FormatError):
        decode([StoredPart("", ["dict", ["k"], [node]], [])])


@given(
    st.recursive(
        st.one_of(
            st.sampled_from(["list", "dict", "odict", "np", "size", "int", "tensor", "set", "deque"]),
            scalars.filter(lambda v: type(v) is not complex),
        ),
        lambda below: st.lists(below, max_size=5),
        max_leaves=30,
    )
)
def test_any_node_decodes_or_is_a_format_error(node):
    try:
        value = decode_plain(node)
    except FormatError:
        return
    encode_plain(value)


def test_parts_must_fit_each_other():
    root = StoredPart("", ["dict", ["a"], [["part", "a"]]], [])
    below = StoredPart("a", ["list", [["tensor", 0, True]]], [spec()])
    assert decode([root, below])["a"][0].part == 1
    assert decode([root], partial=True) == {}
    for parts in (
        [root],
        [below],
        [root, root],
        [root, below, StoredPart("b", None, [])],
        [root, StoredPart("a", ["part", "a"], [])],
        [StoredPart("", ["list", [["part", "a"]] * 2], []), below],
        [StoredPart("", ["part", "a"], []), below],
        [root, StoredPart("a", ["list", [["part", "a"]]], [])],
    ):
        with pytest.raises(FormatError):
            decode(parts)
    for changes in ({"dtype": "int64"}, {"kind": "array", "dtype": "<f4"}):
        with pytest.raises(FormatError):
            decode([root, StoredPart("a", ["list", [["tensor", 0, True]]], [spec(**changes)])])


def test_importing_does_not_import_torch():
    code = (
        "import sys, snapstore, snapstore.state.walk.flatten, snapstore.state.fill.plan;"
        "snapstore.state.walk.flatten.flatten({'a': [1, b'x' * 9999]}); snapstore.RngState().state_dict();"
        "assert 'torch' not in sys.modules"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
