"""Values of common classes come back exactly, in their plain form, or as the classes that the caller names."""

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import pathlib
import types
import typing
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.processes import run_python
from kit.states import again, packed, same
from snapstore import Repository, SnapshotManager
from snapstore.errors import FormatError, InvalidInputError, UnsupportedLeafError
from snapstore.state.tree.decode import Decoded, decode_plain, unpack_nodes
from snapstore.state.tree.encode import encode_plain, pack
from snapstore.state.values.classes import Types
from snapstore.state.walk.flatten import flatten
from snapstore.storage.memory import MemoryStore


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"
    BOTH = (1, "blue")
    ALIAS = 1


class Mode(enum.StrEnum):
    TRAIN = "train"


class Level(enum.IntEnum):
    LOW = 3


class Flags(enum.Flag):
    A = 1
    B = 2


Point = collections.namedtuple("Point", "x y")


class Pair(typing.NamedTuple):
    a: int
    b: typing.Any = None


@dataclasses.dataclass
class Config:
    lr: float
    mode: Color = Color.RED
    tags: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    config: Config
    weights: typing.Any


class Dict(dict):
    def __iter__(self):
        raise AssertionError("a method of the subclass was called")

    keys = items = values = __iter__


class Attributes(dict):
    def __init__(self, *args, **items):
        super().__init__(*args, **items)
        self.__dict__ = self


class List(list):
    pass


class Text(str):
    __slots__ = ()


class Int(int):
    pass


class Float(float):
    pass


UTC = datetime.UTC
EXACT = [
    pathlib.Path("/data/x.y"),
    pathlib.PurePosixPath("a/../b"),
    pathlib.PureWindowsPath(r"C:\x\y"),
    pathlib.Path("\udcff"),
    datetime.date(2024, 2, 29),
    datetime.time(23, 59, 59, 999_999, fold=1),
    datetime.time(1, tzinfo=UTC),
    datetime.datetime.min,
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6, UTC, fold=1),
    datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(seconds=-3601, microseconds=7), "odd")),
    datetime.timedelta(-1, 5, 7),
    datetime.timedelta.max,
    UTC,
    datetime.timezone(datetime.timedelta(hours=1)),
]


def bits(value):
    return packed(value)


@pytest.mark.parametrize("value", EXACT, ids=repr)
def test_classes_of_the_standard_library_come_back_exactly(value):
    for state in ({"a": [value]}, {"a": {value: 1}}, {"a": {value}}, {"a": [(value, i) for i in range(300)]}):
        back = again(state)
        assert back == state
        assert bits(back) == bits(state)
    back = again([value])[0]
    assert type(back) is type(value)
    assert repr(back) == repr(value)
    assert getattr(back, "fold", 0) == getattr(value, "fold", 0)


@given(st.one_of(st.datetimes(), st.datetimes(timezones=st.just(UTC)), st.times(), st.dates(), st.timedeltas()))
def test_any_time(value):
    back = again([value])[0]
    assert (back, type(back), repr(back)) == (value, type(value), repr(value))


def test_namespaces_come_back_as_they_are():
    state = {
        "args": argparse.Namespace(lr=0.1, path=pathlib.Path("x"), nested=argparse.Namespace(w=torch.ones(3))),
        "simple": types.SimpleNamespace(a=[1], **{"not a name": 2}),
    }
    back = again(state)
    assert type(back["args"]) is type(back["args"].nested) is argparse.Namespace
    assert (back["args"].lr, back["args"].path, back["args"].nested.w.sum()) == (0.1, pathlib.Path("x"), 3)
    assert back["simple"] == state["simple"]
    assert again(state, keys="args.lr") == {"args": {"lr": 0.1}}  # a part of a namespace comes back in plain form


PLAIN = [
    (Color.RED, 1),
    (Color.BLUE, "blue"),
    (Color.BOTH, "BOTH"),
    (Mode.TRAIN, "train"),
    (Level.LOW, 3),
    (Flags.A | Flags.B, 3),
    (Point(1, [2]), (1, [2])),
    (Pair(1), (1, None)),
    (Config(0.5, Color.BLUE, ["x"]), {"lr": 0.5, "mode": "blue", "tags": ["x"]}),
    (Dict(a=1), {"a": 1}),
    (Attributes(a=1), {"a": 1}),
    (List([1, Int(2)]), [1, 2]),
    (Text("x"), "x"),
    (Int(2**70), 2**70),
    (Float(0.5), 0.5),
]
ALL = [Color, Mode, Level, Flags, Point, Pair, Config, Frozen, Dict, Attributes, List, Text, Int, Float]


