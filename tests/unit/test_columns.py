"""Plain values in columns keep their values and types. Hostile columns are refused, and every cycle is found."""

import contextlib
import copy
import itertools
import math
import sys
from collections import OrderedDict, deque
from functools import partial
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.interrupts import Interrupter
from kit.states import again, same
from snapstore.errors import FormatError, InvalidInputError, UnsupportedLeafError
from snapstore.state.tree import columns
from snapstore.state.tree.decode import Decoded, decode, decode_plain, unpack_nodes
from snapstore.state.tree.encode import _key, _leaf, encode_plain, pack
from snapstore.state.values.containers import MAX_DEPTH
from snapstore.state.values.tensors import StoredPart
from snapstore.state.walk.flatten import flatten, flatten_and_learn


def column_of(value):
    node, _ = columns.encode(value, _leaf, _key, 0)
    return unpack_nodes(pack(node))


def came_back(value):
    return decode_plain(column_of(value))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=8),
    st.sets(st.integers(), max_size=3),
    st.complex_numbers(),
)
KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
NAMES = st.sampled_from(["a", "b", "c", "\ud800"])
VALUES = st.recursive(
    LEAVES,
    lambda below: st.one_of(
        st.lists(below, max_size=6),
        st.lists(below, max_size=6).map(tuple),
        st.dictionaries(KEYS, below, max_size=4),
        st.lists(st.tuples(below, below), max_size=6),
        st.lists(st.dictionaries(NAMES, below, max_size=3), max_size=8),
        st.lists(st.fixed_dictionaries({"x": below, "y": st.integers()}), max_size=8),
    ),
    max_leaves=60,
)


