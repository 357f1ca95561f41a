"""A save of an unchanged state adds only a record and a manifest list.

Several snapshots then name the same manifests, and any of these snapshots may be forgotten.
"""

import copy
import dataclasses
import hashlib
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from kit import foreign, rank_saves
from kit.actors import Actor
from kit.faults import one_thread
from kit.objects import clone, keys_of, replace
from kit.rank_saves import sharded
from kit.repositories import check_clean, created, opened, same, save, snapshot_of, values
from snapstore import IntegrityError, KeepLast, PerRank, Repository, SaveOptions, SnapstoreError, StorageError
from snapstore.catalog.index import Index
from snapstore.format import records
from snapstore.format.keys import manifest_key
from snapstore.format.manifests import manifest
from snapstore.format.records import ManifestList, Mark, Wait
from snapstore.protocol.claim import Claim
from snapstore.storage.memory import MemoryStore


def put_by(store, act):
    """Return the sizes of the objects that an action has added, by key."""
    before = set(keys_of(store))
    act()
    return {info.key: info.size_bytes for info in store.list("") if info.key not in before}


def shas(snapshot):
    return [ref.sha256 for ref in snapshot.manifests]


@pytest.fixture
def store():
    """a@0, a@1 and a@2 hold version 0; the two later ones name the manifests of the first."""
    store = created()
    with opened(store) as repository:
        for step in range(3):
            save(repository, "a", step, 0)
    return store


# -- saves


@pytest.mark.parametrize("fresh", [False, True])
def test_a_snapshot_of_an_unchanged_state_takes_two_small_objects(fresh):
    """Only a manifest list and a record are written, also by a repository that was opened again."""
    store = created()
    with opened(store) as repository:
        first = save(repository, "a", 0, 0)
        for step in (1, 2):
            if not fresh:
                new = put_by(store, lambda: save(repository, "a", step, 0))  # noqa: B023 (called at once)
            else:
                with opened(store) as other:
                    new = put_by(store, lambda: save(other, "a", step, 0))  # noqa: B023
            assert [key.partition("/")[0] for key in sorted(new)] == ["manifests", "snapshots"]
            assert sum(new.values()) <= 2048
            again = repository.snapshot(f"a@{step}")
            assert shas(again) == shas(first)
            assert sorted(new)[0] == manifest_key(again.manifest_list)
            assert again.stored_bytes == new[sorted(new)[0]]
            assert (again.depth, again.chunks, again.new_chunks) == (first.depth, first.chunks, 0)
        assert not first.manifest_list
    check_clean(store, level="restore")