@pytest.mark.parametrize(("value", "plain"), PLAIN, ids=lambda value: type(value).__name__)
def test_classes_of_users_come_back_in_plain_form_or_as_named(value, plain):
    same(again({"a": [value, 1]}), {"a": [plain, 1]})
    same(decode_plain(encode_plain({"a": value})), {"a": plain})
    (made,) = again([value], decoded=Decoded(types=Types(ALL)))
    assert type(made) is type(value)
    assert made == value if type(value) is not Dict else dict.__eq__(made, value)


def test_nested_classes_with_tensors():
    state = {
        "model": Frozen(Config(1.0, Color.BOTH, [Point(Level.LOW, 2)]), {"w": torch.arange(3000.0)}),
        "n": [Int(3)],
    }
    plain = again(state)
    same(plain["model"]["config"], {"lr": 1.0, "mode": "BOTH", "tags": [(3, 2)]})
    made = again(state, decoded=Decoded(types=Types(ALL)))
    assert made["model"].config == state["model"].config
    assert type(made["model"].config.tags[0].x) is Level
    assert torch.equal(made["model"].weights["w"], state["model"].weights["w"])
    assert again(state, keys="model.weights.w")["model"]["weights"]["w"].sum() == state["model"].weights["w"].sum()
    root = again(Config(2.0), decoded=Decoded(types=Types([Config])))
    assert root == Config(2.0, 1)  # Color was not named


def test_keys_and_members():
    state = {Color.RED: 1, Text("t"): 2, (Level.LOW, 1): 3, "s": {Mode.TRAIN, 5}}
    same(again(state), {1: 1, "t": 2, (3, 1): 3, "s": {"train", 5}})
    made = again(state, decoded=Decoded(types=Types(ALL)))
    assert made == state
    assert {type(key) for key in made} == {Color, Text, tuple, str}
    for bad in ({Color.RED: 1, 1: 2}, [{Color.RED, 1}], {(Color.RED, 2): 0, (1, 2): 0}):
        with pytest.raises(UnsupportedLeafError, match="differ only in their class"):
            flatten({"x": [bad, *range(300)]})


def test_names_find_classes_of_other_modules_only_if_they_are_unique():
    node = ["object", "dataclass", "__main__", "Config", ["dict", ["lr"], [0.5]]]
    assert type(decoded(node, [Config])) is dict  # the object is made later, when the state is built
    state = {"a": Config(0.5)}
    other = dataclasses.make_dataclass("Config", ["lr", "mode", "tags"])
    other.__qualname__, other.__module__ = "Config", "elsewhere"
    assert type(again(state, decoded=Decoded(types=Types([other])))["a"]) is other
    assert type(again(state, decoded=Decoded(types=Types([other, Config])))["a"]) is Config
    third = dataclasses.make_dataclass("Config", ["lr", "mode", "tags"])
    third.__module__ = "third"
    assert type(again(state, decoded=Decoded(types=Types([other, third])))["a"]) is dict


def decoded(node, classes=()):
    return _decoded(node, Decoded(types=Types(classes)))


def _decoded(node, found):
    from snapstore.state.tree.decode import decode
    from snapstore.state.values.tensors import StoredPart

    return decode([StoredPart("", unpack_nodes(pack(node)), [])], decoded=found)


def test_a_dataclass_whose_fields_have_changed():
    @dataclasses.dataclass
    class Now:
        lr: float
        warmup: int = 5
        steps: list = dataclasses.field(default_factory=list)

    Now.__qualname__ = "Config"
    with pytest.raises(
        InvalidInputError, match=r"^a: cannot make a .*Config.*no fields \['mode', 'tags'\].*plain form"
    ):
        again({"a": Config(1.0)}, decoded=Decoded(types=Types([Now])))
    node = ["object", "dataclass", "x", "Config", ["dict", ["lr"], [0.5]]]
    parts = Decoded(types=Types([Now]))
    tree = _decoded(node, parts)
    ((_, make),) = parts.makers.values()
    assert make(tree) == Now(0.5, 5, [])
    with pytest.raises(InvalidInputError, match="'lr' has no default"):
        make({})


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (Config(1.0), Color),
        (Point(1, 2), Config),
        (Color.RED, Config),
        (Int(1), Text),
        (Color.BLUE, Flags),
        (Dict(), List),
    ],
)
def test_a_class_of_another_kind_is_refused(value, given):
    renamed = type(given)("X", (given,), {}) if not issubclass(given, enum.Enum) else given
    renamed.__qualname__, before = type(value).__qualname__, renamed.__qualname__
    try:
        with pytest.raises(InvalidInputError, match="cannot make a"):
            again({"a": [value]}, decoded=Decoded(types=Types([renamed])))
    finally:
        renamed.__qualname__ = before