@pytest.fixture(autouse=True, scope="module")
def rows_of_two():
    """Make rows of two or more containers of one form, so that small examples have rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "MIN_ROWS", 2)
        yield


@given(VALUES)
def test_any_plain_tree(value):
    same(came_back([value]), [value])


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        ((),),
        [[], []],
        [{}, {}],
        [(1, 2.5, "x")] * 400,
        [(i, [i]) for i in range(400)],
        [[i, {"x": -i}, (i,)] for i in range(400)],
        {f"k{i}": i for i in range(400)},
        {i: {"a": i} for i in range(400)},
        [{"a": 1, "b": [i]} if i % 3 else {"b": 2} for i in range(400)],
        [{str(i): i} for i in range(400)],
        [{"a": 1}, {"a": 2, 1: 3}, {}] * 100,
        [1, True, None, 1.0, "1", b"1", 1j, {1}, (1,), [1], {1: 1}] * 40,
        [2**64, -(2**64), 2**63, "\ud800", math.nan, -0.0] * 60,
        [{"\ud800": i} for i in range(400)],
        list(map(bytes, range(200))),
    ],
    ids=range(17),
)
def test_forms(value):
    same(came_back(value), value)
    same(again({"data": value, "more": [value, 1]}), {"data": value, "more": [value, 1]})


def test_large_plain_values_of_a_state_have_columns_and_no_others():
    """Large plain values of a state are stored in columns. Small values and metadata are not."""

    import torch

    small, large = list(range(100)), [(i, str(i)) for i in range(200)]
    tree = {part.name: part.tree for part in flatten({"m": {"w": torch.ones(2), "l": large}, "s": [small, small]})}
    assert tree["m"][2][1][0] == "columns"
    assert tree["s"] == ["list", [["list", small], ["list", small]]]
    assert encode_plain(large)[0] == "list"  # metadata is small, and people read it


def test_the_state_may_change_once_it_is_flattened():
    value = {"rows": [[i, {"x": i}] for i in range(400)], "names": {f"n{i}": i for i in range(400)}}
    before = [[i, {"x": i}] for i in range(400)]
    (root, rows, names) = flatten(value)
    value["rows"][7][1]["x"] = value["rows"][8][0] = None
    value["rows"].clear()
    value["names"]["n3"] = None
    del value["names"]["n5"]
    parts = [StoredPart(part.name, unpack_nodes(pack(part.tree)), []) for part in (root, rows, names)]
    assert decode(parts) == {"rows": before, "names": {f"n{i}": i for i in range(400)}}


def move_first_to_end(value):
    key = next(iter(value))
    value[key] = value.pop(key)


#: A container, and what another thread does to it.
CHANGED = {
    "a list gets longer": ([[1, 2], [3, 4]], lambda x: x.append([5, 6])),
    "a list gets shorter": ([[1, 2], [3, 4]], lambda x: x.pop()),
    "a row gets longer": ([[1, 2], [3, 4]], lambda x: x[1].append(5)),
    "a list in a list gets empty": ([[1, 2], [3]], lambda x: x[0].clear()),
    "a row of a dict gets a key": ([{"a": 1, "b": 2}, {"a": 3, "b": 4}], lambda x: x[1].update(c=5)),
    "a row of a dict gets another order": ([{"a": 1, "b": 2}, {"a": 3, "b": 4}], lambda x: move_first_to_end(x[1])),
    "a form gets a key": ([{"a": 1}, {"b": 2}, {"a": 3}, {"b": 4}], lambda x: x[1].update(c=5)),
    "a form loses its key": ([{"a": 1}, {"b": 2}, {"a": 3}, {"b": 4}], lambda x: x[1].clear()),
    "a dict gets another order": ({"a": 1, 2: [2], "c": 3}, move_first_to_end),
    "a dict gets a key": ({"a": 1, 2: [2], "c": 3}, lambda x: x.update(d=4)),
    "a dict gets empty": ({"a": 1, 2: [2], "c": 3}, lambda x: x.clear()),
    "a dict with a deque gets a key": ({"a": deque([1]), "b": 2}, lambda x: x.update(d=4)),
    "an ordered dict gets another order": (OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
    "a deque gets longer": (deque([1, 2]), lambda x: x.append(3)),
    "a set gets longer": ({1, 2}, lambda x: x.add(3)),
}


AT_ROOT = [name for name, (value, _) in CHANGED.items() if type(value) is dict]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("min_values", [1, columns.MIN_VALUES])
@pytest.mark.parametrize(("name", "at_root"), [*product(CHANGED, [False]), *product(AT_ROOT, [True])])
def test_a_container_that_another_thread_changes(name, at_root, min_values, monkeypatch):
    """It is stored as it was at one moment, wherever the other thread runs."""
    monkeypatch.setattr(columns, "MIN_VALUES", min_values)
    files = ["state/walk/flatten.py", "state/tree/encode.py", "state/tree/columns.py", "state/values/containers.py"]
    for at in itertools.count():
        before, change = copy.deepcopy(CHANGED[name])
        value = copy.deepcopy(before)
        thread = Interrupter(*files, at=at, strike=partial(change, value))
        state = value if at_root else {"x": value, "more": [1]}
        parts = thread.call(flatten, state)
        if len(thread.passed) <= at:
            break
        found = decode([StoredPart(part.name, unpack_nodes(pack(part.tree)), []) for part in parts])
        assert repr(found if at_root else found["x"]) in (repr(before), repr(value)), thread.passed[at]
    assert at > 10


def test_a_known_structure_gives_the_columns_that_flatten_gives():
    import torch

    def state(first):
        large = [(first, "x"), *((i, str(i)) for i in range(400))]
        return {"model": {"w": torch.ones(3), "seen": large}, "rows": large, "names": {"a": large, "lr": first}}

    _, (structure, _) = flatten_and_learn(state(0))
    for first in (1, 2.5):
        match = structure.match(state(first))
        match.confirm()
        assert {name: pack(tree) for name, tree in match.trees.items()} == {
            part.name: pack(part.tree) for part in flatten(state(first))
        }
    assert match.trees["rows"][0] == match.trees["model"][2][1][0] == "columns"


def test_shared_containers_become_copies():
    shared = [1, (2, 3)]
    value = [shared] * 400 + [[shared]] * 3
    back = again(value)
    same(back, value)
    assert back[0] is not back[1]


def test_cycles_are_found_and_named():
    for make in (lambda v: v.append(v), lambda v: v.append([v] * 2), lambda v: v[3].append([[v]])):
        value = [[i] for i in range(400)]
        make(value)
        with pytest.raises(InvalidInputError, match="contains itself"):
            flatten(value)
    ring = [[] for _ in range(40)]
    for i, one in enumerate(ring):
        one += [ring[(i + 1) % 40]] * 2
    with pytest.raises(InvalidInputError, match="contains itself"):
        flatten([ring[0], *range(400)])


def test_depth():
    """A state may have MAX_DEPTH levels of containers, and no more."""
    value = list(range(400))
    for _ in range(MAX_DEPTH - 1):
        value = [value, "x"]
    same(again(value), value)
    with pytest.raises(InvalidInputError, match="more than 200 levels deep"):
        flatten([value])


def test_a_value_without_a_form_is_named_among_many():
    """If one of many values cannot be saved, the error names its place."""
    for bad in (object(), bytearray(5000)[:0].decode, len):
        with pytest.raises(UnsupportedLeafError, match=r"data.399.1"):
            flatten({"data": [[i, str(i)] for i in range(399)] + [[1, bad]]})
    with pytest.raises(UnsupportedLeafError, match="keys of one hash"):
        flatten({"data": [{i * (2**61 - 1): 0 for i in range(300)}, {}]})


INTS = msgspec.msgpack.encode([1, 1])
TWO = ["values", INTS]
ONE = ["values", msgspec.msgpack.encode([1])]
XY = ["values", msgspec.msgpack.encode(["x", "y"])]
HOSTILE = {
    "no column": 1,
    "empty": [],
    "unknown": ["rows", TWO],
    "too many fields": ["values", INTS, INTS],
    "two values": TWO,
    "no value": ["values", b"\x90"],
    "no array": ["values", b"\x01"],
    "nothing packed": ["values", b""],
    "a count without values": ["values", b"\xdd\xff\xff\xff\xff"],
    "fewer values than counted": ["values", b"\xdc\x00\x03\x01\x01"],
    "more values than counted": ["values", b"\x91\x01\x01"],
    "a packed map": ["values", b"\x91\x81\x01\x01"],
    "a packed array": ["values", b"\x91\x91\x01"],
    "a packed time": ["values", b"\x91\xd6\xff\x00\x00\x00\x00"],
    "packed text that is no UTF-8": ["values", b"\x91\xa1\xff"],
    "a node of an array": ["values", [["tensor", 0, False]]],
    "a node of a part": ["values", [["part", "x"]]],
    "a broken node": ["values", [["int", 3]]],
    "lengths below": ["lists", ["values", b"\x91\x01"], TWO],
    "lengths above": ["lists", ["values", b"\x91\x03"], TWO],
    "a length below 0": ["lists", ["values", b"\x93\xff\x02\x01"], TWO],
    "a length of true": ["lists", ["values", b"\x92\xc3\x01"], TWO],
    "a length of text": ["lists", ["values", b"\x91\xa12"], TWO],
    "a key twice": ["dicts", ["values", b"\x91\x02"], TWO, TWO],
    "more keys than values": ["dicts", ["values", b"\x91\x02"], XY, ONE],
    "a key that has no hash": ["dicts", ["values", b"\x91\x01"], ["values", [["list", []]]], ONE],
    "keys in containers": ["dicts", ["values", b"\x91\x01"], ["lists", ["values", b"\x91\x01"], ONE], ONE],
    "no rows": ["list rows", b"", []],
    "a column of no member": ["list rows", b"\x00", [ONE, ONE]],
    "a member of no column": ["list rows", b"\x00\x01", [ONE]],
    "rows of two lengths": ["list rows", b"\x00\x01", [ONE, TWO]],
    "half a row": ["tuple rows", b"\x00\x00", [ONE]],
    "a key of no column": ["dict rows", XY, b"\x00", [ONE]],
    "an int as key of rows": ["dict rows", ONE, b"\x00", [ONE]],
    "a key of rows twice": ["dict rows", ["values", b"\x92\xa1x\xa1x"], b"\x00\x00", [TWO]],
    "mixed of fewer": ["mixed", b"\x00\x00", [ONE]],
    "mixed of more": ["mixed", b"\x00", [TWO]],
    "mixed of others": ["mixed", b"\x01", [ONE]],
    "mixed of a text": ["mixed", "\x00", [ONE]],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_column_is_a_format_error(what):
    with pytest.raises(FormatError):
        decode_plain(unpack_nodes(pack(["columns", HOSTILE[what]])))


@contextlib.contextmanager
def stack_of(frames):
    """Let this process use a deeper stack; 0: as deep a one as before."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, frames))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("frames", [0, 20_000])
