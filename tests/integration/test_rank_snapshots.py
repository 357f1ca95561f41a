"""Every verb works on snapshots of several ranks, which have root manifests and child manifests.

A root names the children of a part; each child is the manifest of one rank, and names its packs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kit import foreign
from kit.objects import keys_of
from kit.rank_snapshots import RankWriter, assembled, columns, manifests_of, rows, strided
from kit.repositories import created, opened
from kit.shell import invoke
from snapstore import IntegrityError, Repository, SnapstoreError
from snapstore.check.damaged_packs import DamagedPacks
from snapstore.check.newest_whole import _is_whole as is_whole
from snapstore.check.report import CheckResult
from snapstore.check.verify_chunks import ChunkRebuilder
from snapstore.format.keys import pack_key
from snapstore.protocol import gc
from snapstore.retention import KeepLast
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore


def arrays(version: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Return a state of two parts; every version changes a few elements of `drift` and all of `noise`."""
    rng = np.random.default_rng(7)
    drift = rng.standard_normal((48, 40)).astype(np.float32)
    drift[version % 48, :8] += version
    noise = np.random.default_rng(version).integers(0, 255, (37, 64), np.uint8)
    return {
        "": {"step": np.full((), version, np.int64)},
        "model": {
            "drift": drift,
            "noise": noise,
            "bias": np.arange(5) + version,
            "empty": np.zeros((0, 3), np.float32),
        },
    }


def same(a: dict[str, dict[str, np.ndarray]], b: dict[str, dict[str, np.ndarray]]) -> bool:
    return {p: {n: x.tobytes() for n, x in of.items()} for p, of in a.items()} == {
        p: {n: x.tobytes() for n, x in of.items()} for p, of in b.items()
    }


def versions(store: MemoryStore, count: int = 3, **options: object) -> RankWriter:
    writer = RankWriter(store)
    for version in range(count):
        writer.save(arrays(version), step=version, **options)
    return writer


def damage(result: CheckResult) -> list[str]:
    return [problem.message for problem in result.problems]


CUTS = {"rows": rows, "columns": columns, "strided": strided}


@pytest.mark.parametrize("world", [1, 2, 4, 7])
@pytest.mark.parametrize("cut", CUTS)
def test_check_reads_every_child(cut, world):
    store = created()
    versions(store, cut=CUTS[cut], world=world)
    with opened(store) as repository:
        for step in range(3):
            snapshot = repository.view().resolve(f"ranks@{step}")
            assert same(assembled(repository.context, snapshot), arrays(step))
            assert len(manifests_of(store, snapshot)) > world
        for level in ("metadata", "data", "restore"):
            found = repository.check(level)
            assert damage(found) == []
            assert len(found.restorable) == 3
            assert found.unneeded_bytes == 0


def test_gc_keeps_what_the_root_names_and_frees_the_rest():
    store = created()
    versions(store, world=3)
    with opened(store) as repository:
        assert repository.gc().deleted_objects == 0
        before = repository.check("restore")
        assert damage(before) == []
        repository.forget_snapshots(["ranks@0", "ranks@1"])
        assert repository.gc().deleted_objects > 6
        assert damage(repository.check("restore")) == []
        last = repository.view().resolve("ranks@2")
        assert same(assembled(repository.context, last), arrays(2))
        assert set(keys_of(store, "manifests/")) == {ref.key for ref, _ in manifests_of(store, last)}
        repository.forget_snapshots(["ranks@2"], force=True)
        repository.gc()
    assert keys_of(store, "packs/") == keys_of(store, "manifests/") == []


def test_gc_lists_many_objects_side_by_side(monkeypatch):
    """It lists by the first two digits of their names; the result is the same."""
    store, prefixes = created(), []
    versions(store, 6)
    assert len(expected := gc._sizes(store)) > 20
    real = MemoryStore.list
    monkeypatch.setattr(MemoryStore, "list", lambda self, *of: prefixes.append(of[0]) or real(self, *of))
    monkeypatch.setattr(gc, "FEW_OBJECTS", 3)
    assert gc._sizes(store) == expected
    assert len(set(prefixes)) == len(prefixes) == 2 + 512
    with opened(store) as repository:
        repository.forget(run="ranks", keep=KeepLast(2))
        assert repository.gc().deleted_objects > 0
        assert repository.check("data").problems == []


