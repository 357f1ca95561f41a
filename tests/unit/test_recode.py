"""recode keeps every state bit for bit and rewrites each blob once, also with damaged blobs or a wrong encoder."""

import re

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import foreign
from kit.objects import flip_in_place, keys_of, replace
from kit.reference import replace_encode
from kit.repositories import check_clean, check_restores, created, opened, same, save, values
from kit.samples import THOROUGH
from snapstore import AlreadyExistsError, CapabilityError, InvalidInputError, NotFoundError, Repository, StorageError
from snapstore.engine.registry import Engines
from snapstore.format import records
from snapstore.format.blobs import blob, codecs, pack
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.rewrite import recode as module
from snapstore.storage.memory import MemoryStore

ANS = codecs.NAMES[codecs.ANS]


@pytest.fixture(autouse=True)
def _readable(monkeypatch):
    foreign.readable(monkeypatch)


@pytest.fixture
def store():
    return created()


@pytest.fixture
def repo(store):
    """a@0 to a@3 and b@0, a fork of a@1, are in ANS; a@4, whose base is a@3, is portable."""
    with opened(store) as repository:
        with foreign.written():
            for step in range(4):
                save(repository, "a", step, step)
            save(repository, "b", 0, 1, parent="a@1", bases=["a@1"])
        save(repository, "a", 4, 4)
        yield repository


def blobs(repository, refs=None):
    """Return the header of every blob that snapshots refer to, by (pack, offset)."""
    found = {}
    for snapshot in repository.snapshots() if refs is None else map(repository.snapshot, refs):
        for ref in snapshot.manifests:
            m = manifest.read(repository.store, ref, None)
            names = m.header.pack_names
            for number, offset, length in zip(
                m.table.ref_packs.tolist(), m.table.ref_offsets.tolist(), m.table.ref_lengths.tolist(), strict=True
            ):
                data = repository.store.get_range(pack_key(names[number]), offset, length)
                found[names[number], offset] = blob.parse(data, "")
    return found


def identity(header):
    return header.transform, header.element_size, header.layout, header.raw_bytes, header.digest, header.base


def stale(headers, kept=(codecs.RAW, codecs.ZSTD, codecs.DEFLATE, codecs.SPARSE)):
    return {place: h for place, h in headers.items() if any(codec not in kept for codec in h.codecs[: h.element_size])}


def going(repository):
    """Return the blobs that a recode replaces: stale ones, and those whose pack is mostly stale."""
    found = blobs(repository)
    packs = {name: pack_listing(repository, name) for name, _ in found}
    bad = stale(found)
    share = {
        name: sum(int(e["length"]) for e in entries if (name, int(e["offset"])) in bad) / entries["length"].sum()
        for name, entries in packs.items()
    }
    return {p: h for p, h in found.items() if p in bad or share[p[0]] >= module.EMPTIED_ABOVE_SHARE}


def pack_listing(repository, name):
    key = pack_key(name)
    return pack.read_listing(repository.store, key, repository.store.stat(key).size_bytes).entries


def test_a_recode_of_all_snapshots(repo):
    """A recode replaces stale blobs and those in mostly stale packs, keeps all other blobs, and counts correctly."""
    before, old = repo.snapshots(), blobs(repo)
    assert ANS in repo.stats().codecs
    wanted = going(repo)
    assert {h.transform for h in wanted.values()} == {blob.FULL, blob.DIFFERENCE}
    result = repo.recode()
    new = blobs(repo)
    assert not stale(new)
    assert sorted(map(identity, new.values())) == sorted(map(identity, old.values()))
    assert all(new[place] == header for place, header in old.items() if place not in wanted)
    assert (result.blobs, result.failed) == (len(wanted), [])
    assert result.bytes_before == sum(blob.length_of(h) for h in wanted.values())
    assert result.bytes_after == sum(blob.length_of(h) for place, h in new.items() if place not in old)
    assert {s.id for s in result.recoded + result.skipped} == {s.id for s in before}
    for snapshot, was in zip(repo.snapshots(), before, strict=True):
        assert snapshot.revision == 1
        assert snapshot.stored_bytes > 0
        lasting = (
            "id",
            "seq",
            "state",
            "parent",
            "bases",
            "tags",
            "created",
            "generation",
            "depth",
            "chunks",
            "run",
            "step",
        )
        assert [getattr(snapshot, f) for f in lasting] == [getattr(was, f) for f in lasting]
    check_restores(repo)
    repo.gc()
    assert not going(repo)
    check_clean(repo.store)


