"""Keys with equal hashes do not make a dict, a set or a map of msgpack take quadratic time."""

import itertools
import random
from collections import Counter, OrderedDict, defaultdict

import msgspec
import numpy as np
import pytest

from kit.forge import World, little_time, with_section
from snapstore.catalog import policy_store
from snapstore.errors import FormatError, UnsupportedLeafError
from snapstore.format import records
from snapstore.format.manifests import manifest
from snapstore.format.records import RunPolicies
from snapstore.state.tree.decode import decode_plain, unpack_nodes
from snapstore.state.tree.encode import encode_plain
from snapstore.state.values.containers import MAX_ALIKE

MODULUS = 2**61 - 1  # CPython's hash of a number is the number modulo this
N = 15_000  # if they collide, these take minutes; else milliseconds

ALIKE = {
    "ints": lambda i: (i + 1) * MODULUS,
    "complex numbers": lambda i: complex(-1_000_003.0 * i, i),
    "NumPy's": lambda i: np.complex128(complex(-1_000_003.0 * i, i)),
    "tuples": lambda i: ("a", ((i + 1) * MODULUS,)),
    "sets": lambda i: frozenset([(i + 1) * MODULUS]),
}
NODES = {
    "dict": lambda keys: ["dict", keys, [None] * len(keys)],
    "odict": lambda keys: ["odict", keys, [None] * len(keys)],
    "counter": lambda keys: ["counter", keys, [1] * len(keys)],
    "defaultdict": lambda keys: ["defaultdict", "int", keys, [1] * len(keys)],
    "set": lambda keys: ["set", keys],
    "frozenset": lambda keys: ["frozenset", keys],
}


def alike(kind, count=N):
    keys = [ALIKE[kind](i) for i in range(count)]
    assert len(set(map(hash, keys))) == 1
    return keys


@pytest.mark.parametrize("kind", ALIKE)
def test_values_of_one_hash(kind):
    """Only hashes of str and bytes are salted. Mitigation: hashes are counted before a dict or a set is built."""
    key_nodes = [encode_plain((key,))[1][0] for key in alike(kind)]
    for made in NODES.values():
        with little_time(), pytest.raises(FormatError, match="256 keys or members have one hash"):
            decode_plain(made(key_nodes))


@pytest.mark.parametrize("kind", ALIKE)
def test_saves_refuse_what_restores_would(kind):
    keys = alike(kind)[: MAX_ALIKE + 1]
    counted = Counter()
    for key in keys:
        counted[key] = 1
    mappings = [dict.fromkeys(keys), OrderedDict.fromkeys(keys), defaultdict(int, counted), counted]
    for value in (*mappings, set(keys), frozenset(keys), {frozenset(keys): 1}):
        with little_time(), pytest.raises(UnsupportedLeafError, match="more than 256 keys of one hash"):
            encode_plain({"state": value})


@pytest.mark.parametrize("kind", ALIKE)
def test_as_many_as_may_be(kind):
    keys = alike(kind, MAX_ALIKE)
    for value in (dict.fromkeys(keys), set(keys)):
        assert decode_plain(encode_plain(value)) == value


def test_keys_that_people_have():
    """Ordinary keys stay below the limit; powers of two come closest, with 246 of one hash."""
    rng = random.Random(1)
    for keys in (
        range(50_000),
        [i << 44 for i in range(15_000)],
        [-i for i in range(1, 15_000)],
        [2.0**i for i in range(-1074, 1024)] + [-(2.0**i) for i in range(-1074, 1024)],
        [2**i for i in range(15_000)],
        [rng.random() for _ in range(15_000)],
        [i / 10 for i in range(15_000)],
        [(rank, layer) for rank in range(100) for layer in range(100)],
        [complex(a / 4, b / 4) for a in range(-80, 80) for b in range(-80, 80)],
        [np.int64(i) for i in range(10_000)],
        [np.float32(i) / 3 for i in range(10_000)],
        [frozenset(c) for size in range(12) for c in itertools.combinations(range(12), size)],
        [f"layer.{i}" for i in range(10_000)],
        [i.to_bytes(4, "little") for i in range(10_000)],
        [i * 3600 * 10**9 for i in range(10_000)],
    ):
        value = dict.fromkeys(keys)
        with little_time():
            assert decode_plain(encode_plain(value)) == value


def packed_map(count=N):
    """Return a msgpack map whose keys are arrays: msgspec makes them tuples of one hash, which would take minutes."""
    # Numbers of different hashes whose tuples have one hash are expensive to find. Floats of one hash are not, and all
    # tuples of them have one hash.
    floats = [2.0 ** (e + 61 * k) for e in (3,) for k in range(-17, 17)]
    keys = itertools.islice(itertools.product(floats, repeat=4), count)
    body = b"".join(msgspec.msgpack.encode(key) + b"\xc0" for key in keys)
    return b"\xdf" + count.to_bytes(4, "big") + body


