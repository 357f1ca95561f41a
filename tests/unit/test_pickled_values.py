"""Files of torch with NumPy arrays, namespaces, configs, paths and times give plain values, without their code."""

import argparse
import collections
import datetime
import io
import operator
import pathlib
import pickle
import random
import threading
import types
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.repositories import OPTIONS
from kit.samples import examples
from kit.states import same
from snapstore import InvalidInputError, Repository
from snapstore.convert import files, import_checkpoints
from snapstore.storage.memory import MemoryStore

UTC = datetime.UTC
FACTORY = collections.defaultdict(list, a=[1], b=[np.float32(2)])
#: Values that come back as they are.
EXACT = {
    "scalars": [
        np.float64(2.5),
        np.bool_(True),
        np.int8(-3),
        np.complex64(1j),
        np.str_("é"),
        np.datetime64("2020-01-02"),
    ],
    "arrays": [
        np.arange(6.0).reshape(2, 3).T,
        np.zeros((0, 3)),
        np.array(7),
        np.arange(3, dtype=">i4"),
        np.ones(2, "?"),
    ],
    "texts": np.array(["a", "bcd", ""]),
    "times": np.array(["2020-01-01"], "M8[3D]"),
    "dtype": [np.dtype("f4"), np.dtype(">u2")],
    "namespace": argparse.Namespace(lr=0.1, out=pathlib.Path("/x/y"), inner=argparse.Namespace(k=[np.int64(3)])),
    "simple": types.SimpleNamespace(a=[1, (np.float32(1.0),)]),
    "paths": [pathlib.Path("a/b"), pathlib.PurePosixPath("/"), pathlib.PureWindowsPath("c:\\x")],
    "dates": [datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3, 4, 5, 6, UTC), datetime.time(1, 2)],
    "spans": [datetime.timedelta(1, 2, 3), datetime.timezone(datetime.timedelta(hours=2), "x")],
    "defaults": [FACTORY, collections.defaultdict(None, x=1), collections.defaultdict(int)],
    "deque": collections.deque([1, [np.float64(2)]], 3),
    "sets": [frozenset([1, "a"]), {np.int64(4)}, {}],
    "python": random.Random(1).getstate(),
    "numpy": np.random.RandomState(1).get_state(),
    "bytes": [b"", b"x" * 300, bytearray(b"y")],
    "keys": {np.int64(4): 1, pathlib.Path("a"): 2, datetime.date(2020, 1, 2): 3},
}


def written(value, *, zipped=True):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return file


def read(value, *, zipped=True):
    return files.load_torch(written(value, zipped=zipped), "x.pt")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_values_come_back_exactly(name, zipped):
    found = read({name: EXACT[name], "w": torch.ones(2)}, zipped=zipped)
    if name in ("namespace", "simple"):
        assert repr(found[name]) == repr(EXACT[name])
        return
    same(found[name], EXACT[name])


def test_all_of_them_survive_a_repository(tmp_path):
    torch.save(EXACT | {"w": torch.ones(2)}, tmp_path / "x.pt")
    with Repository.create(MemoryStore(), options=OPTIONS) as repository:
        list(import_checkpoints(repository, [tmp_path / "x.pt"], run="r"))
        found = repository.restore("r@0")
    assert repr(found["namespace"]) == repr(EXACT["namespace"])
    assert found["arrays"][0].flags.f_contiguous
    for name in EXACT.keys() - {"namespace", "simple"}:
        same(found[name], EXACT[name])


def test_configs_of_omegaconf_are_plain_values():
    omegaconf = pytest.importorskip("omegaconf")
    values = {"a": 1, "b": [1, 2.0, "x", None, True, {"q": pathlib.Path("z")}], "c": {}, "d": b"x", "e": 1.5}
    config = omegaconf.OmegaConf.create(values | {"f": "${a}", "g": "???"})
    found = read({"cfg": config, "inner": [config.b], "typed": omegaconf.DictConfig({"x": 1}, element_type=int)})
    assert found == {"cfg": values | {"f": "${a}", "g": "???"}, "inner": [values["b"]], "typed": {"x": 1}}
    assert {type(found["cfg"]), type(found["cfg"]["b"]), type(found["inner"][0])} == {dict, list}
    # so Lightning stores hyperparameters
    found = read({"hyper_parameters": config, "hparams_type": type(config)})
    assert found["hparams_type"] == "omegaconf.dictconfig.DictConfig"


