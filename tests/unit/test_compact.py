"""compact keeps every state bit for bit, never increases the bytes that gc leaves, and drops dead chunks."""

import dataclasses
from functools import cache

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import foreign
from kit.faults import Unreadable, one_thread
from kit.objects import clone, flip, flip_in_place, keys_of
from kit.reference import replace_encode
from kit.repositories import (
    OPTIONS,
    check_clean,
    check_restores,
    created,
    dearest,
    opened,
    same,
    save,
    values,
    version_of,
)
from kit.samples import THOROUGH
from kit.slow_survey import check_survey
from snapstore import (
    IntegrityError,
    InvalidInputError,
    KeepLast,
    NotFoundError,
    Repository,
    SaveOptions,
    SnapshotManager,
    StorageError,
)
from snapstore.catalog.index import Index
from snapstore.format import records
from snapstore.format.blobs import blob
from snapstore.format.blobs.codecs import sparse
from snapstore.format.keys import pack_key
from snapstore.format.manifests import delta_chain, manifest
from snapstore.rewrite import base as rewrite
from snapstore.rewrite import compact, compact_plan
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    made = MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "r", create=True)
    Repository.create(made, chunk_bytes=1024, options=OPTIONS).close()
    return made


@cache
def hollow():
    """Save a@0 to a@9 and keep only the last three. Their chains lead through chunks of the forgotten snapshots."""
    made = created()
    with opened(made) as repository:
        for step in range(10):
            save(repository, "a", step, step)
        repository.forget([KeepLast(3)], run="a")
        repository.gc()
    return made


@pytest.fixture(params=["memory", "local"])
def repo(request, tmp_path):
    """A copy of `hollow`."""
    made = clone(hollow())
    if request.param == "local":
        made = LocalStore(tmp_path / "r", create=True)
        for key in keys_of(hollow()):
            made.put(key, hollow().get(key))
    with opened(made) as repository:
        yield repository


#: Compact does the same on each store, so a run tries one of them. The other tests of `repo` and `store` try both.
one_store = pytest.mark.sampled(1)


def needed(repository):
    """Return the bytes that gc leaves."""
    stats = repository.stats()
    return stats.stored_bytes - stats.unneeded_bytes


def chains(repository, ref):
    """Yield (digest, [digest of every link]) for every chunk of a snapshot."""
    for part in repository.snapshot(ref).manifests:
        table = manifest.read(repository.store, part, None).table
        for row in range(len(table)):
            links = slice(table.starts[row], table.starts[row + 1])
            yield table.digests[row].tobytes(), [digest.tobytes() for digest in table.ref_digests[links]]


def strays(repository):
    """Return the digests of the chunks that chains lead through and no snapshot holds."""
    found = [chain for snapshot in repository.snapshots() for chain in chains(repository, snapshot.ref)]
    return {digest for _, links in found for digest in links} - {digest for digest, _ in found}


def test_all_snapshots_are_compacted(repo):
    before, size = repo.snapshots(), needed(repo)
    assert strays(repo)
    old = {ref: [digest for digest, _ in chains(repo, ref)] for ref in ("a@7", "a@8", "a@9")}
    report = repo.compact()
    assert (report.failed, report.skipped) == ([], [])
    assert [s.id for s in report.rewritten] == [s.id for s in before]
    assert report.bytes_before == size
    assert report.encoded > 0
    assert report.moved > 0
    assert report.bytes_read >= report.bytes_written > 0
    check_restores(repo)
    deleted = repo.gc().deleted_bytes
    assert needed(repo) == report.bytes_after == repo.stats().stored_bytes
    assert deleted >= report.freed_bytes > 0.1 * size
    assert not strays(repo)
    for ref, digests in old.items():
        found = list(chains(repo, ref))
        assert [digest for digest, _ in found] == digests
    for snapshot, was in zip(repo.snapshots(), before, strict=True):
        assert snapshot.revision == was.revision + 1
        for name in ("id", "seq", "state", "parent", "bases", "tags", "created", "generation", "chunks", "metrics"):
            assert repr(getattr(snapshot, name)) == repr(getattr(was, name))
        depths = [len(links) - 1 for _, links in chains(repo, snapshot.ref)]
        assert snapshot.depth == max(depths)
        assert dearest(repo.store, snapshot) <= 1.01 * OPTIONS.restore_cost
    check_clean(repo.store)


@one_store
def test_little_is_dead_afterwards(repo):
    repo.compact()
    repo.gc()
    live = {}
    for snapshot in repo.snapshots():
        for ref in snapshot.manifests:
            m = manifest.read(repo.store, ref, None)
            names = m.header.pack_names
            for number, offset, length in zip(
                m.table.ref_packs.tolist(), m.table.ref_offsets.tolist(), m.table.ref_lengths.tolist(), strict=True
            ):
                live[names[number], offset] = length
    packs = sum(info.size_bytes for info in repo.store.list("packs/"))
    rooms = int(compact_plan.room(np.array(list(live.values()))).sum())
    count = len(list(repo.store.list("packs/")))
    assert packs - rooms <= compact_plan.MAX_DEAD_SHARE * rooms + 2 * compact_plan._FRAME * count