def test_gc_reads_no_child():
    """The header of the root names every live object, so a job of a thousand ranks takes one read."""
    store = created()
    versions(store, 1, world=3)
    with opened(store) as repository:
        (snapshot,) = repository.snapshots()
        children = {ref.key for ref, m in manifests_of(store, snapshot) if not m.header.children}
        read: list[str] = []
        plain = store.get_range

        def get_range(key, *rest, **options):
            read.append(key)
            return plain(key, *rest, **options)

        store.get_range = get_range
        repository.gc()
        assert read
        assert children.isdisjoint(read)


def test_gc_deletes_no_children_of_a_record_that_is_missing():
    store = created()
    writer = versions(store, 1)
    record = next(key for key in keys_of(store, "snapshots/"))
    data = store.get(record)
    store.delete([record])
    with opened(store) as repository:
        with pytest.raises(IntegrityError, match="that no record explains"):
            repository.gc()
        store.put(record, data)
        repository.gc()
        assert damage(repository.check("restore")) == []
    assert writer.seq == 0


LOST = {
    "a child": lambda refs: refs[2][0].key,
    "a root": lambda refs: refs[1][0].key,
    "a pack": lambda refs: pack_key(next(m for _, m in refs if m.header.rank).header.pack_names[-1]),
}


@pytest.mark.parametrize("what", LOST)
def test_check_and_repair_name_what_is_lost(what):
    store = created()
    versions(store, 2)
    with opened(store) as repository:
        refs = manifests_of(store, repository.view().resolve("ranks@1"))
        key = LOST[what](refs)
    store.delete([key])
    with opened(store) as repository:
        found = repository.check("data")
        assert [s.ref for s in found.restorable] == ["ranks@0"]
        assert [s.ref for s in found.damaged] == ["ranks@1"]
        if what == "a child":
            assert "'model'" not in damage(found)[0]
            assert key in damage(found)[0]
        with pytest.raises(IntegrityError):
            repository.gc()
        report = repository.repair(apply=True, level="data", drop=True)
        assert [s.ref for s in report.dropped] == ["ranks@1"]
        repository.repair(apply=True, purge=True)
        repository.gc()
        assert damage(repository.check("restore")) == []
        assert [s.ref for s in repository.snapshots()] == ["ranks@0"]


@pytest.mark.parametrize("world", [2, 3])
def test_repair_heals_children_from_other_snapshots(world):
    """A damaged chunk is read from another snapshot; repair writes new children, a new root and a new revision."""
    store = created()
    state = arrays()
    first = RankWriter(store).save(state, world=world, step=0)
    writer = RankWriter(store)
    writer.seq = 0
    second = writer.save(state, world=world, step=1)
    lost = next(m for _, m in manifests_of(store, second) if m.header.rank == 1).header.pack_names[0]
    data = bytearray(store.get(pack_key(lost)))
    data[200] ^= 1
    store.delete([pack_key(lost)])
    store.put(pack_key(lost), bytes(data))
    with opened(store) as repository:
        assert [s.ref for s in repository.check("data").damaged] == ["ranks@1"]
        report = repository.repair(apply=True, level="data")
        assert [s.ref for s in report.healed] == ["ranks@1"]
        healed = repository.view().get(second.id)
        assert healed.revision == 1
        assert healed.manifests != second.manifests
        assert repository.view().get(first.id).revision == 0
        assert same(assembled(repository.context, healed), state)
        repository.repair(apply=True, purge=True)
        repository.gc()
        assert damage(repository.check("restore")) == []
        assert repository.check("restore").unneeded_bytes == 0
        assert pack_key(lost) not in keys_of(store, "packs/")


@pytest.mark.parametrize("cut", CUTS)
def test_recode_rewrites_children_and_roots(cut, monkeypatch):
    store = created()
    foreign.readable(monkeypatch)
    with foreign.written():
        versions(store, cut=CUTS[cut], world=3)
    with opened(store) as repository:
        result = repository.recode()
        assert (len(result.recoded) + len(result.skipped), result.failed) == (3, [])
        assert result.blobs >= 2
        for step in range(3):
            snapshot = repository.view().resolve(f"ranks@{step}")
            assert snapshot.revision == (snapshot in result.recoded)
            assert same(assembled(repository.context, snapshot), arrays(step))
        repository.gc()
        found = repository.check("restore")
        assert damage(found) == []
        assert found.unneeded_bytes == 0