def test_the_headers_of_new_packs_and_manifests_fit_their_blobs(repo):
    repo.recode()
    names, places = set(), set()
    for snapshot in repo.snapshots():
        for ref in snapshot.manifests:
            header = manifest.read(repo.store, ref, None).header
            assert (header.part, header.rank) == (ref.part, ref.rank)
            for name, size in zip(header.pack_names, header.pack_size_list, strict=True):
                listing = pack.read_listing(repo.store, pack_key(name), size)
                names.add((listing.header.save_id, listing.header.rank, listing.header.sequence))
                for entry in listing.entries:
                    offset, length = int(entry["offset"]), int(entry["length"])
                    data = repo.store.get_range(pack_key(name), offset, length)
                    assert blob.entry(data, offset) == entry.tobytes()
                    places.add(name)
    assert len(names) == len(places)


def test_nothing_to_do_writes_nothing(repo):
    repo.recode()
    keys = keys_of(repo.store)
    result = repo.recode()
    assert (result.recoded, result.blobs, len(result.skipped)) == ([], 0, 6)
    assert keys_of(repo.store) == keys
    repo.gc()
    keys = keys_of(repo.store)
    assert repo.recode(["a@4"]).recoded == []
    assert keys_of(repo.store) == keys


def test_a_dry_run_changes_nothing(repo):
    keys = keys_of(repo.store)
    result = repo.recode(dry_run=True)
    assert keys_of(repo.store) == keys
    real = repo.recode()
    assert (result.blobs, result.bytes_before) == (real.blobs, real.bytes_before)
    assert [s.id for s in result.recoded] == [s.id for s in real.recoded]
    assert result.dry_run
    assert result.bytes_after == 0
    assert repo.recode(codec="ans", dry_run=True).recoded


def test_only_what_is_named(repo):
    result = repo.recode(["a@2", "id:" + repo.snapshot("a@2").id])
    assert [s.ref for s in result.recoded] == ["a@2"]
    assert not stale(blobs(repo, ["a@2"]))
    assert stale(blobs(repo, ["a@1"]))
    assert [s.revision for s in repo.snapshots("a")] == [0, 0, 1, 0, 0]
    check_restores(repo)
    repo.gc()
    check_restores(repo)


def test_one_after_the_other_shares_as_all_at_once(repo):
    """Recodes of one snapshot after the other write as few blobs as one recode of all snapshots."""
    wanted = going(repo)
    made = sum(repo.recode([s.ref]).blobs for s in reversed(repo.snapshots()))
    assert made == len(wanted)
    assert len({identity(h) for h in blobs(repo).values()}) == len(blobs(repo))
    repo.gc()
    check_clean(repo.store)


def test_forgotten_ones_are_left_alone_unless_named(repo):
    repo.forget_snapshots(["a@1"])
    assert "a@1" not in [s.ref for s in repo.recode().recoded]
    assert repo.view().resolve("a@1").revision == 1
    (done,) = repo.recode(["a@1"]).recoded
    assert (done.state, done.revision) == ("forgotten", 2)
    check_restores(repo)
    assert repo.unforget("a@1").manifests == done.manifests
    repo.gc()
    check_clean(repo.store)
    with pytest.raises(NotFoundError):
        repo.recode(["a@99"])