@one_store
def test_nothing_to_do_writes_nothing(repo):
    repo.compact()
    repo.gc()
    keys = keys_of(repo.store)
    report = repo.compact()
    assert (report.rewritten, report.bytes_written, report.freed_bytes, len(report.skipped)) == ([], 0, 0, 3)
    assert keys_of(repo.store) == keys
    with Repository.create(MemoryStore()) as empty:
        assert empty.compact().rewritten == []


@one_store
def test_a_dry_run_changes_nothing_and_is_about_right(repo):
    keys = keys_of(repo.store)
    dry = repo.compact(dry_run=True)
    assert keys_of(repo.store) == keys
    real = repo.compact()
    assert dry.dry_run
    assert (dry.encoded, [s.id for s in dry.rewritten]) == (real.encoded, [s.id for s in real.rewritten])
    assert dry.bytes_written == pytest.approx(real.bytes_written, rel=0.2)
    assert dry.bytes_after == pytest.approx(real.bytes_after, rel=0.1)


@one_store
def test_only_the_named_snapshots_are_rewritten(repo):
    size = needed(repo)
    others = {s.ref: s for s in repo.snapshots() if s.ref != "a@7"}
    report = repo.compact(["a@7", "a@7"])
    assert {s.ref for s in report.rewritten} <= {"a@7"}
    assert all(repo.snapshot(ref) == snapshot for ref, snapshot in others.items())
    check_restores(repo)
    repo.gc()
    assert needed(repo) <= size
    repo.compact()
    repo.gc()
    assert not strays(repo)
    check_clean(repo.store)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [0, 0.01, 0.1, 0.3, 0.6, 1.0])
def test_no_more_is_written_than_allowed(repo, share):
    dry, size = repo.compact(dry_run=True), needed(repo)
    limit = int(share * dry.bytes_written)
    report = repo.compact(max_repack_bytes=limit)
    assert report.bytes_written <= limit
    check_restores(repo)
    repo.gc()
    assert needed(repo) <= size
    for _ in range(30):  # many limited runs come close to the size after one unlimited run
        if not repo.compact(max_repack_bytes=max(20_000, limit)).rewritten:
            break
        repo.gc()
    assert needed(repo) <= 1.1 * dry.bytes_after
    check_clean(repo.store)


def test_the_most_profitable_comes_first():
    """If the limit is enough for only one of two packs, compact empties the one with more dead bytes."""
    store = MemoryStore()
    rng = np.random.default_rng(1)
    with Repository.create(store, chunk_bytes=4096, options=SaveOptions(pack_bytes=2**20, threads=1)) as repository:
        for run, lives in (("a", 24), ("b", 8)):  # of 32 chunks
            state = {"w": rng.integers(0, 256, 32 * 4096, np.uint8)}
            repository.save(state, run=run, step=0)
            state["w"][lives * 4096 :] = rng.integers(0, 256, (32 - lives) * 4096, np.uint8)
            repository.save(state, run=run, step=1)
            repository.forget([KeepLast(1)], run=run)
        repository.gc()
        report = repository.compact(max_repack_bytes=25 * 4096)
        assert [s.run for s in report.rewritten] == ["b"]
        assert report.freed_bytes > 20 * 4096
        assert [s.run for s in repository.compact().rewritten] == ["a"]


@one_store
def test_full_chunks_become_deltas(store):
    """Snapshots that were saved full become deltas to each other, and need fewer bytes.

    The cost to restore their chains stays within the limit.
    """
    rng = np.random.default_rng(2)
    state = {"w": rng.standard_normal(8192).astype(np.float32)}
    with opened(store) as repository:
        for step in range(8):
            state["w"][step::50] += 1
            repository.save(state, run="a", step=step, full=True)
        size = needed(repository)
        report = repository.compact()
        assert report.failed == []
        repository.gc()
        assert needed(repository) < 0.6 * size
        assert max(s.depth for s in repository.snapshots()) > 2
        assert max(dearest(store, s) for s in repository.snapshots()) <= OPTIONS.restore_cost
        assert (repository.restore("a@7")["w"] == state["w"]).all()
        assert repository.check("restore").ok
        assert repository.compact().freed_bytes >= 0


@pytest.mark.parametrize("count", [2, 3])
def test_a_dry_run_plans_no_circle_of_deltas(count):
    """Each chunk is the neighbour of another one, in a circle: one of them stays full."""
    rng = np.random.default_rng(0)
    states = [rng.standard_normal(1 << 16).astype(np.float32)]
    for _ in range(count - 1):
        states.append(states[-1].copy())
        states[-1][rng.integers(0, 1 << 16, 300)] += 1
    with opened(created(chunk_bytes=16384)) as repository:
        first = repository.save({str(i): states[i] for i in range(count)}, run="b", step=0)
        moved = {str(i): states[(i + 1) % count] for i in range(count)}
        repository.save(moved, run="a", step=0, parent=f"id:{first.id}")
        dry, real = repository.compact(dry_run=True), repository.compact()
        assert dry.bytes_before > 0.8 * count * states[0].nbytes
        assert dry.bytes_after == pytest.approx(real.bytes_after, rel=0.1)
        assert dry.encoded == real.encoded
        repository.gc()
        assert needed(repository) == real.bytes_after
        assert repository.check("restore").ok