@pytest.mark.parametrize("bad", [Config, "Config", ["Config"], [object], [Config(1)], [int], [print]])
def test_types_that_are_no_such_classes(bad):
    if bad == [int]:
        Types(bad)
        return
    with pytest.raises(InvalidInputError, match="types"):
        Types(bad)


def test_attributes_are_not_lost_silently():
    extra = Config(1.0)
    extra.more = 1
    text = type("Loose", (str,), {})("x")
    text.more = 1
    zone = __import__("zoneinfo").ZoneInfo("UTC")
    for bad in (extra, text, datetime.datetime(2024, 1, 1, tzinfo=zone), collections.UserDict(a=1), torch.Size):
        with pytest.raises(UnsupportedLeafError, match=r"^a\.0: "):
            flatten({"a": [bad]})

    @dataclasses.dataclass
    class Cached:
        x: int

        @functools.cached_property
        def double(self):
            return 2 * self.x

    cached = Cached(2)
    assert cached.double == 4
    same(again({"a": cached}), {"a": {"x": 2}})


def test_cycles():
    args = argparse.Namespace()
    args.me = [args]
    config = Config(1.0)
    config.tags.append({"x": config})
    for bad in (args, config):
        with pytest.raises(InvalidInputError, match="contains itself"):
            flatten({"a": bad})


def test_a_dict_with_a_state_dict_method_is_stored_by_that_method():
    class Both(dict):
        def state_dict(self):
            return {"asked": 1}

        def load_state_dict(self, state):
            raise AssertionError

    same(again({"a": Both(x=2)}), {"a": {"asked": 1}})


# --- into -------------------------------------------------------------------------------------------------------------


def test_into_fills_members_in_place():
    def make(fill):
        return {
            "args": argparse.Namespace(lr=fill, w=torch.full((3,), fill)),
            "config": Config(fill, Color.BLUE if fill else Color.RED, [fill]),
            "frozen": Frozen(Config(fill), {"w": torch.full((2,), fill)}),
            "point": Point(fill, torch.full((2,), fill)),
            "many": [Config(fill), Config(fill)],
            "dict": Attributes(a=fill, w=torch.full((2,), fill)),
            "list": List([fill]),
            "mode": [Mode.TRAIN, Int(fill)],
            "enum": Color.BLUE if fill else Color.RED,
        }

    state, held = make(1.0), make(0.0)
    tensors = held["args"].w, held["frozen"].weights["w"], held["point"].y, held["dict"]["w"]
    objects = {key: held[key] for key in ("args", "config", "frozen", "dict", "list")}
    again(state, into=held, decoded=Decoded(types=Types(into=held)))
    for key, value in objects.items():
        assert held[key] is value
    assert [t.sum() for t in tensors] == [3, 2, 2, 2]
    assert held["args"].w is tensors[0]
    assert held["args"].lr == held["point"].x == held["dict"]["a"] == 1.0
    assert held["config"] == state["config"]
    assert held["frozen"].config == state["frozen"].config
    assert held["many"] == state["many"]
    assert (held["list"], held["enum"]) == ([1.0], Color.BLUE)
    assert [type(value) for value in held["mode"]] == [Mode, Int]
    assert type(held["point"]) is Point


def test_into_that_differs_is_refused_whole():
    held = {"a": Config(0.0), "b": argparse.Namespace(x=1)}
    with pytest.raises(InvalidInputError, match=r"b\.y: missing in the target"):
        again({"a": Config(1.0), "b": argparse.Namespace(x=2, y=3)}, into=held, decoded=Decoded(types=Types(into=held)))
    assert held["a"] == Config(0.0)