def test_saves_go_on_from_a_recoded_parent(repo):
    repo.recode()
    repo.gc()
    snapshot = save(repo, "a", 5, 5)
    assert snapshot.bases
    assert snapshot.new_chunks < snapshot.chunks
    check_restores(repo)
    assert repo.recode().recoded == []


def test_bad_arguments(repo):
    with pytest.raises(InvalidInputError, match="'zip': expected one of portable, ans"):
        repo.recode(codec="zip")
    with pytest.raises(InvalidInputError, match="got one str"):
        repo.recode("a@1")
    with pytest.raises(InvalidInputError, match="refs 5: expected a list of str, got int"):
        repo.recode(5)
    assert repo.recode([]).recoded == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(repo, monkeypatch):
    keys = keys_of(repo.store)
    with pytest.raises(CapabilityError, match="no CUDA device"):
        repo.recode(codec="ans")
    monkeypatch.undo()
    with pytest.raises(CapabilityError, match="only a GPU with nvCOMP"):
        repo.recode()
    assert keys_of(repo.store) == keys


def test_there_and_back_again(repo, monkeypatch):
    """Recodes to portable, to ANS and to portable again keep all states. A changed CPU engine writes the ANS blobs."""
    monkeypatch.setattr(Engines, "for_ans", lambda engines: type(engines.cpu)(engines.digest_seed, 1))
    portable = repo.recode(["a@2"])
    with foreign.written():
        result = repo.recode(codec="ans")
    assert result.failed == []
    assert "a@2" in [s.ref for s in result.recoded]
    assert portable.blobs
    assert not stale(blobs(repo), (codecs.RAW, codecs.ANS, codecs.SPARSE))
    check_restores(repo)
    repo.gc()
    assert ANS in repo.stats().codecs
    repo.recode()
    check_restores(repo)
    repo.gc()
    assert not going(repo)
    check_clean(repo.store)


# --- damage


def place_of(repository, ref):
    """Return the key of an ANS pack that a snapshot needs and a@0 does not, and the offset of a blob in it."""
    name, offset = min(stale(blobs(repository, [ref])).keys() - blobs(repository, ["a@0"]).keys())
    return pack_key(name), offset


def users_of(repository, key, offset=None):
    """Return the references of the snapshots that need a pack, or one blob of it."""
    found = {s.ref: blobs(repository, [s.ref]) for s in repository.snapshots()}
    return {ref for ref, places in found.items() for name, at in places if key.endswith(name) and offset in (None, at)}


@pytest.mark.parametrize("harm", ["missing", "blob", "footer"])
def test_damage_fails_only_the_snapshots_that_need_it(repo, harm):
    """Damage fails the recode of the snapshots that need the damaged pack or blob. All other snapshots are recoded."""
    key, offset = place_of(repo, "a@3")
    users = users_of(repo, key, offset if harm == "blob" else None)
    assert users < {s.ref for s in repo.snapshots()}
    if harm == "missing":
        repo.store.delete([key])
    else:
        flip_in_place(repo.store, key, offset + 100 if harm == "blob" else -40)
    before = {s.id: s for s in repo.snapshots()}
    result = repo.recode()
    assert {s.ref for s, _ in result.failed} == users
    for snapshot, message in result.failed:
        assert message.startswith(f"{snapshot.ref}: ")
        assert key in message
        assert as_it_was(repo.snapshot(f"id:{snapshot.id}"), before[snapshot.id])
    assert len(result.recoded) + len(result.failed) + len(result.skipped) == 6
    assert not stale(blobs(repo, [s.ref for s in result.recoded]))
    assert keys_of(repo.store, "sessions/") == []


def as_it_was(now, before):
    """Return whether a record is unchanged or copied: a failed rewrite puts a copy that explains its new objects."""
    copy = msgspec.structs.replace(now, revision=before.revision, write_id=before.write_id)
    return records.encode(copy) == records.encode(before)