def test_a_nan_in_the_state_does_not_fail_compact():
    """A state with a NaN is compacted.

    A NaN does not equal itself, so the old and the new manifest must not be compared value by value.
    """
    rng = np.random.default_rng(0)
    state = {"trainer": {"w": rng.standard_normal(8192).astype(np.float32), "best": float("nan"), "zero": -0.0}}
    store = created()
    with opened(store) as repository:
        for step in range(6):
            state["trainer"]["w"][step::50] += 1
            repository.save(state, run="a", step=step)
        repository.forget([KeepLast(2)], run="a")
        report = repository.compact()
        assert (len(report.rewritten), report.failed) == (2, [])
        assert same(repository.restore("a@5"), state)


@one_store
def test_saves_go_on_from_a_compacted_parent(repo):
    repo.compact()
    repo.gc()
    snapshot = save(repo, "a", 10, 10)
    assert snapshot.bases
    assert snapshot.new_chunks < snapshot.chunks
    check_restores(repo)


def test_a_manager_goes_on_over_a_compacted_parent(tmp_path):
    """After a compact and a gc, the manager still saves deltas to the bytes that it holds in memory.

    They are the bytes of the parent, whose blobs were rewritten and collected.
    """
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal(100_000).astype(np.float32)}
    expected = {}
    with SnapshotManager(tmp_path / "r", run="a", async_save=False) as manager:
        for step in range(12):
            state["w"][:: 7 + step] *= np.float32(1.01)
            expected[step] = state["w"].copy()
            saved = manager.save(step, state).result()
            with Repository.open(tmp_path / "r") as other:
                other.forget([KeepLast(2)], run="a")
                other.gc()
                assert other.compact().failed == []
                other.gc()
        assert saved.depth > 0
        with Repository.open(tmp_path / "r") as other:
            for step in (10, 11):
                assert (other.restore(f"a@{step}")["w"] == expected[step]).all()
            assert other.check("restore").ok
            assert other.stats().unneeded_bytes == 0


@one_store
def test_forgotten_ones_are_left_alone_and_come_back(repo):
    repo.forget_snapshots(["a@7"])
    forgotten = repo.view().resolve("a@7", ("forgotten",))
    assert {s.ref for s in repo.compact().rewritten} <= {"a@8", "a@9"}
    assert repo.view().get(forgotten.id) == forgotten
    repo.unforget("a@7")
    check_restores(repo)
    repo.compact()
    repo.gc()
    assert not strays(repo)
    check_clean(repo.store)


@one_store
def test_bad_arguments(repo):
    for wrong in (-1, 1.5, "10G", True):
        with pytest.raises(InvalidInputError, match=r"max_repack_bytes .*expected an int of 0 or more"):
            repo.compact(max_repack_bytes=wrong)
    with pytest.raises(InvalidInputError, match="got one str"):
        repo.compact("a@7")
    with pytest.raises(NotFoundError):
        repo.compact(["a@99"])
    assert repo.compact([]).rewritten == []


# --- bases that several chunks share ---------------------------------------------------------------------------------


def forked(count, scale=1, chunks=4):
    """Return a store with `count` runs that continue from one forgotten base, and the runs' states by reference."""
    store = MemoryStore()
    Repository.create(store, chunk_bytes=16384, options=SaveOptions(pack_bytes=65536, threads=1)).close()
    rng = np.random.default_rng(3)
    base = rng.standard_normal(4096 * chunks).astype(np.float32)
    states = {}
    with opened(store) as repository:
        repository.save({"w": base}, run="base", step=0)
        for number in range(count):
            state = base.copy()
            state[:: 40 * scale] += np.float32(number + 1)
            states[f"r{number}@0"] = state
            repository.save({"w": state}, run=f"r{number}", step=0, parent="base@0")
        repository.forget_snapshots(["base@0"], force=True)
        repository.gc()
    return store, states


@pytest.mark.parametrize("count", [1, 2, 4])
def test_forks_of_a_base_that_is_gone(count):
    """The chunks of one run become full. Those of the other runs become deltas to them."""
    store, states = forked(count)
    with opened(store) as repository:
        size = needed(repository)
        assert repository.stats().base_only_bytes > 0
        report = repository.compact()
        repository.gc()
        assert needed(repository) == report.bytes_after <= size
        assert repository.stats().base_only_bytes == 0
        depths = [repository.snapshot(ref).depth for ref in states]
        assert sorted(depths) == [0] + [1] * (count - 1)
        for ref, state in states.items():
            assert (repository.restore(ref)["w"] == state).all()
        assert repository.check("restore").ok


def test_manifests_are_read_as_often_however_many_chunks_there_are(monkeypatch):
    counts, read = [], manifest.read
    monkeypatch.setattr(manifest, "read", lambda *args: (counts.append(1), read(*args))[1])
    found = []
    for chunks in (4, 40):
        with opened(forked(2, chunks=chunks)[0]) as repository:
            counts.clear()
            assert repository.compact().encoded > chunks
            found.append(len(counts))
    assert found[0] == found[1]


