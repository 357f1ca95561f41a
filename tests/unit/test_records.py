"""Small objects, their names, steps and keys round-trip. No damaged or forged object is accepted."""

import hashlib
import os

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.checks import check_name, check_step
from snapstore.errors import FormatError, IntegrityError, InvalidInputError
from snapstore.format import records
from snapstore.format.keys import NAME, manifest_key, pack_key, parse_record_key, record_key, sha256_names
from snapstore.format.records import Config, Done, ManifestList, ManifestRef, Mark, RunPolicies, Session, Snapshot, Wait
from snapstore.protocol.liveness import boot_id, this_session
from snapstore.text import human_bytes, some

ID = "0123456789abcdef" * 2
SHA = hashlib.sha256(b"").hexdigest()
REF = ManifestRef(part="", rank=0, sha256=SHA, header_sha256=SHA, size_bytes=10, logical_bytes=20)
OBJECTS = [
    Config(
        uuid=ID,
        version=1,
        chunk_bytes=1 << 20,
        digest_seed=2**64 - 1,
        features=[],
        created=1.5,
        writer="snapstore 0.1.0",
    ),
    Snapshot(
        id=ID, run="exp1", step=7, seq=3, state="committed", write_id=ID, manifests=[REF], metrics={"loss": 0.5},
        logical_bytes=20,
    ),
    Session(id=ID, key="snapshots/a/b", host="h", boot_id="b", pid=1, started=2.0),
    RunPolicies(run="exp1", revision=2, policies=[{"kind": "last", "n": 3}]),
    Mark(id=ID, started=1.0, packs=bytes(64), manifests=bytes(32)),
    Wait(id=ID, sessions=[ID]),
    Done(id=ID, deleted_objects=1, deleted_bytes=2),
    ManifestList(save_id=bytes(16), snapshot=bytes(range(16)), revision=3, manifests=bytes(64)),
]  # fmt: skip
kinds = pytest.mark.parametrize("value", OBJECTS, ids=lambda v: type(v).__name__)


@kinds
def test_round_trip(value):
    assert records.unpack(records.encode(value), type(value), "key") == value


@kinds
def test_every_flip_and_truncation_is_found(value):
    good = records.encode(value)
    for at in range(len(good)):
        for mask in (0x01, 0x80):
            bad = bytearray(good)
            bad[at] ^= mask
            with pytest.raises((FormatError, IntegrityError), match=r"^the key: "):
                records.unpack(bytes(bad), type(value), "the key")
        with pytest.raises(IntegrityError):
            records.unpack(good[:at], type(value), "the key")
    with pytest.raises(IntegrityError):
        records.unpack(good + b"\0", type(value), "the key")


@kinds
def test_an_object_is_believed_under_its_own_key_alone(value):
    key, data = records.key_of(value), records.encode(value)
    assert records.decode(data, type(value), key) == value
    for other in {"config", f"sessions/{ID}", f"gc/{ID}.mark", "policies/exp1.3", f"{key}0"} - {key}:
        with pytest.raises(IntegrityError, match=f"{other}: holds the object of {key}"):
            records.decode(data, type(value), other)


def sealed(kind, payload, version=1):
    head = records.ENVELOPE.pack(b"SNAP", kind, version, 0, len(payload), 0)[:16]
    return head + records.xxhash.xxh3_64_intdigest(head + payload).to_bytes(8, "little") + payload


def test_another_version_is_refused_by_name_whatever_it_holds():
    """An object of another format version is refused before its payload is decoded, and the error names the version."""
    with pytest.raises(FormatError, match=r"config: format version 2, this snapstore \S+ reads version 1; use the"):
        records.unpack(sealed(1, b"\xc1", version=2), Config, "config")


@kinds
def test_an_object_of_another_kind_is_refused(value):
    for kind in {Config, Done} - {type(value)}:
        with pytest.raises(FormatError, match="object kind"):
            records.unpack(records.encode(value), kind, "key")