def test_columns_of_columns_end(frames):
    """Columns that are nested too deep are refused, however much of the stack this process may use."""
    for wrap in (
        lambda below: ["mixed", b"\x00", [below]],
        lambda below: ["lists", ["values", b"\x91\x01"], below],
        lambda below: ["list rows", b"\x00", [below]],
        lambda below: ["values", [["columns", below]]],
    ):
        column = ONE
        for _ in range(220):
            column = wrap(column)
        with stack_of(frames), pytest.raises(FormatError, match="too many levels deep" if frames else r"deep|broken"):
            decode_plain(["columns", column])


@given(
    st.recursive(
        st.sampled_from([ONE, TWO, XY, ["values", b"\x90"], b"\x00", b"\x00\x01", 0, "x", ["values", [["list", []]]]]),
        lambda below: (
            st.lists(below, max_size=4).flatmap(
                lambda fields: st.sampled_from(
                    ["lists", "tuples", "dicts", "list rows", "tuple rows", "dict rows", "mixed", "values"]
                ).map(lambda tag: [tag, *fields])
            )
            | st.lists(below, max_size=3)
        ),
        max_leaves=20,
    )
)
def test_any_column_decodes_or_is_a_format_error(column):
    try:
        value = decode_plain(["columns", column])
    except FormatError:
        return
    encode_plain(value)