def test_a_base_that_is_cheaper_than_what_hangs_on_it_stays(monkeypatch):
    """A forgotten base of zeros needs few bytes, so compact keeps the noise as a delta to it.

    As full chunks the noise would need as many bytes as the delta does. The repository does not grow.
    """
    monkeypatch.setattr(sparse, "TRIED_BELOW_SHARE", -1.0)
    store = created(4096)
    rng = np.random.default_rng(5)
    with opened(store) as repository:
        zeros = np.zeros(16384, np.uint8)
        repository.save({"w": zeros}, run="a", step=0)
        noise = zeros.copy()
        noise[::2] = rng.integers(0, 256, 8192, np.uint8)
        repository.save({"w": noise}, run="a", step=1)
        repository.forget([KeepLast(1)], run="a")
        repository.gc()
        size = needed(repository)
        repository.compact()
        repository.gc()
        assert needed(repository) <= size
        assert (repository.restore("a@1")["w"] == noise).all()


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_memory():
    with opened(clone(hollow())) as repository:
        yield repository


@pytest.mark.parametrize("harm", ["pack missing", "footer", "blobs", "manifest", "manifest missing"])
def test_damage_fails_the_snapshots_that_have_it_and_no_other(in_memory, harm):
    repo, store = in_memory, in_memory.store
    ref = repo.snapshot("a@7").manifests[1]
    header = manifest.read(store, ref, None).header
    key = ref.key if "manifest" in harm else pack_key(header.pack_names[-1])
    if "missing" in harm:
        store.delete([key])
    elif harm == "blobs":
        for key in map(pack_key, header.pack_names):
            for at in range(100, store.stat(key).size_bytes - 1000, 97):
                flip_in_place(store, key, at)
    else:
        flip_in_place(store, key, -40 if harm == "footer" else 60)
    before = {s.id: s for s in repo.snapshots()}
    sound = {s.id for s in before.values() if not _fails(repo, s)}
    report = repo.compact()
    for snapshot, message in report.failed:
        assert message.startswith(f"{snapshot.ref}: ")
        assert repo.view().get(snapshot.id) == before[snapshot.id]
        assert snapshot.id not in sound or harm in ("footer", "pack missing")
    assert {s.id for s, _ in report.failed} | {s.id for s in report.rewritten + report.skipped} == before.keys()
    assert report.failed
    for snapshot in before.values():
        assert _fails(repo, snapshot) == (snapshot.id not in sound)
    assert keys_of(store, "sessions/") == []


@pytest.mark.parametrize("number", [0, 1])
def test_the_survey_of_a_snapshot_with_a_damaged_part(in_memory, number):
    """Compact may rewrite no part of a snapshot with a damaged part, not even a sound part before the damaged one."""
    chosen = {snapshot.id for snapshot in in_memory.snapshots()}
    assert check_survey(in_memory, chosen).edges
    flip_in_place(in_memory.store, in_memory.snapshot("a@7").manifests[number].key, 60)
    found = check_survey(in_memory, chosen)
    assert found.damaged == {in_memory.snapshot("a@7").id}
    assert found.pinned


def test_a_dry_run_lists_the_records_as_often_however_many_snapshots_there_are(monkeypatch):
    counts, refresh = [], Index.refresh
    monkeypatch.setattr(Index, "refresh", lambda *args, **options: (counts.append(1), refresh(*args, **options))[1])
    found = []
    for count in (2, 4):
        with opened(forked(count)[0]) as repo:
            counts.clear()
            assert len(repo.compact(dry_run=True).rewritten) == count
        found.append(len(counts))
    assert found[0] == found[1]


def test_a_snapshot_that_is_collected_during_a_dry_run_is_skipped(in_memory, monkeypatch):
    rewrite_one, done = rewrite.Rewriting.rewrite_one, []

    def rewrite_and_collect(self, snapshot):
        rewrite_one(self, snapshot)
        if not done:
            with opened(in_memory.store) as other:
                other.forget_snapshots(["a@9"], force=True)
                other.gc()
        done.append(snapshot.step)

    monkeypatch.setattr(rewrite.Rewriting, "rewrite_one", rewrite_and_collect)
    report = in_memory.compact(dry_run=True)
    assert done == [7, 8, 9]
    assert (report.failed, [s.step for s in report.skipped]) == ([], [9])


def _fails(repo, snapshot):
    try:
        return not same(repo.restore(f"id:{snapshot.id}"), values(*version_of(snapshot)))
    except Exception:  # noqa: BLE001
        return True


def _with_manifest(store, was, m, **changes):
    """Replace the only manifest of a snapshot by one of another writer: `m` with some changes."""
    others = {"rank": 0, "sequence": 0, "part": "", "made_for": None}
    data = manifest.encode(dataclasses.replace(manifest.ManifestContents.of(m), **others | changes))
    ref = manifest.ref_of(data)
    store.put(ref.key, data)
    revision = was.revised(manifests=[ref])
    store.put(revision.key, records.encode(revision))