def test_unknown_keys_are_ignored_and_missing_ones_are_not():
    payload = msgspec.to_builtins(OBJECTS[5])
    assert records.unpack(sealed(6, msgspec.msgpack.encode({**payload, "new": [1]})), Wait, "key") == OBJECTS[5]
    with pytest.raises(FormatError, match="missing required field `sessions`"):
        records.unpack(sealed(6, msgspec.msgpack.encode({"id": ID})), Wait, "key")


RECORD = msgspec.msgpack.decode(records.encode(OBJECTS[1])[records.ENVELOPE.size :])


@pytest.mark.parametrize("name", sorted(RECORD))
def test_each_key_of_a_record_is_there(name):
    """The struct has defaults for the code that makes records; stored ones have every key that is not optional."""
    assert "manifest_list" not in RECORD
    less = {key: value for key, value in RECORD.items() if key != name}
    with pytest.raises(FormatError, match=f"key: Snapshot does not decode: Object missing required field `{name}`"):
        records.unpack(sealed(2, msgspec.msgpack.encode(less)), Snapshot, "key")


@pytest.mark.parametrize("name", ["depth", "chunks", "new_chunks", "logical_bytes", "stored_bytes"])
def test_no_number_of_a_record_is_negative(name):
    with pytest.raises(FormatError, match=f"Expected `int` >= 0 - at `\\$.{name}`"):
        records.unpack(sealed(2, msgspec.msgpack.encode(RECORD | {name: -1})), Snapshot, "key")


HOSTILE = {
    "not UTF-8": b"\x82\xa2id\xa2\xff\xfe\xa8sessions\x90",
    "a key that is not UTF-8": b"\x81\xa2\xff\xfe\x01",
    "nested a million deep": b"\x81\xa2id" + b"\x91" * 1_000_000,
    "a huge array": b"\x82\xa2id\xa1a\xa8sessions\xdd\xff\xff\xff\xff",
    "an array": b"\x90",
    "nothing": b"",
    "wrong types": b"\x82\xa2id\x01\xa8sessions\x02",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_payloads_are_format_errors(what):
    with pytest.raises(FormatError, match="key: Wait does not decode"):
        records.unpack(sealed(6, HOSTILE[what]), Wait, "key")


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (OBJECTS[0], {"uuid": "../../../../tmp/elsewhere"}),
        (OBJECTS[0], {"uuid": ID + "\n"}),
        (REF, {"sha256": "../" * 20 + "abcd"}),
        (REF, {"sha256": SHA.upper()}),
        (REF, {"size_bytes": -1}),
    ],
)
def test_forged_names_are_refused_before_they_become_paths(value, changes):
    forged = msgspec.structs.replace(value, **changes)
    if isinstance(forged, ManifestRef):
        forged = msgspec.structs.replace(OBJECTS[1], manifests=[forged])
    with pytest.raises(FormatError):
        records.unpack(records.encode(forged), type(forged), "key")


GOOD_NAMES = ["a", "A", "0", "exp1", "a.b_c-d", "x" * 128]
BAD_NAMES = ["", ".", "..", ".a", "-a", "_a", "a/b", "a b", "a\n", "é", "x" * 129, "x" * 300, "a@b", "a\0", None, 3]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_good_names(name):
    assert check_name("run", name) == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_shown_short(name):
    with pytest.raises(InvalidInputError, match=r"^run .*: expected 1 to 128 characters") as caught:
        check_name("run", name)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("step", [0, 1, 10**12 - 1, np.int64(7), np.array(7)])
def test_good_steps(step):
    assert check_step(step) == step


@pytest.mark.parametrize(
    "step", [-1, 10**12, 1 << 200, 1.0, "1", None, True, np.array([1, 2]), np.array(1.5), np.float64(1)]
)
def test_bad_steps(step):
    with pytest.raises(InvalidInputError, match=r"^step "):
        check_step(step)