def test_too_many_keys_of_one_hash_are_refused_before_the_dict_is_built():
    keys = ["values", msgspec.msgpack.encode([float(i * (2**61 - 1)) for i in range(8)])]
    alike = ["values", [["int", (i * (2**61 - 1)).to_bytes(20, "little", signed=True)] for i in range(1, 300)]]
    many = ["values", msgspec.msgpack.encode([0] * 299)]
    with pytest.raises(FormatError, match="one hash"):
        decode_plain(["columns", ["dicts", ["values", msgspec.msgpack.encode([299])], alike, many]])
    assert decode_plain(["columns", ["dicts", ["values", b"\x91\x08"], keys, ["values", b"\x98" + b"\xc0" * 8]]])


def test_memory_is_counted_before_it_is_taken():
    """Memory is counted before it is allocated: a row of one small number takes 200 times its stored byte."""
    spent = []
    column = ["dict rows", ["values", b"\x91\xa1x"], b"\x00", [["values", b"\xdc\x10\x00" + bytes(4096)]]]
    whole = ["lists", ["values", msgspec.msgpack.encode([4096])], column]
    value = decode([StoredPart("", ["columns", whole], [])], decoded=Decoded(spent.append))
    assert sum(spent) > 4096 * 232
    assert value == [{"x": 0}] * 4096

    def refuse(nbytes):
        raise MemoryError(nbytes)

    with pytest.raises(MemoryError):
        decode([StoredPart("", ["columns", whole], [])], decoded=Decoded(refuse))