def test_generators_are_their_states():
    for bits in (np.random.PCG64(3), np.random.MT19937(3), np.random.Philox(3), np.random.SFC64(3)):
        generator, python, old = np.random.Generator(bits), random.Random(4), np.random.RandomState(5)
        found = read([generator, python, old, bits])
        expected = generator.random(4), python.random(), old.random()
        generator.bit_generator.state = found[0]
        assert (generator.random(4) == expected[0]).all()
        generator.bit_generator.state = found[3]
        assert (generator.random(4) == expected[0]).all()
        python.setstate(found[1])
        old.set_state(found[2])
        assert (python.random(), old.random()) == expected[1:]


def test_dicts_of_lightning_are_dicts():
    data = pytest.importorskip("lightning.fabric.utilities.data")
    found = read({"hyper_parameters": data.AttributeDict(lr=np.float64(0.5), name="x")})
    assert type(found["hyper_parameters"]) is dict
    same(found["hyper_parameters"], {"lr": np.float64(0.5), "name": "x"})


def test_values_that_are_shared_stay_shared():
    array, names = np.arange(4.0), argparse.Namespace(a=1)
    tree = {"a": array, "b": (array, names), "c": [names, FACTORY], "d": FACTORY}
    tree["self"] = tree["c"]
    found = read(tree)
    assert found["a"] is found["b"][0]
    assert found["b"][1] is found["c"][0]
    assert found["c"][1] is found["d"]
    assert found["self"] is found["c"]
    assert type(found["d"]) is collections.defaultdict


class Made:
    """Is pickled as a call, with a state to set."""

    def __init__(self, *made):
        self.made = made

    def __reduce__(self):
        return self.made


ARRAY = (np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"))
DTYPE = (np.dtype, ("i8", False, True))
UNIT = (4, "<", None, None, None, -1, -1, 0, (None, (b"D],O[", 1, 1, 1)))
ROWS = torch.zeros(1, 2).expand(300, 2)  # a few bytes can claim any number of rows
HOSTILE = {
    **{f"rows in {kind.__name__}": Made(kind, (ROWS,)) for kind in (set, frozenset, collections.deque)},
    **{f"rows in {kind.__name__}": Made(kind, (ROWS,)) for kind in (collections.Counter, collections.OrderedDict)},
    "rows as attributes": Made(collections.OrderedDict, (), ROWS),
    "rows of rows": Made(frozenset, (Made(collections.deque, (ROWS,)),)),
    "size": Made(*ARRAY, (1, (10**12,), np.dtype("f8"), False, b"")),
    "negative": Made(*ARRAY, (1, (-1, -8), np.dtype("f8"), False, b"x" * 64)),
    "negative size": Made(*ARRAY, (1, (-8,), np.dtype("i1"), False, b"x" * 8)),
    "shape": Made(*ARRAY, (1, [8], np.dtype("i1"), False, b"x" * 8)),
    "dimensions": Made(*ARRAY, (1, (1,) * 1000, np.dtype("i1"), False, b"x")),
    "short state": Made(*ARRAY, (1, (8,))),
    "no state": Made(*ARRAY),
    "huge": Made(*ARRAY, (1, (0, 10**30), np.dtype("f8"), False, b"")),
    "text for a dtype": Made(*ARRAY, (1, (8,), "i1", False, b"x" * 8)),
    "items of no size": Made(*ARRAY, (1, (10**9,), np.dtype("U0"), False, b"")),
    "fields": Made(*ARRAY, (1, (1,), Made(*DTYPE, (3, "<", (1, 2), None, None, -1, -1, 63)), False, b"x" * 8)),
    "unit": Made(*ARRAY, (1, (1,), Made(np.dtype, ("M8",), UNIT), False, b"x" * 8)),
    "name of a dtype": Made(*ARRAY, (1, (1,), Made(np.dtype, ("f8,O", False, True)), False, b"x" * 16)),
    "long scalar": Made(np._core.multiarray.scalar, (np.dtype("f8"), b"x" * 9)),
    "scalar of objects": Made(np._core.multiarray.scalar, (np.dtype("O"), {"a": 1})),
    "characters": Made(np._core.multiarray.scalar, (np.dtype("U1"), b"\xff\xff\xff\x7f")),
    "attributes": Made(argparse.Namespace, (), {1: 2}),
    "no attributes": Made(argparse.Namespace, (), [1, 2]),
    "month": Made(datetime.date, (b"\x07\xe4\x63\x01",)),
    "zone": Made(datetime.datetime, (b"\x07\xe4\x01\x02\x03\x04\x05\x00\x00\x06", "zone")),
    "path of numbers": Made(pathlib.PosixPath, (1, 2)),
    "a type called": Made(list, ((1, 2),)),
    "a record called": Made(operator.itemgetter, (1,)),
    "maxlen": Made(collections.deque, ([], "x")),
    "key": {np.dtype("f4"): 1},
    "an object in a default": Made(collections.defaultdict, (print,)),
}  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arguments_are_refused(name, zipped):
    with pytest.raises(InvalidInputError, match=r"^x\.pt: ") as caught:
        read({"a": HOSTILE[name], "n": np.float64(1)}, zipped=zipped)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([{}, 1], object), "package (dtype 'O8')"),
        (np.zeros(2, "f4,i4"), "package (dtype 'V8')"),
        (np.ones(1).view(np.recarray), "refused: it holds a Python object (numpy."),
        (np.ma.array([1.0]), "refused: it holds a Python object (numpy.ma"),
        (collections.defaultdict(dict.fromkeys, a=1), "refused: it holds a Python object ("),
        (Made(print, ("x",)), "refused: it holds a Python object (print)"),
    ],
    ids=["objects", "fields", "records", "masked", "factory", "call"],
)
def test_what_is_not_plain_is_refused_by_name(value, expected):
    with pytest.raises(InvalidInputError) as caught:
        read({"n": np.float64(1), "a": value})
    assert expected in str(caught.value)