def unchanged(count, in_ranks):
    """Save a state with parts beside the root three times; return the last snapshot, and the bytes that it adds."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024) as repository:

        def state(rank=None):
            tensors = [torch.arange(2000.0) + number for number in range(count)]
            if rank is not None:
                tensors = [sharded(one, [2], [Shard(0)]) for one in tensors[1:]] + [PerRank(torch.ones(9) * rank)]
            return {"step": 3, **{f"part_name{number:02d}": {"w": one} for number, one in enumerate(tensors)}}

        def act(step):
            if in_ranks:
                rank_saves.save(repository, [partial(state, rank) for rank in range(2)], step)
            else:
                repository.save(state(), run="pretraining", step=step)

        for step in range(100_000, 100_003):
            new = put_by(store, partial(act, step))
        assert len(new) == 2
        return repository.snapshots()[-1], sum(new.values())


@pytest.mark.parametrize("in_ranks", [False, True])
def test_a_part_costs_an_unchanged_snapshot_229_bytes_and_its_name(in_ranks):
    """Four parts beside the root take at most 2 KiB, of any size. freeze.md states these figures."""
    sizes = {count: unchanged(count, in_ranks)[1] for count in (4, 5, 6)}
    assert sizes[4] <= 2048 < sizes[6]
    each = 229 + len("part_name00")
    assert all(each - 2 <= sizes[count + 1] - sizes[count] <= each + 4 for count in (4, 5)), sizes
    snapshot, nbytes = unchanged(4, in_ranks)
    large = [msgspec.structs.replace(ref, size_bytes=1 << 33, logical_bytes=1 << 40) for ref in snapshot.manifests]
    huge = msgspec.structs.replace(snapshot, manifests=large, chunks=1 << 33, logical_bytes=1 << 43)
    assert len(records.encode(huge)) + nbytes - len(records.encode(snapshot)) <= 2048


def test_only_what_has_changed_is_written(store):
    state = copy.deepcopy(values("a", 0))
    first = snapshot_of(store, "a@0")
    with opened(store) as repository:
        state["version"] = 7
        new = put_by(store, lambda: repository.save(state, run="a", step=3, metadata=["a", 0]))
        assert sorted(key.partition("/")[0] for key in new) == ["manifests"] * 2 + ["snapshots"]
        third = repository.snapshot("a@3")
        assert [a == b for a, b in zip(shas(first), shas(third), strict=True)] == [False, True, True]
        state["optimizer"]["noise"][0] ^= 1
        repository.save(state, run="a", step=4, metadata=["a", 0])
        fourth = repository.snapshot("a@4")
        assert [a == b for a, b in zip(shas(third), shas(fourth), strict=True)] == [True, True, False]
        state["model"]["bias"] += 1  # is stored inline in the manifest
        state["version"] = 8
        state["optimizer"]["noise"][1] ^= 1
        fifth = repository.save(state, run="a", step=5, metadata=["a", 0])
        assert not set(shas(fifth)) & set(shas(fourth))
        assert not fifth.manifest_list
        assert same(repository.restore("a@5"), state)
        assert repository.check("restore").problems == []


def test_the_order_of_keys_and_the_kind_of_values_count(store):
    """A part with another order of keys or kind of tensor gets a new manifest, although its chunks are stored."""
    with opened(store) as repository:
        names = set(shas(snapshot_of(store, "a@0")))
        state = values("a", 0)
        turned = {**state, "model": dict(reversed(state["model"].items()))}
        parameter = {**state, "model": {**state["model"], "drift": torch.nn.Parameter(state["model"]["drift"])}}
        for step, other in enumerate((turned, parameter), 3):
            after = repository.save(other, run="a", step=step)
            assert len(set(shas(after)) - names) == 1
            assert same(repository.restore(f"a@{step}"), other)


def test_a_full_save_shares_full_chunks_alone():
    """A full save names no manifest with deltas. It names the manifests of an equal full save."""
    store = created()
    with opened(store) as repository:
        state = {"m": {"x": torch.arange(2048.0)}}
        repository.save(state, run="a", step=0)
        state["m"]["x"][5] += 1e-4
        assert repository.save(state, run="a", step=1).depth == 1
        full = repository.save(state, run="a", step=2, full=True)
        assert full.depth == 0
        assert repository.save(state, run="a", step=3, full=True).manifests == full.manifests


def test_a_manifest_that_is_damaged_or_gone_is_written_again(store):
    """A save reads a stored manifest again before a new snapshot depends on it, although the manifest is in memory."""
    with opened(store) as repository:
        last = repository.snapshot("a@2")
        save(repository, "a", 3, 0)  # now the manifests are in memory
        for step, part, damage in ((4, 1, lambda key: replace(store, key, b"\0" * 100)), (5, 2, store.delete)):
            key = manifest_key(last.manifests[part].sha256)
            damage(key) if step == 4 else damage([key])
            after = save(repository, "a", step, 0)
            assert last.manifests[part] not in after.manifests
            assert same(repository.restore(f"a@{step}"), values("a", 0))


def test_ranks_share_roots_and_children():
    whole = torch.arange(64 * 40, dtype=torch.float32).reshape(64, 40)

    def states(own=0):
        def make(rank):
            return lambda: {
                "model": {"w": sharded(whole, [2], [Shard(0)])},
                "own": PerRank({"x": torch.full((1500,), float(rank)), "n": own if rank else 0}),
            }

        return [make(0), make(1)]

    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024) as repository:
        first, _ = rank_saves.save(repository, states(), 0)
        new = put_by(store, lambda: rank_saves.save(repository, states(), 1))
        assert len(new) == 2
        assert sum(new.values()) <= 2048
        second = repository.snapshot("r@1")
        assert second.manifests == first.manifests
        new = put_by(store, lambda: rank_saves.save(repository, states(own=3), 2))
        assert len(new) == 4, "a child of rank 1, its root, the list and the record"
        third = repository.snapshot("r@2")
        (pair,) = ([a, b] for a, b in zip(first.manifests, third.manifests, strict=True) if a != b)
        children = [{ref.sha256 for ref in repository.context.index.header(root).children} for root in pair]
        assert len(children[0] & children[1]) == 1
        assert repository.check("restore").problems == []
        repository.forget([KeepLast(1)], run="r")
        repository.gc()
        result = repository.check("restore")
        assert (result.problems, result.unneeded_bytes) == ([], 0)
        rank_saves.read(repository, third)


# -- forget, gc


@pytest.mark.parametrize("gone", [("a@0",), ("a@1",), ("a@2",), ("a@0", "a@1"), ("a@1", "a@2"), ("a@0", "a@2")])
def test_if_some_are_forgotten_the_others_restore(store, gone):
    with opened(store) as repository:
        repository.forget_snapshots(list(gone), force=True)
        repository.gc()
        states = {s.ref: s.state for s in repository.view().snapshots(states=None)}
        # a@0 has no object of its own that gc can delete; the others have manifest lists
        assert states == {
            f"a@{n}": ("swept" if n else "forgotten") if f"a@{n}" in gone else "committed" for n in range(3)
        }
        for ref in {"a@0", "a@1", "a@2"} - set(gone):
            assert same(repository.restore(ref), values("a", 0))
    check_clean(store, level="restore")


def test_what_is_brought_back_restores(store):
    with opened(store) as repository:
        repository.forget_snapshots(["a@0", "a@1"])
        repository.unforget("a@1")
        repository.gc()
        repository.unforget("a@0")
        repository.gc()
        assert {s.ref for s in repository.snapshots()} == {"a@0", "a@1", "a@2"}
    check_clean(store, level="restore")


class Blind(MemoryStore):
    """A store whose listings hide each key that contains a text."""

    def __init__(self, inner, name):
        super().__init__()
        self._objects, self._locked, self._name = inner._objects, inner._locked, name

    def list(self, prefix, key_only=None):
        return (info for info in super().list(prefix, key_only) if self._name not in info.key)


def require_no_deletion(store, hidden):
    """Require that a gc that does not see a record fails and deletes nothing, and that a gc that sees all succeeds."""
    before = keys_of(store, "manifests/") + keys_of(store, "packs/")
    with opened(Blind(store, hidden)) as repository, pytest.raises(IntegrityError, match="no record explains"):
        repository.gc()
    assert keys_of(store, "manifests/") + keys_of(store, "packs/") == before
    with opened(store) as repository:
        repository.gc()
    check_clean(store, level="restore")


def test_a_gc_that_never_sees_a_record_deletes_nothing_that_it_needs(store):
    """If the listings hide the record of a snapshot, its manifest list shows that a record is missing."""
    hidden = snapshot_of(store, "a@2").id
    with opened(store) as repository:
        repository.forget_snapshots(["a@0", "a@1"])
    require_no_deletion(store, hidden)


def test_a_gc_that_does_not_see_the_last_revision_deletes_nothing_that_it_needs(monkeypatch):
    """If the listings hide a revision, its manifest list shows that a record is missing.

    The revision comes from a rewrite, and names manifests that were written for another snapshot.
    """
    store = _abroad(monkeypatch)
    with opened(store) as repository:
        repository.recode()
        last = repository.snapshot("a@2")
        assert last.revision == 1
        repository.forget_snapshots(["a@0", "a@1"])
    require_no_deletion(store, f"{last.id}.1")


# -- rewrites


def _abroad(monkeypatch):
    """Return a store in which a@0 to a@2 share manifests, with chunks in codec 70."""
    foreign.readable(monkeypatch)
    store = created()
    with opened(store) as repository, foreign.written():
        for step in range(3):
            save(repository, "a", step, 0)
    return store


def test_a_recode_writes_a_shared_manifest_once(monkeypatch):
    store = _abroad(monkeypatch)
    with opened(store) as repository:
        before = set(keys_of(store, "manifests/"))
        old = repository.snapshot("a@0")
        assert len(repository.recode().recoded) == 3
        after = [repository.snapshot(f"a@{step}") for step in range(3)]
        assert shas(after[0]) == shas(after[1]) == shas(after[2])
        changed = len(set(shas(after[0])) - set(shas(old)))
        assert changed
        assert len(set(keys_of(store, "manifests/")) - before) == changed + 2, "the changed manifests and two lists"
        assert [bool(s.manifest_list) for s in after] == [False, True, True]
        repository.gc()
        assert set(keys_of(store, "manifests/")) == {key for s in after for key in s.named_keys}
        for number, snapshot in enumerate(after[1:], 1):
            names = records.decode(
                store.get(manifest_key(snapshot.manifest_list)), ManifestList, snapshot.named_keys[-1]
            )
            assert (names.snapshot.hex(), names.revision, names.sha256s) == (snapshot.id, 1, shas(snapshot)), number
    check_clean(store, level="restore")


def test_a_recode_shares_no_manifest_of_a_snapshot_that_was_forgotten_meanwhile(monkeypatch):
    store = _abroad(monkeypatch)
    with opened(store) as repository:
        refresh, seen = Index.refresh, []

        def forget_first(index, **options):
            view = refresh(index, **options)
            first = view.resolve("a@0")
            if first.revision == 1 and not seen:
                seen.append(first)
                with opened(store) as other:
                    other.forget_snapshots(["a@0"])
                return refresh(index, **options)
            return view

        monkeypatch.setattr(Index, "refresh", forget_first)
        repository.recode(["a@0", "a@1", "a@2"])
        monkeypatch.undo()
        foreign.readable(monkeypatch)
        one, two, three = (repository.snapshot(f"a@{step}") for step in range(3))
        assert seen
        assert (one.state, one.revision) == ("forgotten", 2)
        assert set(shas(one)) & set(shas(two)) != set(shas(one)), "a@1 has new manifests"
        assert shas(two) == shas(three)
        repository.gc()
    check_clean(store, level="restore")


def test_a_compact_of_snapshots_that_share():
    """Equal snapshots name the same manifests also after a compact."""
    store = created()
    with opened(store) as repository:
        for step in range(8):
            save(repository, "a", step, step)
        for step in (8, 9):
            save(repository, "a", step, 7)
        repository.forget([KeepLast(3)], run="a")
        repository.gc()
        assert repository.compact().rewritten
        after = [repository.snapshot(f"a@{step}") for step in (7, 8, 9)]
        assert shas(after[0]) == shas(after[1]) == shas(after[2])
        repository.gc()
    check_clean(store, level="restore")


# -- check, repair


@pytest.mark.parametrize("how", ["gone", "flipped", "another"])
def test_a_list_that_is_damaged_is_written_again(store, how):
    key = manifest_key(snapshot_of(store, "a@1").manifest_list)
    if how == "gone":
        store.delete([key])
    elif how == "flipped":
        data = bytearray(store.get(key))
        data[-1] ^= 1
        replace(store, key, data)
    else:
        replace(store, key, store.get(manifest_key(snapshot_of(store, "a@2").manifest_list)))
    with opened(store) as repository:
        found = repository.check()
        assert [(p.kind, p.key, p.command, p.snapshots) for p in found.problems] == [
            ("manifest", key, "snapstore repair", ())
        ]
        assert len(found.restorable) == 3
        if how == "gone":
            with pytest.raises(IntegrityError, match="live object missing"):
                repository.gc()
        result = repository.repair(apply=True)
        assert [action.kind for action in result.actions] == ["record", "index"]
        assert result.open == []
        assert repository.snapshot("a@1").revision == 1
        repository.gc()
    check_clean(store, level="restore")


def test_a_lost_snapshot_without_its_list_stops_gc_until_it_is_dropped(store):
    store.delete([manifest_key(snapshot_of(store, "a@1").manifest_list), *keys_of(store, "packs/")])
    with opened(store) as repository:
        assert len(repository.repair(apply=True).lost) == 3
        with pytest.raises(
            IntegrityError, match=r"live object missing.*a lost snapshot.*'snapstore repair --drop' gives it up"
        ):
            repository.gc()
        assert len(repository.repair(apply=True, drop=True).dropped) == 3
        repository.gc()
        assert keys_of(store, "manifests/") == []


@pytest.mark.parametrize("verb", ["recode", "repair"])
def test_a_rewrite_looks_whether_its_list_is_there(monkeypatch, verb):
    """A rewrite checks that its manifest list was stored before it puts the revision that names the list."""
    store = _abroad(monkeypatch)
    before = snapshot_of(store, "a@1").manifest_list
    if verb == "repair":
        store.delete([manifest_key(before)])
    real = store.put

    def losing(key, data):
        try:
            records.decode(bytes(data), ManifestList, key)
        except SnapstoreError:  # the object is not a manifest list
            real(key, data)

    monkeypatch.setattr(store, "put", losing)
    with opened(store) as repository:
        act = repository.recode if verb == "recode" else partial(repository.repair, apply=True)
        with pytest.raises(StorageError, match="was put, but is not there"):
            act()
    monkeypatch.setattr(store, "put", real)
    assert snapshot_of(store, "a@1").manifest_list == before


def test_a_list_of_another_snapshot_is_found(store):
    """A check finds a manifest list of another snapshot by its content: its bytes match the hash in its name."""
    one, two = snapshot_of(store, "a@1"), snapshot_of(store, "a@2")
    forged = one.revised(manifest_list=two.manifest_list)
    store.put(forged.key, records.encode(forged))
    with opened(store) as repository:
        (problem,) = repository.check().problems
        assert "lists other manifests" in problem.message
        repository.repair(apply=True)
        assert repository.check().problems == []


def test_a_record_that_is_lost_comes_back_by_its_list(store):
    """A repair reconstructs a damaged record from the manifest list of its snapshot."""
    last = snapshot_of(store, "a@2")
    replace(store, last.key, b"damaged")
    with opened(store) as repository:
        repository.repair(apply=True)
        (after,) = (s for s in repository.snapshots() if s.id == last.id)
        assert (after.manifests, after.manifest_list) == (last.manifests, last.manifest_list)
        assert same(repository.restore(f"id:{after.id}"), values("a", 0))
        repository.gc()
        assert repository.check("restore").problems == []


def test_a_record_that_is_lost_comes_back_though_others_name_its_manifests(store):
    """A repair reconstructs a damaged record from the manifests of its snapshot, although other snapshots name them."""
    first = snapshot_of(store, "a@0")
    replace(store, first.key, b"damaged")
    with opened(store) as repository:
        repository.repair(apply=True)
        (after,) = (s for s in repository.snapshots() if s.id == first.id)
        assert after.manifests == first.manifests
        assert repository.check("restore").problems == []


def test_a_damaged_pack_is_healed_for_all_that_share(store):
    with Repository.open(store, options=SaveOptions(threads=1, share_runs=False)) as repository:
        repository.save(values("a", 0), run="twin", step=0, metadata=["a", 0])
        for ref in ("a@0", "a@1", "a@2"):
            repository.context.index.header(repository.snapshot(ref).manifests[1])
        m = manifest.read(store, snapshot_of(store, "a@0").manifests[2], None)
        key = f"packs/{m.header.pack_names[0][:2]}/{m.header.pack_names[0]}"
        store.delete([key])
        result = repository.repair(apply=True)
        assert result.left == []
        assert len(result.healed) == 3
        repository.gc()
    with opened(store) as repository:
        assert repository.check("restore").problems == []
        for ref in ("a@0", "a@1", "a@2"):
            assert same(repository.restore(ref), values("a", 0))


def test_bytes_are_counted_once(store):
    with opened(store) as repository:
        stats = repository.stats()
        assert stats.stored_bytes == sum(i.size_bytes for p in ("packs/", "manifests/") for i in store.list(p))
        assert stats.unneeded_bytes == 0
        assert sum(s.stored_bytes for s in repository.snapshots()) == stats.stored_bytes


def test_a_manifest_with_unknown_keys_is_not_shared(store):
    """A manifest with unknown keys equals no other one: a later release may have meant them for that snapshot only."""
    first = snapshot_of(store, "a@0")
    m = manifest.read(store, first.manifests[0], None)
    later = manifest.read(store, first.manifests[0], None)
    assert m.says_the_same(later)
    later.header = msgspec.structs.replace(later.header, unknown=(("new", b"\x01"),))
    assert not m.says_the_same(later)
    later = manifest.read(store, first.manifests[0], None)
    later.unknown = [("new", b"", 0, 0)]
    assert not m.says_the_same(later)
    later = manifest.read(store, first.manifests[2], None)
    assert manifest.read(store, first.manifests[2], None).says_the_same(later)
    later.table = dataclasses.replace(later.table, ref_offsets=later.table.ref_offsets + np.uint64(8))
    assert not manifest.read(store, first.manifests[2], None).says_the_same(later)


def test_no_root_is_shared_while_a_mark_names_one_of_its_children(monkeypatch):
    """r@1 does not share the root of r@0 if a gc has marked a child of the root.

    The gc marks after the child is put and before the root is put. It sweeps before r@1 is published.
    """
    whole = torch.arange(64 * 40, dtype=torch.float32).reshape(64, 40)
    states = [lambda: {"model": {"w": sharded(whole, [2], [Shard(0)])}}] * 2
    foreign.readable(monkeypatch)
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024) as repository:
        with foreign.written():
            first, second = (rank_saves.save(repository, states, step)[0] for step in range(2))
        old = set(keys_of(store, "manifests/"))
        look, publish = Claim.marked, Claim.publish

        def marking(claim):
            if claim.made_for.snapshot.hex() == second.id:
                (root,) = (ref for ref in repository.snapshot("r@0").manifests if ref.part == "model")
                (child, *_) = (ref for ref in repository.context.index.header(root).children if ref.key not in old)
                mark = Mark(id=records.new_id(), started=0.0, packs=b"", manifests=bytes.fromhex(child.sha256))
                store.put(records.key_of(mark), records.encode(mark))
                store.put(f"gc/{mark.id}.wait", records.encode(Wait(id=mark.id, sessions=[])))
            return look(claim)

        def sweeping(claim, revision):
            if revision.id == second.id:
                with opened(store) as other:
                    other.forget_snapshots(["r@0"])
                    assert other.gc().deleted_objects
            return publish(claim, revision)

        monkeypatch.setattr(Claim, "marked", marking)
        monkeypatch.setattr(Claim, "publish", sweeping)
        assert [s.ref for s in repository.recode([first.ref, second.ref]).recoded] == ["r@0", "r@1"]
        monkeypatch.setattr(Claim, "publish", publish)
        monkeypatch.setattr(Claim, "marked", look)
        assert repository.check("restore").problems == []
        repository.gc()
        rank_saves.read(repository, repository.snapshot("r@1"))


def test_a_list_may_have_keys_of_a_later_release(store):
    """A manifest list with unknown keys is valid: its name is the hash of all its bytes.

    A check and a gc accept the list, and a repair reconstructs a lost record from it.
    """
    last = snapshot_of(store, "a@2")
    old = store.get(manifest_key(last.manifest_list))
    payload = msgspec.msgpack.encode(msgspec.msgpack.decode(old[records.ENVELOPE.size :]) | {"color": 1})
    head = records.ENVELOPE.pack(b"SNAP", 10, 1, 0, len(payload), 0)[:16]
    data = head + records.xxhash.xxh3_64_intdigest(head + payload).to_bytes(8, "little") + payload
    later = msgspec.structs.replace(last, manifest_list=hashlib.sha256(data).hexdigest())
    store.put(manifest_key(later.manifest_list), data)
    store.delete([manifest_key(last.manifest_list)])
    replace(store, last.key, records.encode(later))
    with opened(store) as repository:
        assert repository.check().problems == []
        save(repository, "a", 3, 1)
    lost = clone(store)
    replace(lost, last.key, b"damaged")
    with opened(lost) as repository:
        repository.repair(apply=True)
        (after,) = (s for s in repository.snapshots() if s.id == last.id)
        assert (after.manifests, after.manifest_list) == (last.manifests, later.manifest_list)
        assert repository.check().problems == []
    with opened(store) as repository:
        repository.forget_snapshots(["a@2"])
        assert repository.gc().deleted_objects == 1
    check_clean(store)


def test_a_rewrite_keeps_the_unknown_keys_of_each_reference(monkeypatch):
    """Two snapshots name one manifest. A later release has added a key to both references, with different values."""
    store = _abroad(monkeypatch)
    for number in range(2):
        before = snapshot_of(store, f"a@{number}")
        refs = [msgspec.structs.replace(ref, unknown=(("phase", bytes([number])),)) for ref in before.manifests]
        replace(store, before.key, records.encode(msgspec.structs.replace(before, manifests=refs)))
    with opened(store) as repository:
        repository.recode()
        zero, one = (repository.snapshot(f"a@{number}") for number in range(2))
        assert one.revision == 1
        assert shas(zero) == shas(one)
        assert {ref.unknown for ref in one.manifests} == {(("phase", b"\x01"),)}
        assert repository.check("restore").problems == []


@pytest.mark.parametrize("how", ["rewritten", "swept"])
def test_a_check_beside_a_gc_does_not_report_a_list_that_nothing_names_any_more(monkeypatch, how):
    """A check does not report a manifest list that a gc deleted while the check ran.

    The snapshot is rewritten, or swept, just before the check reads the list.
    """
    one_thread(monkeypatch, index=False)
    store = _abroad(monkeypatch)
    with opened(store) as repository:
        if how == "swept":
            repository.forget_snapshots(["a@1"])
        key = manifest_key(repository.view().resolve("a@1", ("committed", "forgotten")).manifest_list)

    def checking(stepped):
        with opened(stepped) as repository:
            return repository.check()

    check = Actor("check", store, checking).until("get", key)
    with opened(store) as repository:
        if how == "rewritten":
            repository.recode()
        repository.gc()
        assert key not in keys_of(store)
    assert check.finish().problems == []