@given(
    st.from_regex(NAME, fullmatch=True),
    st.integers(0, records.MAX_STEP),
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.integers(0, 10**9 - 1),
)
def test_record_keys_round_trip(run, step, snapshot_id, revision):
    key = record_key(run, step, snapshot_id, revision)
    assert parse_record_key(key) == (run, step, snapshot_id, revision)


@pytest.mark.parametrize(
    "key",
    [
        f"snapshots/exp1/7-{ID}.0",
        f"snapshots/exp1/000000000007-{ID}.00",
        f"snapshots/exp1/000000000007-{ID}",
        f"snapshots/exp1/000000000007-{ID.upper()}.0",
        f"snapshots/exp1/000000000007-{ID}.0\n",
        f"snapshots/a/b/000000000007-{ID}.0",
        f"snapshots/../000000000007-{ID}.0",
        f"/snapshots/exp1/000000000007-{ID}.0",
        "snapshots/exp1/000000000007-.0",
        "",
    ],
)
def test_other_keys_are_no_records(key):
    assert parse_record_key(key) is None


def test_keys_and_names():
    assert REF.key == f"manifests/{SHA[:2]}/{SHA}" == manifest_key(SHA)
    assert pack_key(SHA) == f"packs/{SHA[:2]}/{SHA}"
    assert sha256_names(bytes(32) + b"\xff" * 32) == ["00" * 32, "ff" * 32]
    assert OBJECTS[4].keys() == {pack_key("00" * 32), manifest_key("00" * 32)}
    snapshot = OBJECTS[1]
    assert (snapshot.key, snapshot.ref) == (f"snapshots/exp1/000000000007-{ID}.0", "exp1@7")
    assert snapshot.ratio == 0.0
    assert msgspec.structs.replace(snapshot, logical_bytes=30, stored_bytes=10).ratio == 3.0


def test_a_revision_has_a_write_id_of_its_own():
    revised = OBJECTS[1].revised(tags=["best"])
    assert (revised.revision, revised.tags, revised.id) == (1, ["best"], ID)
    assert revised.write_id != OBJECTS[1].write_id


def test_a_session_names_this_process():
    session = this_session(ID, "snapshots/x")
    assert (session.id, session.key, session.pid) == (ID, "snapshots/x", os.getpid())
    assert session.boot_id == boot_id()


def test_ids_are_random_hex():
    assert len({records.new_id() for _ in range(100)}) == 100
    assert len(bytes.fromhex(records.new_id())) == 16


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (999, "999B"), (1000, "1.0kB"), (3.2e9, "3.2GB"), (5e15, "5000.0TB"), (-2e6, "-2.0MB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


def test_some_of_many_names():
    assert some(["a", "b"]) == "a, b"
    assert some([str(n) for n in range(12)], 10) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_a_record_whose_sizes_disagree_is_not_read():
    """A record whose size is not the sum over its manifests is refused, so `log` never shows a wrong size."""
    snapshot = msgspec.structs.replace(OBJECTS[1], logical_bytes=1000)
    with pytest.raises(FormatError, match="1000 bytes, the sum over its manifests is 20"):
        records.decode(records.encode(snapshot), Snapshot, snapshot.key)
    twice = msgspec.structs.replace(OBJECTS[1], manifests=[REF, REF], logical_bytes=40)
    with pytest.raises(FormatError, match="two manifests of one part and rank"):
        records.decode(records.encode(twice), Snapshot, twice.key)
    below = ManifestRef(part="o", rank=0, sha256=SHA, header_sha256=SHA, size_bytes=1, logical_bytes=-20)
    with pytest.raises(FormatError, match="Expected `int` >= 0"):
        records.decode(
            records.encode(msgspec.structs.replace(snapshot, manifests=[REF, below])), Snapshot, snapshot.key
        )
