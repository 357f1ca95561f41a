"""Every verb that writes records, headers or references again keeps the keys that a later release has added to them.

A test adds such keys by hand, runs one verb, and reads the raw msgpack of the record that rules after it.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import foreign
from kit.forge import reheader
from kit.objects import keys_of, replace
from kit.rank_snapshots import RankWriter
from kit.repositories import created, opened, save
from snapstore import SnapstoreError, UnknownFormatError
from snapstore.format import open_maps, records
from snapstore.format.keys import manifest_key
from snapstore.format.manifests import manifest, sections
from snapstore.format.records import ENVELOPE, ManifestRef, Snapshot
from snapstore.storage.memory import MemoryStore

FUTURE = {"color": [1, {"deep": b"\0"}], "moon": None}
IN_REF = {"phase": 3}
IN_HEADER = {"weight": 1.5}
SECTION = ("later", b"abc", 77, 9)


def raw_map(data: bytes) -> dict[str, object]:
    return msgspec.msgpack.decode(data[ENVELOPE.size :])


def raw_header(store: MemoryStore, ref: dict[str, object]) -> dict[str, object]:
    return msgspec.msgpack.decode(sections.packed_header(store.get(manifest_key(str(ref["sha256"]))), "x"))


def planted(store: MemoryStore, key: str) -> None:
    """Add keys of a later release to a record, its references and the headers of its manifests, and a section too."""
    fields = raw_map(store.get(key))
    fields["manifests"] = [planted_ref(store, ref) for ref in fields["manifests"]]
    payload = msgspec.msgpack.encode(fields | FUTURE)
    head = ENVELOPE.pack(b"SNAP", 2, 1, 0, len(payload), 0)[:16]
    replace(store, key, head + records.xxhash.xxh3_64_intdigest(head + payload).to_bytes(8, "little") + payload)


def planted_ref(store: MemoryStore, ref: dict[str, object]) -> dict[str, object]:
    old = store.get(manifest_key(ref["sha256"]))
    header = manifest.decode_header(old, "x")
    body = len(old) - len(manifest.header_bytes(old))
    children = [planted_ref(store, msgspec.to_builtins(child)) for child in header.children]
    sections = [*header.sections, (SECTION[0], body, len(SECTION[1]), *SECTION[2:])]
    data = reheader(old, children=children, sections=sections, **IN_HEADER) + SECTION[1]
    name = hashlib.sha256(data).hexdigest()
    store.put(manifest_key(name), data)
    store.delete([manifest_key(ref["sha256"])])
    head = hashlib.sha256(manifest.header_bytes(data)).hexdigest()
    return ref | {"sha256": name, "header_sha256": head, "size_bytes": len(data)} | IN_REF


def require_kept(store: MemoryStore, snapshot: Snapshot) -> None:
    """Check that the ruling record, its references and headers have the added keys, and each manifest the section."""
    fields = raw_map(store.get(snapshot.key))
    assert {name: fields[name] for name in FUTURE} == FUTURE
    left = list(fields["manifests"])
    while left:
        ref = left.pop()
        assert ref["phase"] == 3
        header = raw_header(store, ref)
        assert header["weight"] == 1.5
        (section,) = [s for s in header["sections"] if s[0] == SECTION[0]]
        data = store.get(manifest_key(ref["sha256"]))
        at = len(manifest.header_bytes(data)) + section[1]
        assert (data[at : at + section[2]], *section[3:]) == SECTION[1:]
        left += header["children"]


def of_one_process(store: MemoryStore) -> str:
    with opened(store) as repository:
        for version in range(3):
            key = save(repository, "a", version, version).key
    return key


def of_ranks(store: MemoryStore) -> str:
    writer = RankWriter(store)
    rng = np.random.default_rng(0)
    drift = rng.standard_normal((64, 32)).astype(np.float32)
    for version in range(3):
        drift[version] += 1
        key = writer.save({"": {}, "model": {"drift": drift.copy()}}, step=version, run="a").key
    return key


VERBS = {
    "tag": lambda r: r.tag("a@2", "best"),
    "untag": lambda r: (r.tag("a@2", "best"), r.untag("a@2", "best")),
    "forget": lambda r: r.forget_snapshots(["a@2"], force=True),
    "unforget": lambda r: (r.forget_snapshots(["a@2"], force=True), r.unforget("a@2")),
    "recode": lambda r: r.recode(),
    "compact": lambda r: (r.forget_snapshots(["a@0", "a@1"]), r.gc(), r.compact()),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("made", [of_one_process, of_ranks])
def test_a_verb_keeps_them(verb, made, monkeypatch):
    store = created()
    foreign.readable(monkeypatch)
    with foreign.written():
        key = made(store)
    planted(store, key)
    with opened(store) as repository:
        VERBS[verb](repository)
    with opened(store) as repository:
        snapshot = repository.view().resolve("a@2", ("committed", "forgotten"))
        assert snapshot.revision > 0
        assert bool(snapshot.manifests[0].unknown)
        require_kept(store, snapshot)
        assert repository.check("restore").problems == []


@pytest.mark.parametrize("made", [of_one_process, of_ranks])
def test_gc_keeps_them_when_it_sweeps(made):
    store = created()
    key = made(store)
    planted(store, key)
    with opened(store) as repository:
        repository.forget_snapshots(["a@2"], force=True)
        repository.gc()
        snapshot = repository.view().resolve("a@2", ("swept",))
    fields = raw_map(store.get(snapshot.key))
    assert {name: fields[name] for name in FUTURE} == FUTURE
    assert all(ref["phase"] == 3 for ref in fields["manifests"])


@pytest.mark.parametrize("made", [of_one_process, of_ranks])
def test_repair_keeps_them_when_it_heals(made):
    """A repair uses another pack with the same chunks instead of a damaged one; the added keys stay."""
    store = created()
    key = made(store)
    planted(store, key)
    record = records.decode(store.get(key), Snapshot, key)
    other = created()
    replace(other, "config", store.get("config"))
    made(other)
    ours = set(keys_of(store, "packs/"))
    for name in (*keys_of(other, "packs/"), *keys_of(other, "manifests/"), *keys_of(other, "snapshots/")):
        if name not in keys_of(store, ""):
            data = other.get(name)
            store.put(name, data)
    root = manifest.decode_header(store.get(record.manifests[-1].key), "x")
    lost = next(f"packs/{name[:2]}/{name}" for name in root.pack_names)
    assert lost in ours
    data = bytearray(store.get(lost))
    data[150] ^= 1
    replace(store, lost, bytes(data))
    with opened(store) as repository:
        repository.repair(apply=True, level="data")
        healed = repository.view().get(record.id)
        assert healed.revision > 0
        require_kept(store, healed)


@pytest.mark.parametrize("made", [of_one_process, of_ranks])
def test_repair_keeps_them_when_it_writes_a_record_again(made):
    """A repair writes a damaged record again, and puts back a record that vanished. Both keep the added keys."""
    store = created()
    key = made(store)
    planted(store, key)
    with opened(store) as repository:
        repository.tag("a@2", "best")
        tagged = repository.view().resolve("a@2").key
        data = bytearray(store.get(tagged))
        data[60] ^= 1
        replace(store, tagged, bytes(data))
        repository.repair(apply=True)
        require_kept(store, repository.view().resolve("a@2"))
    with opened(store) as repository:
        repository.repair(apply=True)
        snapshot = repository.view().resolve("a@2")
        require_kept(store, snapshot)
        store.delete([snapshot.key])
        repository.repair(apply=True)
        require_kept(store, repository.view().resolve("a@2"))


def with_features(data: bytes, *features: str) -> bytes:
    fields = raw_map(data) | {"features": list(features)}
    payload = msgspec.msgpack.encode(fields)
    head = ENVELOPE.pack(b"SNAP", 2, 1, 0, len(payload), 0)[:16]
    return head + records.xxhash.xxh3_64_intdigest(head + payload).to_bytes(8, "little") + payload


@pytest.mark.parametrize("where", ["record", "manifest", "forgotten record"])
def test_an_unknown_feature_is_refused_and_nothing_is_deleted(where):
    store = created()
    key = of_one_process(store)
    data = store.get(key)
    if where == "manifest":
        fields = raw_map(data)
        ref = fields["manifests"][0]
        changed = reheader(store.get(manifest_key(ref["sha256"])), features=["tiles"])
        name = hashlib.sha256(changed).hexdigest()
        store.put(manifest_key(name), changed)
        store.delete([manifest_key(ref["sha256"])])
        head = hashlib.sha256(manifest.header_bytes(changed)).hexdigest()
        ref |= {"sha256": name, "header_sha256": head, "size_bytes": len(changed)}
        payload = msgspec.msgpack.encode(fields)
        top = ENVELOPE.pack(b"SNAP", 2, 1, 0, len(payload), 0)[:16]
        changed = top + records.xxhash.xxh3_64_intdigest(top + payload).to_bytes(8, "little") + payload
    else:
        state = {"state": "forgotten"} if where == "forgotten record" else {}
        changed = with_features(
            records.encode(msgspec.structs.replace(records.decode(data, Snapshot, key), **state)), "tiles"
        )
    replace(store, key, changed)
    before = dict(store._objects)
    with opened(store) as repository:
        with pytest.raises(SnapstoreError, match="'tiles'"):
            repository.restore("a@2")
        with pytest.raises(SnapstoreError, match="'tiles'"):
            repository.gc()
        found = repository.check("restore")
        assert [s.ref for s in found.unknown] == ["a@2"]
        assert found.damaged == []
        assert any("'tiles'" in problem.message and problem.command == "" for problem in found.problems)
        report = repository.repair(apply=True, drop=True, purge=True, level="restore")
        assert (report.lost, report.dropped) == ([], [])
    assert {name: store._objects.get(name) for name in before} == before


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KNOWN = set(Snapshot.__struct_encode_fields__) | set(ManifestRef.__struct_encode_fields__)
EXTRA = st.dictionaries(st.text(max_size=8).filter(lambda name: name not in KNOWN), PLAIN, max_size=4)
REF = {"part": "p", "rank": 1, "sha256": "a" * 64, "header_sha256": "b" * 64, "size_bytes": 1, "logical_bytes": 0}


@given(EXTRA, st.lists(EXTRA, max_size=3))
def test_any_keys_round_trip(extra, of_refs):
    refs = [{**REF, "rank": rank, **more} for rank, more in enumerate(of_refs)]
    known = Snapshot(id="a" * 32, run="r", step=1, seq=0, state="committed", write_id="")
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(known))
    packed = msgspec.msgpack.encode(fields | {"manifests": refs} | extra)
    found = open_maps.with_unknown(msgspec.msgpack.decode(packed, type=Snapshot), packed, "manifests")
    again = msgspec.msgpack.decode(open_maps.encode(found.revised(tags=["x"]), "manifests"))
    assert {name: again[name] for name in extra} == extra
    assert [
        {name: ref[name] for name in more} for ref, more in zip(again["manifests"], of_refs, strict=True)
    ] == of_refs
    assert again["tags"] == ["x"]
    if not extra and not any(of_refs):
        assert open_maps.encode(found, "manifests") == msgspec.msgpack.encode(found)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_an_unknown_format_error(noise):
    data = records.encode(Snapshot(id="a" * 32, run="r", step=1, seq=0, state="committed", write_id=""))
    payload = data[ENVELOPE.size :][: len(noise) % 90] + noise
    head = ENVELOPE.pack(b"SNAP", 2, 1, 0, len(payload), 0)[:16]
    whole = head + records.xxhash.xxh3_64_intdigest(head + payload).to_bytes(8, "little") + payload
    with suppress(UnknownFormatError):
        records.unpack(whole, Snapshot, "snapshots/r/000000000001-" + "a" * 32 + ".0")


def test_a_key_that_occurs_twice_is_an_unknown_format_error():
    refs = msgspec.msgpack.encode({"manifests": [REF]})[1:] + msgspec.msgpack.encode({"manifests": [REF, REF]})[1:]
    base = msgspec.msgpack.encode({"id": "a" * 32, "run": "r", "step": 1, "seq": 0, "state": "x", "write_id": ""})
    payload = bytes([0x88]) + base[1:] + refs
    head = ENVELOPE.pack(b"SNAP", 2, 1, 0, len(payload), 0)[:16]
    whole = head + records.xxhash.xxh3_64_intdigest(head + payload).to_bytes(8, "little") + payload
    with pytest.raises(UnknownFormatError):
        records.unpack(whole, Snapshot, "snapshots/r/000000000001-" + "a" * 32 + ".0")