def test_compact_rewrites_children_and_roots():
    store = created()
    writer = RankWriter(store, max_depth=6)
    for version in range(6):
        writer.save(arrays(version), step=version, world=3)
    with opened(store) as repository:
        repository.forget_snapshots([f"ranks@{step}" for step in range(5)])
        repository.gc()
        before = sum(len(store.get(key)) for key in keys_of(store, "packs/"))
        result = repository.compact()
        assert ([s.ref for s in result.rewritten], result.failed) == (["ranks@5"], [])
        last = repository.view().resolve("ranks@5")
        assert same(assembled(repository.context, last), arrays(5))
        repository.gc()
        after = sum(len(store.get(key)) for key in (*keys_of(store, "packs/"), *keys_of(store, "manifests/")))
        assert sum(len(store.get(key)) for key in keys_of(store, "packs/")) < before
        assert result.bytes_after == after
        assert damage(repository.check("restore")) == []
        assert last.depth == max(m.header.depth for _, m in manifests_of(store, last))


def test_stats_counts_each_tensor_once():
    store = created()
    versions(store, 2, world=3)
    with opened(store) as repository:
        result = repository.stats()
        held = sum(a.nbytes for version in (0, 1) for of in arrays(version).values() for a in of.values())
        assert result.logical_bytes == held
        assert sum(group.logical_bytes for group in result.groups.values()) == held
        assert result.unneeded_bytes == 0
        assert result.chunks == sum(len(m.table) for s in repository.snapshots() for _, m in manifests_of(store, s))


@pytest.mark.parametrize("cut", CUTS)
def test_diff_compares_whatever_the_boxes_are(cut):
    store = created()
    writer = RankWriter(store)
    writer.save(arrays(0), step=0, world=3, cut=CUTS[cut])
    writer.save(arrays(0), step=1, world=2)
    writer.save(arrays(2), step=2, world=5, cut=columns)
    with opened(store) as repository:
        found = repository.diff("ranks@0", "ranks@1")
        assert {t.path: t.status for t in found.tensors} == dict.fromkeys(
            ("step", "model.drift", "model.noise", "model.bias", "model.empty"), "same"
        )
        found = repository.diff("ranks@0", "ranks@2")
        changed = {t.path: t.changed_share for t in found.tensors if t.status == "changed"}
        before, after = arrays(0), arrays(2)
        assert changed == {
            "step": 1.0,
            "model.bias": 1.0,
            "model.drift": (before["model"]["drift"] != after["model"]["drift"]).mean(),
            "model.noise": (before["model"]["noise"] != after["model"]["noise"]).mean(),
        }


def test_which_snapshots_are_whole():
    store = created()
    versions(store, 3, world=2)
    with opened(store) as repository:
        before, last = (
            {name for _, m in manifests_of(store, repository.view().resolve(ref)) for name in m.header.pack_names}
            for ref in ("ranks@1", "ranks@2")
        )
    pack = min(last - before)
    store.delete([pack_key(pack)])
    with opened(store) as repository:
        packs, rebuilder = DamagedPacks(store), ChunkRebuilder(repository.context, None)
        whole = [is_whole(repository.context, s, packs, rebuilder) for s in repository.snapshots()]
    assert whole == [True, True, False]


def test_a_lost_record_is_reconstructed_from_roots_and_children():
    """It works even if the index never saw the record."""
    store = created()
    writer = RankWriter(store)
    snapshot = writer.save(arrays(), world=3)
    data = bytearray(store.get(snapshot.key))
    data[40] ^= 1
    store.delete([snapshot.key])
    store.put(snapshot.key, bytes(data))
    with opened(store) as repository:
        repository.repair(apply=True)
        (found,) = repository.snapshots()
        assert (found.features, found.manifests) == (["ranks"], snapshot.manifests)
        assert (found.logical_bytes, found.depth) == (snapshot.logical_bytes, snapshot.depth)
        assert same(assembled(repository.context, found), arrays())


@pytest.mark.parametrize("tree", [["own"], ["own", 7], ["own", [["tensor", 9, False]]], ["own", [["novel"]]], 7])
def test_check_reads_the_tree_of_own_values(tree):
    store = created()

    def change(contents):
        is_child = contents.part == "model" and not contents.children
        return replace(contents, tree=tree) if is_child else contents

    RankWriter(store).save(arrays(), world=2, changes=change)
    with opened(store) as repository:
        found = repository.check()
        assert damage(found)
        assert found.restorable == []