def test_repository_and_manager_take_types(tmp_path):
    state = {"config": Config(0.5, Color.BLUE), "mode": Mode.TRAIN, "w": torch.ones(2000)}
    with Repository.create(MemoryStore()) as repository:
        repository.save(state, run="r", step=0, metadata={"config": Config(0.25), "at": EXACT[8]})
        assert repository.snapshot("r@0").metadata == {"config": {"lr": 0.25, "mode": 1, "tags": []}, "at": EXACT[8]}
        assert repository.restore("r@0")["config"] == {"lr": 0.5, "mode": "blue", "tags": []}
        back = repository.restore("r@0", types=[Config, Color, Mode])
        assert (back["config"], back["mode"]) == (state["config"], Mode.TRAIN)
        assert type(back["mode"]) is Mode
        held = {"config": {"lr": 0, "mode": 0, "tags": []}, "mode": "", "w": torch.zeros(2000)}
        repository.restore_into("r@0", held, types=[Mode])
        assert (type(held["mode"]), held["config"]["lr"]) == (Mode, 0.5)
        assert not repository.diff("r@0", "r@0").plain
        with pytest.raises(InvalidInputError, match="types"):
            repository.restore("r@0", types=Config)
    with SnapshotManager(tmp_path / "r", run="r") as manager:
        manager.save(0, state).result()
        assert manager.restore(types=[Config, Color])["config"] == state["config"]
        held = {**state, "config": Config(0.0), "w": torch.zeros(2000)}
        manager.restore_into(held)
        assert held["config"] == state["config"]


# --- hostile ----------------------------------------------------------------------------------------------------------

HOSTILE = [
    ["path", "posix"],
    ["path", "os", "x"],
    ["path", "posix", 3],
    ["path", "posix", ["list", []]],
    ["date", "2024-13-01"],
    ["date", 3],
    ["date", "x" * 100_000],
    ["time", "25:00", 0, None],
    ["time", "01:00", 2, None],
    ["datetime", "2024-01-01T00:00:00", 0, 3],
    ["datetime", "2024-01-01T00:00:00", 0, ["timedelta", 0, 1, 0]],
    ["datetime", "2024-01-01T00:00:00", True, None],
    ["timedelta", 2**62, 0, 0],
    ["timedelta", 0.5, 0, 0],
    ["timezone", ["timedelta", 2, 0, 0]],
    ["timezone", ["timedelta", 0, 0, 0], "a", "b"],
    ["timezone", "utc"],
    ["enum", "m", "Color", "RED"],
    ["enum", "m", "Color", 3, 1],
    ["enum", "m", "Color", "RED", ["list", []]],
    ["enum", 3, "Color", "RED", 1],
    ["object", "dataclass", "m", "Config", 3],
    ["object", "dataclass", "m", "Config", ["dict", [1], [2]]],
    ["object", "dataclass", "m", "Config", ["object", "dataclass", "m", "Config", ["dict", [], []]]],
    ["object", "namedtuple", "m", "Point", ["tuple", [1, 2]], ["x"]],
    ["object", "namedtuple", "m", "Point", ["tuple", [1]], [3]],
    ["object", "namedtuple", "m", "Point", ["tuple", [1]], 3],
    ["object", "subclass", "m", "Int", None],
    ["object", "subclass", "m", "Int", 1, ["x"]],
    ["object", "other", "m", "Int", 1],
    ["object", ["list", []], "m", "Int", 1],
    ["object", "namespace", "os", "environ", ["dict", [], []]],
    ["object", "namespace", "argparse", "Namespace", ["list", []]],
]


@pytest.mark.parametrize("node", HOSTILE, ids=repr)
def test_a_hostile_node_is_a_format_error(node):
    for classes in ((), ALL):
        with pytest.raises(FormatError):
            decoded(["list", [node]], classes)


def test_objects_that_are_nested_too_deep_are_a_format_error():
    node = 1
    for _ in range(300):
        node = ["object", "subclass", "m", "List", ["list", [node]]]
    with pytest.raises(FormatError, match=r"deep|broken|decode"):
        decoded(node)


def test_a_stored_name_is_never_imported(tmp_path):
    """Decoding does not import the module that a stored name refers to, even if Python could find it."""
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    program = """
import sys
from snapstore.state.tree.decode import decode_plain
for name in ("trap", "trap.sub", "antigravity", "this"):
    decode_plain(["enum", name, "X", "A", 1])
    for kind, plain in (("dataclass", ["dict", [], []]), ("subclass", "s")):
        decode_plain(["object", kind, name, "X", plain])
    decode_plain(["object", "namedtuple", name, "X", ["tuple", []], []])
print({"trap", "antigravity", "this"} & sys.modules.keys())
"""
    run = run_python("-c", program, cwd=tmp_path)
    assert run.stdout == "set()\n", run.stderr


@given(
    st.sampled_from(["path", "date", "time", "datetime", "timedelta", "timezone", "enum", "object"]),
    st.lists(
        st.one_of(
            st.sampled_from(
                ["dataclass", "subclass", "namedtuple", "namespace", "posix", "Config", "Point", "2024-01-01"]
            ),
            st.integers(-3, 3),
            st.none(),
            st.sampled_from(
                [["dict", ["lr"], [1]], ["tuple", [1, 2]], ["list", []], ["x", "y"], ["timedelta", 0, 0, 0]]
            ),
        ),
        max_size=6,
    ),
)
def test_any_node_decodes_or_is_refused(tag, fields):
    for classes in ((), ALL):
        try:
            decoded([tag, *fields], classes)
        except (FormatError, InvalidInputError):
            continue