def test_a_type_as_a_value_is_named_by_its_path(tmp_path):
    torch.save({"cfg": {"kind": list, "n": np.float64(1)}}, tmp_path / "x.pt")
    with (
        Repository.create(MemoryStore(), options=OPTIONS) as repository,
        pytest.raises(InvalidInputError, match=r"cfg\.kind"),
    ):
        list(import_checkpoints(repository, [tmp_path / "x.pt"], run="r"))


def doubled(make):
    value = make([1])
    for _ in range(60):
        value = make([value, value])
    return value


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make",
    [
        lambda values: argparse.Namespace(**{f"v{at}": value for at, value in enumerate(values)}),
        lambda values: types.SimpleNamespace(**{f"v{at}": value for at, value in enumerate(values)}),
        lambda values: collections.defaultdict(list, enumerate(values)),
        collections.deque,
    ],
    ids=["namespace", "simple", "default", "deque"],
)
def test_values_that_are_named_again_and_again_are_refused(make):
    with pytest.raises(InvalidInputError, match=r"x\.pt: its \d+ values refer to each other"):
        read({"a": doubled(make)})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "long",
    [
        pathlib.PurePosixPath("x" * 100_000),
        datetime.timezone(datetime.timedelta(hours=1), "x" * 100_000),
        np.bytes_(b"x" * 100_000),
        np.str_("x" * 100_000),
        np.void(b"x" * 100_000),
    ],
    ids=["path", "zone", "bytes", "text", "void"],
)
def test_a_long_value_that_is_named_again_and_again_is_refused(long):
    with pytest.raises(InvalidInputError, match=r"x\.pt: its \d+ values refer to each other"):
        read({"a": [[long] * 300] * 300})
    assert len(read({"a": [long] * 3})["a"]) == 3


WHOLE = written({name: EXACT[name] for name in EXACT.keys() - {"python", "numpy", "bytes"}}, zipped=False).getvalue()


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_flipped_byte_gives_values_or_one_error(flips):
    data = bytearray(WHOLE)
    for place, bits in flips:
        data[place] ^= bits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(InvalidInputError):
            files.load_torch(io.BytesIO(data), "x.pt")


def test_what_the_program_allows_stays_its_own():
    class Own(argparse.Namespace):
        pass

    Own.__module__, Own.__qualname__ = "argparse", "Namespace"
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([(Own, "argparse.Namespace")]):
        found = read({"a": argparse.Namespace(b=np.float64(1))})
        assert type(found["a"]) is Own
        assert set(torch.serialization.get_safe_globals()) == {*before, (Own, "argparse.Namespace")}
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(written(argparse.Namespace()), weights_only=True)


def test_threads_read_at_the_same_time():
    data = written({"a": np.arange(3), "b": argparse.Namespace(c=FACTORY)}).getvalue()
    errors, before = [], set(torch.serialization.get_safe_globals())

    def many():
        for _ in range(20):
            try:
                assert files.load_torch(io.BytesIO(data), "x.pt")["a"].tolist() == [0, 1, 2]
            except Exception as error:  # noqa: BLE001
                errors.append(error)

    threads = [threading.Thread(target=many) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert errors == []
    assert set(torch.serialization.get_safe_globals()) == before