def test_a_manifest_that_names_a_pack_twice_is_not_rewritten(store):
    rng = np.random.default_rng(5)
    kept, other = rng.standard_normal((2, 4096)).astype(np.float32)
    with opened(store) as repo:
        repo.save({"x": kept, "y": other}, run="a", step=0, full=True)
        repo.save({"x": kept, "y": -other[::-1]}, run="a", step=1)
        repo.forget_snapshots(["a@0"])
        repo.gc()
        was = repo.snapshot("a@1")
        m = manifest.read(store, was.manifests[0], None)
        (first, *names), (size, *sizes), packs = m.header.pack_names, m.header.pack_size_list, m.table.ref_packs
        table = dataclasses.replace(m.table, ref_packs=np.where(packs == 0, 1, packs + (packs > 0)))
        _with_manifest(store, was, m, table=table, packs=[first, first, *names], pack_sizes=[size, size, *sizes])
        assert repo.check("restore").ok
        ((_, message),) = repo.compact().failed
        assert "names a pack twice" in message
        assert repo.check("restore").ok
        assert (repo.restore("a@1")["x"] == kept).all()


def two_runs(repo, steps, **options):
    """Save some steps of runs a and b; return the last state of b."""
    rng = np.random.default_rng(4)
    for run in "ab":
        state = {"w": rng.standard_normal(8192).astype(np.float32)}
        for step in range(steps):
            state["w"][step::50] += 1
            repo.save(state, run=run, step=step, **options)
    return state


@pytest.mark.parametrize("what", ["dtype", "chunks"])
def test_a_manifest_that_makes_no_sense_does_not_stop_the_others(what):
    """A manifest with an unknown dtype, or with a tensor that lacks a chunk, does not stop the other snapshots.

    Its SHA-256 is right, so the digest does not show that something is wrong.
    """
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repo:
        state = two_runs(repo, 3, full=True)
        was = repo.snapshot("a@0")
        m = manifest.read(store, was.manifests[0], None)
        (entry,), table = m.tensors, m.table
        if what == "dtype":
            entry = msgspec.structs.replace(entry, kind="tensor", dtype="float7")
        else:
            table = table.take(np.arange(len(table) - 1))
            entry = msgspec.structs.replace(entry, boxes=[msgspec.structs.replace(entry.boxes[0], chunks=len(table))])
        _with_manifest(store, was, m, tensors=[entry], table=table)
        report = repo.compact()
        assert {s.ref for s in report.rewritten} >= {"a@2", "b@1", "b@2"}
        repo.gc()
        assert (repo.restore("b@2")["w"] == state["w"]).all()