def test_a_map_where_a_node_should_stand():
    """msgspec decodes a map's keys whatever they are. Mitigation: packed nodes are searched for maps first."""
    bomb = packed_map()
    assert len({hash(key) for key in msgspec.msgpack.decode(packed_map(100))}) == 1
    world = World()
    for packed in (bomb, b"\x92\xa4list\x91" + bomb):
        with little_time(), pytest.raises(FormatError, match="holds a map"):
            unpack_nodes(packed)
        with little_time(), pytest.raises(FormatError, match="holds a map"):
            manifest.decode(with_section(world.manifest(), "tree", packed, len(packed), 0), "here")


def test_a_map_in_the_metadata_or_the_policies():
    """Mitigation: metadata is unpacked like trees, and the arguments of policies are typed."""
    bomb = msgspec.Raw(packed_map(25_000))
    for metadata, why in ((bomb, "holds a map"), (msgspec.Raw(packed_map(30_000)), "expected at most 1048576")):
        world = World()
        world.commit(world.manifest(), metadata_node=metadata)
        with little_time(), world.open() as repo, pytest.raises(FormatError, match=why):
            assert repo.snapshot("r@0").metadata
    data = records.encode(RunPolicies(run="r", revision=0, policies=[{"kind": "KeepLast", "n": bomb}]))
    with little_time(), pytest.raises(FormatError, match="does not decode"):
        policy_store.decode(data, "policies/r.0")
    data = records.encode(RunPolicies(run="r", revision=0, policies=[bomb]))
    with little_time(), pytest.raises(FormatError, match="does not decode"):
        policy_store.decode(data, "policies/r.0")


def test_nodes_that_look_like_maps_are_read():
    """The search for maps skips numbers, texts and bytes, whatever they contain."""
    rng = np.random.default_rng(2)
    value = [
        *(float(x) for x in rng.standard_normal(500)), *(int(x) for x in rng.integers(-(2**63), 2**63 - 1, 500)),
        *(rng.bytes(n) for n in (*range(300), 4000)), *("\u00df\u07ff\uffde" * n for n in range(200)),
        2**200, "x" * 70_000, (2**32,) * 20, *({i: None} for i in range(300)), *([[]] * n for n in (3, 16, 66_000)),
    ]  # fmt: skip
    assert decode_plain(unpack_nodes(msgspec.msgpack.encode(encode_plain(value)))) == value


def test_every_kind_of_token_is_stepped_over():
    """All first bytes of msgpack but those of maps and arrays and the reserved one, each before a map to be found."""
    tokens = {
        0xC4: b"\xc4\x02\xff\xff", 0xC5: b"\xc5\x00\x02\xff\xff", 0xC6: b"\xc6\x00\x00\x00\x02\xff\xff",
        0xC7: b"\xc7\x02\x01\xff\xff", 0xC8: b"\xc8\x00\x02\x01\xff\xff", 0xC9: b"\xc9\x00\x00\x00\x02\x01\xff\xff",
        0xD9: b"\xd9\x02ab", 0xDA: b"\xda\x00\x02ab", 0xDB: b"\xdb\x00\x00\x00\x02ab",
        **{first: bytes([first]) + b"a" * (first - 0xA0) for first in range(0xA0, 0xC0)},
        **{0xCA + i: bytes([0xCA + i]) + bytes(n) for i, n in enumerate((4, 8, 1, 2, 4, 8, 1, 2, 4, 8))},
        **{0xD4 + i: bytes([0xD4 + i]) + bytes(1 + n) for i, n in enumerate((1, 2, 4, 8, 16))},
        **{first: bytes([first]) for first in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3)},
    }  # fmt: skip
    rest = {*range(0x80, 0xA0), 0xC1, 0xDC, 0xDD, 0xDE, 0xDF}
    assert set(range(256)) == tokens.keys() | rest
    for token in tokens.values():
        with pytest.raises(FormatError, match="holds a map"):
            unpack_nodes(b"\x93" + token + b"\x80\xc0")
        unpack_nodes(b"\x91" + token)


@pytest.mark.parametrize(
    "metadata",
    [10**5000, [-(10**5000)], {10**5000: 1, (10**5000, 1): 2}, {1, 10**5000}, "\udc80", {"\udc80": 1}, 2**4096],
    ids=["int", "list", "keys", "set", "surrogate", "surrogate key", "edge"],
)
def test_metadata_that_python_does_not_print(metadata, tmp_path):
    """Integers of over 4,300 digits can be saved, but Python does not print them. Mitigation: print hexadecimal."""
    from kit.shell import invoke
    from snapstore import Repository

    with Repository.create(tmp_path / "repo") as repo:
        repo.save({}, run="r", step=0, metadata=metadata)
        assert repo.snapshot("r@0").metadata == metadata
    for args in (["show", "r@0"], ["show", "r@0", "--json"], ["log", "--json"]):
        result = invoke(args, env={"SNAPSTORE_REPO": str(tmp_path / "repo")})
        assert result.exit_code == 0, result.output