def test_damage_at_any_blob_is_named(repo):
    """A recode names the pack of any damaged blob and changes no record.

    If it had already put new packs, it puts a copy of the record, which explains them.
    """
    places = sorted(stale(blobs(repo, ["a@3"])).keys() - blobs(repo, ["a@0"]).keys())
    copies = 0
    for name, offset in places:
        store = MemoryStore()
        store._objects = dict(repo.store._objects)
        flip_in_place(store, pack_key(name), offset + 100)
        with Repository.open(store, options=repo.options) as other:
            before = {s.id: s for s in other.snapshots()}
            failed = other.recode().failed
            assert failed
            for snapshot, message in failed:
                assert pack_key(name) in message
                now = other.snapshot(f"id:{snapshot.id}")
                assert as_it_was(now, before[snapshot.id])
                copies += now.revision - before[snapshot.id].revision
    assert copies, "no rewrite had put anything before it failed: this test has shown nothing"


def test_an_encoder_that_lies_is_found_out(repo, monkeypatch):
    """If an encoder encodes wrong bytes, the recode fails and changes no record. A later recode succeeds."""
    real = blob.encode

    def encode(source, *rest, **options):
        wrong = source.copy()
        wrong[7] ^= 4
        return real(wrong, *rest, **options)

    keys = keys_of(repo.store, "snapshots/")
    replace_encode(monkeypatch, encode)
    result = repo.recode()
    assert result.recoded == []
    assert all("does not decode to what it was made of" in message for _, message in result.failed)
    assert len(result.failed) == len([s for s in repo.snapshots() if stale(blobs(repo, [s.ref]))])
    monkeypatch.undo()
    foreign.readable(monkeypatch)
    assert keys_of(repo.store, "snapshots/") == keys
    repo.gc()
    assert repo.recode().failed == []
    check_restores(repo)


def test_a_full_blob_whose_bytes_are_another_chunk_is_not_rewritten(repo):
    """The checksum of the blob is right and its digest is wrong, as after an error of an earlier encoder."""
    name, offset = next(place for place, h in stale(blobs(repo, ["a@0"])).items() if codecs.RAW in h.codecs[:2])
    key = pack_key(name)
    users = users_of(repo, key, offset)
    data = bytearray(repo.store.get(key))
    header = blob.parse(memoryview(data)[offset:], "")
    assert header.transform == blob.FULL
    whole = memoryview(data)[offset : offset + blob.length_of(header)]
    raw = next(k for k in range(header.element_size) if header.codecs[k] == codecs.RAW)
    at = whole.tobytes().index(blob.decode_planes(whole, header, "")[raw].tobytes()[:64])
    whole[at] ^= 1
    blob.relabel(whole, header.transform, header.digest, header.base)
    replace(repo.store, key, data)
    failed = repo.recode().failed
    assert {s.ref for s, _ in failed} == users
    assert all(re.search("digest mismatch", message) for _, message in failed)


def test_a_damaged_duplicate_is_not_used(repo):
    repo.recode(["a@0"])
    old = {identity(h) for h in stale(blobs(repo, ["a@1"])).values()}
    place = next(place for place, h in blobs(repo, ["a@0"]).items() if identity(h) in old)
    flip_in_place(repo.store, pack_key(place[0]), place[1] + blob.HEADER.size + 20)
    with opened(repo.store) as again:
        result = again.recode(["a@1", "a@2"])
    assert result.failed == []
    assert result.blobs > 0
    for ref in ("a@1", "a@2"):
        assert place not in blobs(repo, [ref])
        assert same(repo.restore(ref), values("a", int(ref[-1])))


def test_a_store_that_fails_ends_a_recode(repo, monkeypatch):
    """An error of the store ends a recode. A later recode succeeds."""

    def put(key, data):
        raise StorageError("503")

    monkeypatch.setattr(repo.store, "put", put)
    with pytest.raises(StorageError, match="503"):
        repo.recode()
    monkeypatch.undo()
    foreign.readable(monkeypatch)
    assert repo.recode().failed == []
    repo.gc()
    check_clean(repo.store)