@pytest.mark.parametrize("forged", ["both", "the first", "the second"])
def test_chunks_that_cut_an_element_do_not_stop_the_others(forged):
    """Two bytes tensors of odd lengths are forged into one of float32, which then has a chunk of half an element."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=2**17, options=OPTIONS) as repo:
        state = two_runs(repo, 3, full=True)
        for step in range(2):
            data = np.random.default_rng(6).integers(0, 256, 200_000, np.uint8)
            data[step::50] = 7
            repo.save({"x": data[:100_001], "y": data[100_001:]}, run="forged", step=step, full=True)
        for ref in {"both": ("forged@0", "forged@1"), "the first": ("forged@0",)}.get(forged, ("forged@1",)):
            was = repo.snapshot(ref)
            m = manifest.read(store, was.manifests[0], None)
            box = msgspec.structs.replace(m.tensors[0].boxes[0], sizes=[50_000], chunks=2)
            entry = msgspec.structs.replace(m.tensors[0], dtype="<f4", shape=[50_000], boxes=[box])
            _with_manifest(store, was, m, tensors=[entry])
        report = repo.compact()
        assert {s.ref for s in report.rewritten} >= {"a@2", "b@1", "b@2"}
        repo.gc()
        assert (repo.restore("b@2")["w"] == state["w"]).all()


@pytest.mark.parametrize("verb", ["compact", "recode"])
@pytest.mark.parametrize("what", ["pack", "manifest"])
def test_an_unreadable_object_fails_only_the_snapshots_that_need_it(what, verb, monkeypatch):
    """An unreadable pack or manifest fails its own snapshot, and the other snapshots are rewritten.

    The snapshot is tagged, so a repair cannot drop it. It must not prevent every later compact and recode.
    """
    foreign.readable(monkeypatch)
    store = created()
    with opened(store) as repo, foreign.written():
        lost = repo.save({"w": np.arange(8192)}, run="a", step=0, tags=["paper"])
        for step in range(10):
            save(repo, "b", step, step)
        repo.forget([KeepLast(3)], run="b")
    (ref,) = lost.manifests
    names = manifest.read(store, ref, None).header.pack_names
    bad = [ref.key] if what == "manifest" else map(pack_key, names)
    with opened(Unreadable(store, *bad)) as repo:
        report = getattr(repo, verb)()
        ((failed, message),) = report.failed
        assert failed == lost
        assert "Input/output error (injected); run 'snapstore check --read-data'" in message
        rewritten = report.rewritten if verb == "compact" else report.recoded
        assert {s.ref for s in rewritten} == {"b@7", "b@8", "b@9"}
        for snapshot in rewritten:
            assert same(repo.restore(snapshot.ref), values(*version_of(snapshot)))


def test_a_forged_pack_beyond_a_tib_does_not_stop_the_others():
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repo:
        state = two_runs(repo, 6)
        for run in "ab":
            repo.forget([KeepLast(2)], run=run)
        was = repo.snapshot("a@5")
        m = manifest.read(store, was.manifests[0], None)
        offsets, sizes = m.table.ref_offsets.copy(), m.header.pack_size_list
        offsets[0], sizes[m.table.ref_packs[0]] = 2**50, 2**51
        table = dataclasses.replace(m.table, ref_offsets=offsets)
        _with_manifest(store, was, m, table=table, pack_sizes=sizes)
        report = repo.compact()
        assert [s.ref for s, _ in report.failed] == ["a@5"]
        assert {s.ref for s in report.rewritten} >= {"b@4", "b@5"}
        assert (repo.restore("b@5")["w"] == state["w"]).all()


def test_a_wrong_result_of_the_encoder_is_not_published(in_memory, monkeypatch):
    repo, real = in_memory, blob.encode

    def encode(source, *rest, **options):
        wrong = source.copy()
        wrong[7] ^= 4
        return real(wrong, *rest, **options)

    keys = keys_of(repo.store, "snapshots/")
    with monkeypatch.context() as patch:
        replace_encode(patch, encode)
        report = repo.compact()
    assert report.failed
    assert all("does not decode to what it was made of" in message for _, message in report.failed)
    check_restores(repo)
    assert len(keys_of(repo.store, "snapshots/")) == len(keys) + len(report.rewritten)
    assert repo.compact().failed == []
    repo.gc()
    check_clean(repo.store)


def test_a_store_that_fails_ends_it(in_memory, monkeypatch):
    repo = in_memory

    def put(key, data):
        raise StorageError("503")

    with monkeypatch.context() as patch:
        patch.setattr(repo.store, "put", put)
        with pytest.raises(StorageError, match="503"):
            repo.compact()
    assert repo.compact().failed == []
    repo.gc()
    check_clean(repo.store)


def test_blobs_that_only_a_gpu_decodes_move_unchanged(monkeypatch):
    """Blobs in nvCOMP's ANS codec keep their chains on a machine without nvCOMP.

    Compact may still empty their packs: it copies such blobs unchanged.
    """
    store = created()
    with opened(store) as repo:
        with monkeypatch.context() as patch:
            foreign.readable(patch)
            with foreign.written():
                for step in range(8):
                    save(repo, "a", step, step)
        repo.forget([KeepLast(2)], run="a")
        repo.gc()
        size = needed(repo)
        report = repo.compact()
        assert (report.encoded, report.failed) == (0, [])
        assert report.moved > 0
        repo.gc()
        assert needed(repo) <= size
        foreign.readable(monkeypatch)
        check_restores(repo)


# --- equal chunks in several packs


def twins(store, count=4):
    """Save runs that store one frozen tensor each, beside a tensor of their own that changes."""
    rng = np.random.default_rng(1)
    frozen = rng.standard_normal(16_384, np.float32)
    states = {}
    with Repository.open(store, options=dataclasses.replace(OPTIONS, share_runs=False)) as repository:
        for run in "abcdef"[:count]:
            own = rng.standard_normal(2048, np.float32)
            for step in range(3):
                own = own + np.float32(1e-3)
                states[f"{run}@{step}"] = {"base": frozen, "own": own}
                repository.save(states[f"{run}@{step}"], run=run, step=step)
    return states


def test_equal_chunks_of_runs_are_stored_once(store):
    states = twins(store)
    with opened(store) as repository:
        before = needed(repository)
        assert before > 4 * 50_000
        dry = repository.compact(dry_run=True)
        report = repository.compact()
        assert report.failed == []
        assert report.bytes_written < 50_000, "the frozen chunks are shared, not copied"
        assert report.freed_bytes > 3 * 50_000
        assert abs(dry.bytes_after - report.bytes_after) < 5000
        assert repository.gc().deleted_bytes > 3 * 50_000
        assert repository.stats().stored_bytes == needed(repository) == report.bytes_after
        for ref, state in states.items():
            assert same(repository.restore(ref), state)
        assert repository.compact().rewritten == []
        assert {row.name: row.unshared_bytes < 50_000 for row in repository.du().rows} == dict.fromkeys("abcd", True)
        repository.forget_snapshots([f"a@{step}" for step in range(3)], force=True)
        repository.gc()
        assert repository.check("restore").ok
        assert same(repository.restore("d@2"), states["d@2"])


@pytest.mark.parametrize("way", ["some", "limit", "damaged", "quarantined"])
def test_copies_that_cannot_be_shared_stay(way):
    """A copy is shared only with intact, equal bytes, and only snapshots that may be rewritten lose theirs."""
    store = created()
    states = twins(store, 3)
    with opened(store) as repository:
        before = needed(repository)
        if way == "some":
            report = repository.compact(["a@0", "a@1", "a@2"])
            assert report.freed_bytes > 50_000, "a refers to the blobs of b, which stay as they are"
            assert {s.run for s in report.rewritten} == {"a"}
        elif way == "limit":
            report = repository.compact(max_repack_bytes=0)
            assert report.bytes_written == 0
            assert report.bytes_after == before
        else:
            m = manifest.read(store, repository.snapshot("a@0").manifests[0], None)
            for name in m.own_packs:
                flip_in_place(store, pack_key(name), 200)
            if way == "quarantined":
                repository.repair(level="data", apply=True)
            repository.compact()
        repository.gc()
        for ref in ("b@0", "b@2", "c@0", "c@2"):
            assert same(repository.restore(ref), states[ref])


# --- any history -----------------------------------------------------------------------------------------------------


@settings(max_examples=40 if THOROUGH else 12, deadline=None)
@given(st.data())
def test_any_history(data):
    """After any history, compact does not grow the repository, and all snapshots that stay restore.

    The history has runs, forks, duplicate chunks, values that return, and forgotten snapshots. PART_BYTES is small, so
    compact also makes changes that gain little. A new manifest may be longer than the gain, by some hundred bytes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_plan, "PART_BYTES", 8)
        one_thread(patch, index=False)
        _any_history(data.draw)