def test_numpy_scalars_are_no_subclasses_of_float():
    same(again([np.float64(1), np.str_("x")]), [np.float64(1), np.str_("x")])


# --- values whose plain form would lose a part of them


@dataclasses.dataclass
class FieldsAndText(str):
    y: int = 0


@dataclasses.dataclass
class FieldsAndMembers(list):
    y: int = 0


class WithSlots(dict):
    __slots__ = ("q",)


class TextWithSlots(str):
    __slots__ = ("__hidden",)

    def hide(self):
        self.__hidden = 1
        return self


class SlottedBase:
    __slots__ = ("q",)


@dataclasses.dataclass
class FieldsAndSlots(SlottedBase):
    x: int = 1


def _with_slot(value):
    value.q = 1
    return value


@pytest.mark.parametrize(
    "value",
    [
        FieldsAndText.__new__(FieldsAndText, "hey"), FieldsAndMembers(3), _with_slot(WithSlots(a=1)),
        TextWithSlots("x").hide(), _with_slot(FieldsAndSlots()),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_that_would_lose_a_part_is_refused(value):
    with pytest.raises(UnsupportedLeafError, match=rf"^v: {type(value).__name__} "):
        flatten({"v": value})
    assert flatten({"v": [WithSlots(a=1), TextWithSlots("x"), FieldsAndSlots()]})[0].name == ""


class TwoNames(tuple):
    _fields = ("x", "y")


class NumberedNames(tuple):
    _fields = (1,)


class NoModule(dict):
    __module__ = None


def _numbered():
    namespace = types.SimpleNamespace(x=1)
    vars(namespace)[2] = 3
    return namespace


@pytest.mark.parametrize(
    "value",
    [TwoNames((1,)), TwoNames(), NumberedNames((1,)), NoModule(a=1), _numbered()],
    ids=lambda value: type(value).__name__,
)
def test_a_form_that_no_restore_accepts_is_refused(value):
    with pytest.raises(UnsupportedLeafError, match=rf"^v: {type(value).__name__} has no stored form: .*convert it"):
        flatten({"v": value})


class NoFields(typing.NamedTuple):
    pass


def test_a_named_tuple_without_fields_leaves_empty_tuples_alone():
    state = {"a": (), "none": NoFields(), "b": [1, ()], "c": [NoFields()], "deep": {"x": ()}}
    same(again(state), {"a": (), "none": (), "b": [1, ()], "c": [()], "deep": {"x": ()}})
    decoded = Decoded(types=Types([NoFields]))
    made = again(state, decoded=decoded)
    into = {"a": (), "none": NoFields(), "b": [0, ()], "c": [], "deep": {"x": (1,)}}
    again(state, into=into, decoded=Decoded(types=Types(into=into)))
    for found in (made, into):
        assert found == state
        empty = (found["a"], found["b"][1], found["deep"]["x"], found["none"], found["c"][0])
        assert [type(value) for value in empty] == [tuple, tuple, tuple, NoFields, NoFields]


class Ordered(OrderedDict):
    pass


def test_a_subclass_of_ordereddict_keeps_its_order():
    value = Ordered(a=1, b=2, c=3)
    value.move_to_end("a")
    with Repository.create(MemoryStore()) as repository:
        repository.save({"v": value}, run="r", step=0)
        assert list(repository.restore("r@0", types=[Ordered])["v"]) == ["b", "c", "a"]
        assert list(repository.restore("r@0")["v"]) == ["b", "c", "a"]


class Attributes(dict):
    """A dict whose keys are attributes; a missing one raises KeyError."""

    def __getattr__(self, name):
        return self[name]


class Unready:
    def __getattr__(self, name):
        raise RuntimeError("not initialised")


def test_values_whose_attributes_cannot_be_looked_up():
    state = {"config": Attributes(rate=0.5), "list": [Attributes(a=1), Attributes(a=2)], "w": torch.ones(3)}
    found = again(state)
    assert (dict(found["config"]), [dict(one) for one in found["list"]]) == ({"rate": 0.5}, [{"a": 1}, {"a": 2}])
    with pytest.raises(UnsupportedLeafError, match=r"m: .*Unready has no stored form"):
        again({"m": Unready()})