def test_a_revision_that_could_not_be_put_cannot_appear_later(repo, monkeypatch):
    """If the PUT of a revision times out four times, a copy of the previous revision takes its key.

    Only then are the new packs given up. A PUT that arrives later finds that the key exists.
    """
    late, real = [], repo.store.put

    def put(key, data):
        if key.startswith("snapshots/") and len(late) < 4:
            late.append((key, bytes(data)))
            raise StorageError("timed out")
        real(key, data)

    monkeypatch.setattr(repo.store, "put", put)
    monkeypatch.setattr("snapstore.protocol.claim.time.sleep", lambda _: None)
    with pytest.raises(StorageError, match="timed out"):
        repo.recode(["a@0"])
    assert len(late) == 4
    repo.gc()
    with pytest.raises(AlreadyExistsError):
        real(*late[0])
    assert repo.snapshot("a@0").revision == 1
    check_clean(repo.store)


def test_a_recode_whose_session_is_gone_begins_again(repo, monkeypatch):
    """A recode whose session was deleted, as by a gc of another host, does its work again and succeeds."""
    monkeypatch.setattr("snapstore.protocol.claim.HEARTBEAT_S", 0.0)
    real, given_up = repo.store.touch, []

    def touch(key):
        if not given_up:
            given_up.append(key)
            repo.store.release(key)
        real(key)

    monkeypatch.setattr(repo.store, "touch", touch)
    assert repo.recode().failed == []
    assert given_up
    repo.gc()
    check_clean(repo.store)


# --- any history


@settings(max_examples=30 if THOROUGH else 15, deadline=None)
@given(st.data())
def test_any_history(data):
    """A recode keeps the states of any history, in any order of snapshots.

    Histories have runs, forks, duplicate chunks, tensors that change their size, and both codecs.
    """
    draw = data.draw
    store = created(256)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    states = []
    with opened(store) as repo:
        for number in range(draw(st.integers(1, 6))):
            run = draw(st.sampled_from("abz"))
            base = dict(states[draw(st.integers(0, len(states) - 1))][1]) if states and draw(st.booleans()) else {}
            for name in draw(st.sets(st.sampled_from("uvwx"), min_size=1)):
                kind = draw(st.sampled_from([np.float32, np.uint8, np.int64, np.float16]))
                size = draw(st.sampled_from([4096, 5120, 8192])) // np.dtype(kind).itemsize
                value = base.get(name)
                if value is None or draw(st.booleans()):
                    value = (rng.standard_normal(size) * 3).astype(kind)
                    if draw(st.booleans()):
                        value[:] = np.tile(value[: size // 4], 4)  # duplicate chunks
                else:
                    value = value.copy()
                    value[:: draw(st.integers(1, 50))] += value.dtype.type(1)
                base[name] = value
            others = [s.ref for s in repo.snapshots()]
            parent = draw(st.sampled_from(others)) if others and draw(st.booleans()) else None
            arguments = {"run": run, "step": number, "parent": parent, "full": draw(st.booleans())}
            if draw(st.booleans()):
                with foreign.written():
                    repo.save(base, **arguments)
            else:
                repo.save(base, **arguments)
            states.append((f"{run}@{number}", base))
        codecs._DECODERS[codecs.ANS], kept = foreign.decode, codecs._DECODERS[codecs.ANS]
        try:
            wanted = {identity(h) for h in going(repo).values()}
            order = draw(st.permutations([ref for ref, _ in states]))
            made = repo.recode(order[:2]).blobs + repo.recode().blobs
            assert made <= len(wanted)
            repo.gc()
            assert not stale(blobs(repo))
            assert not going(repo)
            assert repo.recode().recoded == []
            for ref, state in states:
                assert same(repo.restore(ref), state)
            assert repo.check("restore").ok
        finally:
            codecs._DECODERS[codecs.ANS] = kept