def test_show_and_log_name_the_ranks(tmp_path):
    root = tmp_path / "repository"
    Repository.create(root, chunk_bytes=1024).close()
    RankWriter(LocalStore(root)).save(arrays(), world=3)
    for words, expected in {("log",): "ranks", ("show", "ranks@0"): "ranks     3", ("check",): "no problem"}.items():
        result = invoke([words[0], *words[1:], "--repo", str(root)])
        assert result.exit_code == 0, result.output
        assert expected in result.output


def test_records_of_ranks_name_roots():
    """If headers disagree about the ranks, or with the record, check reports it."""
    store = created()
    writer = RankWriter(store)
    refs = writer.save(arrays(), world=2).manifests
    writer.seq += 1
    writer.commit("b" * 32, refs, step=1, features=[])
    other = RankWriter(store)
    other.seq = 5
    third = other.save(arrays(), world=3, step=2).manifests
    writer.commit("c" * 32, [refs[0], third[1]], step=3)
    with opened(store) as repository:
        found = repository.check()
        assert sorted(s.ref for s in found.restorable) == ["ranks@0", "ranks@2"]
        assert all("ranks, and the features" in message for message in damage(found))
        assert len(damage(found)) == 2


@pytest.mark.parametrize("verb", ["tag", "forget", "unforget", "recode", "compact", "gc"])
def test_every_verb_leaves_a_good_repository(verb):
    store = created()
    versions(store, 3, world=2, cut=columns)
    verbs = {
        "tag": lambda r: r.tag("ranks@1", "best"),
        "forget": lambda r: r.forget_snapshots(["ranks@0"]),
        "unforget": lambda r: (r.forget_snapshots(["ranks@0"]), r.unforget("ranks@0")),
        "recode": lambda r: r.recode(),
        "compact": lambda r: r.compact(),
        "gc": lambda r: r.gc(),
    }
    with opened(store) as repository:
        verbs[verb](repository)
        repository.gc()
        assert damage(repository.check("restore")) == []
        for snapshot in repository.snapshots():
            assert snapshot.features == ["ranks"]
            assert same(assembled(repository.context, snapshot), arrays(snapshot.step))


HOSTILE = {
    "a root that lacks a pack": lambda c: replace(c, packs=c.packs[1:], pack_sizes=c.pack_sizes[1:]),
    "a pack twice": lambda c: replace(c, packs=[*c.packs, c.packs[0]], pack_sizes=[*c.pack_sizes, c.pack_sizes[0]]),
    "another depth": lambda c: replace(c, depth=9),
    "a child less": lambda c: replace(
        c, children=c.children[:-1], logical_bytes=c.logical_bytes - c.children[-1].logical_bytes
    ),
    "children in no order": lambda c: replace(c, children=c.children[::-1]),
    "a child twice": lambda c: replace(
        c, children=[*c.children, c.children[-1]], logical_bytes=c.logical_bytes + c.children[-1].logical_bytes
    ),
    "pages that are tensors": lambda c: replace(c, tree=["pages", 0, 1]),
    "pages that nobody has": lambda c: replace(c, tree=["pages", len(c.tensors), 1]),
    "a sum that lies": lambda c: replace(c, logical_bytes=c.logical_bytes + 1),
    "another world": lambda c: replace(c, world_size=9),
    "no world": lambda c: replace(c, world_size=0),
    "no feature": lambda c: replace(c, features=[]),
    "another rank": lambda c: replace(c, rank=1),
}


def roots_only(change, contents):
    return change(contents) if contents.children and contents.part == "model" else contents


@pytest.mark.parametrize("how", HOSTILE)
def test_a_root_that_contradicts_its_children_is_found(how):
    store = created()
    writer = RankWriter(store)
    try:
        writer.save(arrays(), world=2, changes=partial(roots_only, HOSTILE[how]))
    except SnapstoreError:
        assert how in ("another rank", "no world", "no feature", "a child twice", "children in no order")
        return  # the encoder or the decoder refuses it
    with opened(store) as repository:
        found = repository.check()
        assert found.restorable == []
        assert damage(found)