def _any_history(draw):
    store = created(512)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    states = []
    options = dataclasses.replace(OPTIONS, share_runs=draw(st.booleans()))  # False: equal chunks in several packs
    with Repository.open(store, options=options) as repo:
        for number in range(draw(st.integers(1, 9))):
            again = draw(st.integers(0, len(states) - 1)) if states and draw(st.booleans()) else len(states) - 1
            base = dict(states[again][1]) if states else {}
            for name in draw(st.sets(st.sampled_from("uvw"), min_size=1)):
                kind = draw(st.sampled_from([np.float32, np.uint8, np.float16]))
                size = draw(st.sampled_from([4096, 5120])) // np.dtype(kind).itemsize
                value = base.get(name)
                if value is None or draw(st.integers(0, 3)) == 0:
                    value = (rng.standard_normal(size) * 3).astype(kind)
                    if draw(st.booleans()):
                        value[:] = np.tile(value[: size // 4], 4)  # duplicates
                else:
                    value = value.copy()
                    value[:: draw(st.integers(1, 50))] += value.dtype.type(1)
                base[name] = value
            run = draw(st.sampled_from("abc"))
            others = [s.ref for s in repo.snapshots()]
            parent = draw(st.sampled_from(others)) if others and draw(st.booleans()) else None
            repo.save(base, run=run, step=number, parent=parent, full=draw(st.integers(0, 4)) == 0)
            states.append((f"{run}@{number}", base))
        gone = draw(st.sets(st.sampled_from([ref for ref, _ in states]), max_size=len(states) - 1))
        repo.forget_snapshots(sorted(gone), force=True)
        if draw(st.booleans()):
            repo.gc()
        size = needed(repo)
        limit = draw(st.sampled_from([None, None, None, 0, 3000, 20_000]))
        some = draw(st.sets(st.sampled_from([s.ref for s in repo.snapshots()]))) if draw(st.booleans()) else None
        check_survey(repo, {s.id for s in repo.snapshots() if some is None or s.ref in some})
        report = repo.compact(some, max_repack_bytes=limit)
        assert report.failed == []
        assert report.bytes_before == size
        assert limit is None or report.bytes_written <= limit
        grown = 512 * len(report.rewritten)
        if limit is not None:  # if the cost exceeds the estimate, compact stops before a pack is empty
            grown += 2 * report.bytes_written  # blobs, and their share of the other bytes of a pack
        assert report.bytes_after <= size + grown
        repo.gc()
        assert needed(repo) == report.bytes_after
        before = repo.stats().stored_bytes
        check_survey(repo, {s.id for s in repo.snapshots()})
        final = repo.compact()
        repo.gc()
        assert repo.stats().stored_bytes == final.bytes_after <= before + 512 * len(final.rewritten)
        for ref, state in states:
            if ref not in gone:
                assert same(repo.restore(ref), state)
        assert repo.check("restore").ok


@pytest.mark.parametrize("verb", ["recode", "compact, encoding", "compact, moving"])
def test_a_blob_is_not_taken_for_its_duplicate_by_its_name(verb, monkeypatch):
    """A rewrite of b@1 does not use the blob of a@0, which has the right name and wrong bytes.

    The chunk of a@0 was damaged before it was encoded, so its blob has the right digest and a valid checksum.
    """
    foreign.readable(monkeypatch)
    rng, real = np.random.default_rng(0), blob.encode
    x, many = rng.standard_normal(1024, np.float32), rng.standard_normal((2, 30 * 1024), np.float32)

    def lying(source, *rest, **options):
        if source.tobytes() == x.tobytes():
            source = source.copy()
            source[7] ^= 4
        return real(source, *rest, **options)

    store = MemoryStore()
    options = dataclasses.replace(OPTIONS, pack_bytes=2**20, verify_writes="off", share_runs=False)
    Repository.create(store, chunk_bytes=4096).close()
    with Repository.open(store, options=options) as repo:
        with monkeypatch.context() as patch:
            replace_encode(patch, lying)
            repo.save({"x": x}, run="a", step=0)
        with pytest.raises(IntegrityError):
            repo.restore("a@0")
        if verb == "recode":
            with foreign.written():
                repo.save({"x": x}, run="b", step=1)
        elif verb == "compact, encoding":
            repo.save({"x": np.nextafter(x, 9)}, run="b", step=0)
            repo.save({"x": x}, run="b", step=1)
        else:
            repo.save({"x": x, "y": many[0]}, run="b", step=0)
            repo.save({"x": x, "y": many[1]}, run="b", step=1)
        if verb != "recode":
            repo.forget_snapshots(["b@0"])
            repo.gc()
        report = repo.recode() if verb == "recode" else repo.compact()
        assert [s.ref for s in (report.recoded if verb == "recode" else report.rewritten)] == ["b@1"]
        repo.gc()
        assert (repo.restore("b@1")["x"] == x).all()


@pytest.mark.parametrize("stand", ["before", "behind the choice", "behind the copy"])
@pytest.mark.parametrize("verb", ["recode", "compact"])
def test_nothing_moves_out_of_quarantine(verb, stand, monkeypatch):
    """A rewrite copies no blob out of a pack in quarantine, because nothing would mark the copy as suspect.

    a@1 needs a blob that was encoded wrongly. A repair finds it before the rewrite, or while the rewrite runs.
    """
    foreign.readable(monkeypatch)
    rng, real = np.random.default_rng(0), blob.encode
    x, y = rng.standard_normal(1024, np.float32), rng.standard_normal(30 * 1024, np.float32)

    def lying(source, *rest, **options):
        source = source.copy()
        source[7] ^= 4
        return real(source, *rest, **options)

    store, options = MemoryStore(), dataclasses.replace(OPTIONS, pack_bytes=2**20, verify_writes="off")
    Repository.create(store, chunk_bytes=4096).close()

    def repairing():
        with Repository.open(store, options=options) as other:
            assert [s.ref for s, _ in other.repair(apply=True, level="restore").lost] == ["a@1"]

    with Repository.open(store, options=options) as repo:
        if verb == "recode":  # a delta: recode does not rebuild its chunk, so no digest shows the error
            with foreign.written(), monkeypatch.context() as patch:
                repo.save({"x": x}, run="a", step=0)
                x *= np.float32(1 + 1e-6)
                replace_encode(patch, lying)
                repo.save({"x": x}, run="a", step=1)
        else:  # a chunk in a pack that is mostly dead
            with monkeypatch.context() as patch:
                replace_encode(patch, lying)
                repo.save({"x": x, "y": y}, run="a", step=0)
            repo.save({"x": x}, run="a", step=1)
            repo.forget_snapshots(["a@0"])
            repo.gc()
        manifests = repo.snapshot("a@1").manifests
        if stand == "before":
            repairing()
        else:
            step = "_rewrite" if stand == "behind the choice" else "_write_all"
            real_step, times = getattr(rewrite.Rewriting, step), []

            def meanwhile(*args):
                times.append(stand)
                if stand == "behind the choice" and len(times) == 1:
                    repairing()
                result = real_step(*args)
                if stand == "behind the copy" and len(times) == 1:
                    repairing()
                return result

            monkeypatch.setattr(rewrite.Rewriting, step, meanwhile)
        if verb == "recode":
            assert [s.ref for s, why in repo.recode().failed if "quarantine" in why] == ["a@1"]
        else:
            assert repo.compact().rewritten == []
        assert repo.snapshot("a@1").manifests == manifests
        assert len(repo.in_need_of_quarantined([repo.snapshot("a@1")])) == 1
        repo.save({"x": x}, run="a", step=2)
        assert (repo.restore("a@2")["x"] == x).all()


def test_an_unreadable_record_stops_it(repo):
    """Without the record, everything that its snapshot needs would count as dead. So nothing is rewritten."""
    snapshot = repo.snapshot("a@8")
    flip(repo.store, snapshot.key, 40)
    before = {info.key for info in repo.store.list("")}
    with pytest.raises(IntegrityError, match=r"compact: .*nothing was rewritten"):
        repo.compact()
    assert {info.key for info in repo.store.list("")} == before


def test_a_chain_with_several_edges_stays_within_the_format():
    """A chain is not changed if it would get too many links.

    The first edge has no new chain. The new chain of the second edge is short enough by itself, but too long together
    with the links above the first edge.
    """

    def links(first, count, dropped=None):
        places = [delta_chain.Place("p", 1000 * i, 10) for i in range(first, first + count)]
        return [delta_chain.Link(1, bytes([i // 250, i % 250]) * 8, 1000, place, is_kept=i != dropped)
                for i, place in zip(range(first, first + count), places, strict=True)]  # fmt: skip

    chain = links(0, 100, dropped=99) + links(100, 60, dropped=130)
    compacting = object.__new__(compact._Compacting)
    compacting._plan, compacting._restore_cost = compact_plan.CompactPlan(delta_chain.Digests()), 1000.0
    compacting._fresh, compacting._chains = {}, {chain[129].digest: [chain[129], *links(500, 130)]}
    assert len(compacting._resolved(chain[100:])) == 160
    assert compacting._resolved(chain) == chain
