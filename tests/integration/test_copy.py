"""A copy brings over whole snapshots, verifies every byte, and sends nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kit.damage import three
from kit.faults import READ_FAULTS, FaultStore, Unreadable
from kit.objects import clone, flip, keys_of, with_keys_alone
from kit.processes import environment
from kit.ranks import save_shared
from kit.reference import replace_digest
from kit.repositories import (
    OPTIONS,
    check_clean,
    created,
    created_like,
    lasting,
    objects_of,
    opened,
    same,
    save,
    snapshot_of,
    values,
)
from kit.s3_stores import fresh_url, moto_bucket, needs_server
from snapstore import (
    AlreadyExistsError,
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    KeepLast,
    NotFoundError,
    Repository,
    SnapshotManager,
    StorageError,
)
from snapstore.check.verify_chunks import ChunkRebuilder
from snapstore.chunks import limits
from snapstore.cli import commands
from snapstore.copy import mirror_retention, moving
from snapstore.copy.copy import Copier
from snapstore.copy.mirror_retention import Retention
from snapstore.copy.moving import move
from snapstore.engine import reference
from snapstore.errors import UnreadRecordError
from snapstore.format.manifests import manifest
from snapstore.protocol import tags
from snapstore.save.known_chunks import Bases
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.fixture(scope="module")
def made():
    """a@0 to a@3, the last one of an unchanged state, and b@0 that was forked from a@1."""
    store = created()
    with opened(store) as repository:
        for step, version in enumerate((0, 1, 2, 2)):
            save(repository, "a", step, version, tags=("good",) if step == 1 else ())
        save(repository, "b", 0, 50, parent="a@1")
    return store


@pytest.fixture
def source(made):
    return clone(made)


def copied(source, *refs, to=None, **options):
    """Copy, and return (the destination, the result)."""
    to = to or MemoryStore()
    with opened(source) as repository:
        result = repository.copy(list(refs) or None, to=to, **options)
    assert result.failed == []
    return to, result


def test_everything_of_a_snapshot_comes_over(source):
    target, result = copied(source)
    assert [s.ref for s in result.copied] == ["a@0", "a@1", "a@2", "a@3", "b@0"]
    with opened(source) as before, opened(target) as after:
        assert [lasting(s) for s in before.snapshots()] == [lasting(s) for s in after.snapshots()]
        assert [s.tags for s in before.snapshots()] == [s.tags for s in after.snapshots()]
        assert [s.stored_bytes for s in after.snapshots()] == pytest.approx(
            [s.stored_bytes for s in before.snapshots()], abs=64
        )
        assert after.config.uuid != before.config.uuid
        assert after.policies("a") == []
        save(after, "a", 4, 4)
        assert after.snapshot("a@4").parent == before.snapshot("a@3").id
    check_clean(target, level="restore")


def test_what_is_there_is_not_sent_again(source):
    target, _ = copied(source, "a@0", "a@1")
    before = set(keys_of(target))
    target, result = copied(source, to=target)
    assert [s.ref for s in result.present] == ["a@0", "a@1"]
    assert before <= set(keys_of(target))
    with opened(source) as repository:
        assert result.stored_bytes < sum(s.stored_bytes for s in repository.snapshots()[2:]) + 512
    target, result = copied(source, to=target)
    assert (len(result.copied), len(result.present), result.stored_bytes) == (0, 5, 0)
    check_clean(target)


def test_one_snapshot_takes_its_chains_along_and_nothing_else(source):
    target, _ = copied(source, "a@2")
    with opened(target) as repository:
        (snapshot,) = repository.snapshots()
        assert same(repository.restore("a@2"), values("a", 2))
        assert snapshot.parent is not None
        assert repository.view().get(snapshot.parent) is None
        repository.gc()
    check_clean(target, level="restore")
    copied(source, "a@0", "a@1", to=target)  # older ones, later: the order stays
    with opened(target) as repository:
        assert repository.snapshot("a@latest").step == 2
        assert [s.step for s in repository.snapshots("a")] == [0, 1, 2]


def test_snapshots_of_several_ranks(source):
    for step in (4, 5, 6):
        save_shared([source] * 3, "a", step, min(step, 5))
    target, _ = copied(source, "a@3", "a@4")
    target, result = copied(source, "a@5", "a@6", to=target)
    by_hand = [snapshot_of(source, ref).stored_bytes for ref in ("a@5", "a@6")]
    assert [s.stored_bytes for s in result.copied] == pytest.approx(by_hand, rel=0.1)
    check_clean(target, level="restore")


def test_tags_follow(source):
    target, _ = copied(source)
    with opened(source) as repository:
        repository.tag("a@3", "good")
    copied(source, to=target)
    with opened(target) as repository:
        assert [s.step for s in repository.snapshots("a") if "good" in s.tags] == [3]


def test_a_copy_of_a_run_with_high_numbers_is_within_reach():
    store, target = created(), MemoryStore()
    with opened(store) as repository:
        for step in (1, 2):
            repository.lineage.number_from("a", lambda step=step: step * 2**40 - step)
            save(repository, "a", step, step)
        assert repository.copy(["a@2"], to=target).failed == []
    check_clean(target, level="restore")
    assert snapshot_of(target, "a@latest").step == 2


def test_a_backup_that_comes_back_after_the_run_has_gone_on_is_older(source):
    """The place of the run was lost, and training began again there before its backup was copied back."""
    target = MemoryStore()
    with opened(source) as repository, Repository.open_or_create(target, like=repository, options=OPTIONS) as new:
        backup = [s.ref for s in repository.snapshots("a")]
        again = save(new, "a", 100, 100)
    copied(source, backup[-1], to=target)
    copied(source, *backup, to=target)
    with opened(target) as repository:
        assert [s.ref for s in repository.snapshots("a")] == [*backup, again.ref]
        assert repository.snapshot("a@latest").id == again.id
        assert save(repository, "a", 101, 101).parent == again.id


def test_a_tag_does_not_come_back_to_an_older_snapshot(source):
    """The place of the run was lost, and training gave the tag to a new snapshot there before the backup came back."""
    target = MemoryStore()
    with opened(source) as repository, Repository.open_or_create(target, like=repository, options=OPTIONS) as new:
        assert repository.snapshot("a@good").step == 1
        again = save(new, "a", 100, 100, tags=["good"])
    copied(source, "a@1", to=target)
    copied(source, "a@1", to=target)
    with opened(target) as repository:
        assert repository.snapshot("a@good").id == again.id
        assert repository.snapshot("a@1").tags == []


def test_a_conflict_about_tags_does_not_count_a_snapshot_twice(source, monkeypatch):
    take, conflicts = tags.take, iter([ConflictError("another process revises them")])

    def taken(*arguments):
        for conflict in conflicts:
            raise conflict
        return take(*arguments)

    monkeypatch.setattr(tags, "take", taken)
    to, result = copied(source, "a@1")
    assert ([s.ref for s in result.copied], result.present) == (["a@1"], [])
    assert snapshot_of(to, "a@good").step == 1


def test_what_the_destination_has_forgotten_comes_back_only_if_it_is_named(source):
    target, _ = copied(source)
    with opened(target) as repository:
        repository.forget([KeepLast(1)], run="a")
    _, result = copied(source, to=target)
    assert [s.ref for s in result.left_out] == ["a@0", "a@2"]
    _, result = copied(source, "a@0", to=target)
    assert [s.ref for s in result.present] == ["a@0"]
    with opened(target) as repository:
        repository.forget_snapshots(["b@0"], force=True)
        repository.gc()
        assert repository.view().get(repository.view().snapshots("b", None)[0].id).state == "swept"
    _, result = copied(source, "b@0", to=target)
    assert [s.ref for s in result.copied] == ["b@0"]
    with opened(target) as repository:
        repository.forget_snapshots(["b@0"], force=True)
        repository.gc()
    check_clean(target, level="restore")


def test_other_seeds_and_the_same_repository_are_refused(source):
    with opened(source) as repository:
        with pytest.raises(InvalidInputError, match="another seed"):
            repository.copy(to=created())
        with pytest.raises(InvalidInputError, match="is the repository to copy from"):
            repository.copy(to=source)
        with pytest.raises(NotFoundError, match="run 'c': has no snapshots"):
            repository.copy(to=MemoryStore(), run="c")
        assert len(repository.copy(to=MemoryStore(), run="a").copied) == 4


def test_a_dry_run_changes_nothing(source, tmp_path):
    with opened(source) as repository:
        assert len(repository.copy(to=tmp_path / "new", dry_run=True).copied) == 5
        assert not (tmp_path / "new").exists()
        target, _ = copied(source, "a@0")
        before = keys_of(target)
        assert len(repository.copy(to=target, dry_run=True).copied) == 4
    assert keys_of(target) == before


@pytest.mark.parametrize("what", ["a pack", "a pack with right checksums", "a manifest", "a missing pack"])
def test_a_hostile_source_commits_nothing(source, what):
    """Every byte is proven by the record: manifests by its hashes, packs by theirs; the error names the object."""
    with opened(source) as repository:
        snapshot = repository.snapshot("b@0")
        old = set(objects_of(source, repository.snapshot("a@1")))
        key = next(
            k for k in objects_of(source, snapshot) if k not in old and k.startswith("packs/") == ("pack" in what)
        )
    if what == "a missing pack":
        source.delete([key])
    elif what == "a pack with right checksums":
        other = next(k for k in objects_of(source, snapshot_of(source, "a@0")) if k.startswith("packs/"))
        data = source.get(other)
        source.delete([key])
        source.put(key, data)
    else:
        flip(source, key, len(source.get(key)) // 2)
    target = MemoryStore()
    with opened(source) as repository:
        result = repository.copy(to=target)
    ((failed, why),) = result.failed
    assert failed.ref == "b@0"
    assert key in why
    assert len(result.copied) == 4
    with opened(target) as repository:
        assert [s.ref for s in repository.snapshots()] == ["a@0", "a@1", "a@2", "a@3"]
        repository.gc()
    check_clean(target, level="restore")


def object_of_its_own(store, ref, kind):
    """Return the key of a pack or a manifest that no earlier snapshot of the run needs."""
    with opened(store) as repository:
        snapshot = repository.snapshot(ref)
        earlier = [s for s in repository.snapshots(snapshot.run) if s.seq < snapshot.seq]
        old = {key for s in earlier for key in objects_of(store, s)}
        return next(k for k in objects_of(store, snapshot) if k not in old and k.startswith(kind))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
@pytest.mark.parametrize("how", READ_FAULTS)
def test_one_failed_read_of_the_source_proves_nothing(source, kind, how):
    bad = Unreadable(source, object_of_its_own(source, "a@0", kind), times=1, how=how)
    target, result = copied(bad)
    assert bad.times == 0
    assert len(result.copied) == 5
    check_clean(target, level="restore")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
@pytest.mark.parametrize("how", READ_FAULTS)
def test_an_object_of_the_source_that_cannot_be_read_stops_no_other_copy(source, kind, how):
    """A bad sector, or an archived object of S3: the oldest snapshot comes first, and each copy would end there."""
    bad = Unreadable(source, key := object_of_its_own(source, "a@0", kind), how=how)
    target = MemoryStore()
    with opened(bad) as repository:
        (first, *_) = repository.snapshots("a")
        result = repository.copy(to=target)
        ((failed, why),) = [(s, why) for s, why in result.failed if s.id == first.id]
        assert failed.ref == "a@0"
        assert key in why
        assert "b@0" in [s.ref for s in result.copied]  # its first chunks are others
        bad.bad.clear()
        assert repository.copy(to=target).failed == []
    check_clean(target, level="restore")


def test_a_source_or_a_destination_that_does_not_answer_ends_the_copy(source):
    packs = [key for key in keys_of(source) if key.startswith(("packs/", "manifests/"))]
    with opened(Unreadable(source, *packs, "config", how="withheld", times=0)) as repository:
        target = MemoryStore()
        repository.copy(["a@0"], to=target)
        repository.store.times = 10**9
        with pytest.raises(StorageError):
            repository.copy(to=target)
    with opened(source) as repository:
        full = FaultStore(target, None, "full")
        with Repository.open(full, options=OPTIONS) as other:
            full.at = len(full.log)
            with pytest.raises(StorageError):
                repository.copy(to=other)


@pytest.mark.parametrize(("how", "error"), [("unread", UnreadRecordError), ("flipped", IntegrityError)])
def test_the_place_of_a_copy_before_a_record_that_cannot_be_read_may_be_known_later(source, how, error):
    target, _ = copied(source, "a@3")
    with opened(target) as repository:
        bad = Unreadable(target, *(key for key in keys_of(target) if key.startswith("snapshots/")), how=how)
    with opened(source) as repository, opened(bad) as other:
        copier, views = Copier(repository.context, other.context), (repository.view(), other.view())
        with pytest.raises(error, match="it belongs before"):
            copier.begin(repository.snapshot("a@0"), *views)
        with pytest.raises(error, match="its record"):
            copier.begin(repository.snapshot("a@3"), *views)


def test_a_pack_that_is_said_to_be_too_large_is_refused(source):
    """Places are packed into one number: an offset must not run into the number of the pack."""
    with opened(source) as repository:
        read = [(ref, manifest.read(source, ref, None)) for ref in repository.snapshot("a@0").manifests]
        ref, found = next((ref, m) for ref, m in read if m.own_packs)
        sizes = np.full(len(found.header.pack_names), 1 << 41, "<u8").tobytes()
        forged = replace(found, header=msgspec.structs.replace(found.header, pack_sizes=sizes))
        session = SimpleNamespace(store=source)
        with pytest.raises(FormatError, match="no snapstore writes such a pack"):
            move(repository.context, session, repository.context, [(ref, forged)], Bases())


def test_a_source_that_is_rewritten_meanwhile_is_read_again(source):
    """A compact has replaced the packs, and a gc has deleted them, after the copy has read the record."""
    with opened(source) as repository:
        repository.untag("a@1", "good")
        repository.forget_snapshots(["a@0", "a@1", "b@0"], force=True)
        inner = FaultStore(clone(source))
    done = []

    def get(key, **options):
        if key.startswith("packs/") and not done:
            done.append(key)
            with opened(inner.inner) as other:
                other.gc()
                other.compact()
                other.gc()
        return inner.inner.get(key, **options)

    inner.get = get
    with Repository.open(inner, options=OPTIONS) as repository:
        target = MemoryStore()
        result = repository.copy(["a@3", "a@2"], to=target)
    assert done
    assert [s.ref for s in result.copied] == ["a@2", "a@3"], result.failed
    check_clean(target, level="restore")


@pytest.mark.parametrize("server", ["moto", pytest.param("real", marks=needs_server)])
def test_between_a_folder_and_s3(source, server, tmp_path, monkeypatch):
    with moto_bucket(monkeypatch) if server == "moto" else nullcontext(fresh_url()) as bucket:
        with opened(source) as repository:
            repository.copy(to=f"{bucket}/r")
            assert len(repository.copy(to=f"{bucket}/r").present) == 5
        with Repository.open(f"{bucket}/r", options=OPTIONS) as repository:
            assert len(repository.copy(to=tmp_path / "back").copied) == 5
    check_clean(Repository.open(tmp_path / "back").store, level="restore")


def test_a_copy_that_is_killed_is_taken_up_by_the_next(tmp_path):
    with Repository.create(tmp_path / "a", chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(12):
            save(repository, "a", step, step)
    command = [sys.executable, "-m", "snapstore", "--repo", tmp_path / "a", "copy", "--all", "--to", tmp_path / "b"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    packs = tmp_path / "b" / "packs"
    while process.poll() is None and len(list(packs.glob("*/*"))) < 8:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = list(Path(tmp_path / "b" / "sessions").glob("*"))
    with Repository.open(tmp_path / "a", options=OPTIONS) as repository:
        there = len(repository.copy(to=tmp_path / "b", dry_run=True).present)
        assert 0 < there < 12
        assert len(repository.copy(to=tmp_path / "b").copied) == 12 - there
    with Repository.open(tmp_path / "b", options=OPTIONS) as repository:
        repository.gc()
        assert len(left) <= 1
        assert len(repository.snapshots()) == 12
        check_clean(repository.store)


class StaleOnce(MemoryStore):
    """A store of which one listing of records lacks some."""

    lacking: frozenset[str] = frozenset()

    def list(self, prefix, key_only=None):
        lacking = self.lacking if prefix.startswith("snapshots/") else frozenset()
        self.lacking = frozenset() if lacking else self.lacking
        return with_keys_alone((info for info in super().list(prefix) if info.key not in lacking), key_only)


def test_one_stale_listing_of_the_destination_makes_nothing_present(source):
    """The destination has swept the snapshot; one listing shows it as committed, and the index knows better."""
    store = StaleOnce()
    with opened(source) as here, Repository.create(store, like=here, options=OPTIONS) as there:
        here.copy(["a@0", "a@3"], to=there)
        there.forget_snapshots(["a@0"])
        there.gc()
        swept = next(s for s in there.view().snapshots(states=("swept",)))
        store.lacking = frozenset({swept.key, swept.key[:-1] + str(swept.revision - 1)})
        result = here.copy(["a@0"], to=there)
        assert (result.copied, result.present) == ([], [])
        assert [why for _, why in result.failed if "its last record" in why and why.count("a@0") == 1]
        assert [s.ref for s in here.copy(["a@0"], to=there).copied] == ["a@0"]
    check_clean(store)


def test_one_stale_listing_of_the_source_drops_no_tag(source, monkeypatch):
    store = StaleOnce()
    store._objects.update(clone(source)._objects)
    with opened(store) as here, Repository.create(MemoryStore(), like=here, options=OPTIONS) as there:
        tagged = here.tag("a@3", "best")
        real = Copier._attempt

        def attempt(copier, *args):
            store.lacking = frozenset({tagged.key})
            return real(copier, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Copier, "_attempt", attempt)
            result = here.copy(["a@3"], to=there)
        assert not result.copied
        assert "its last record" in result.failed[0][1]
        assert here.copy(["a@3"], to=there).copied[0].tags == ["best"]


def test_a_forget_in_the_destination_ends_no_copy(source, monkeypatch):
    """The destination forgets a snapshot after the copy has listed it, before the copy tags it."""
    with opened(source) as here, Repository.create(MemoryStore(), like=here, options=OPTIONS) as there:
        here.copy(["a@0", "a@3"], to=there)
        here.tag("a@0", "late")
        real = Copier._present

        def present(copier, names, found):
            if found.step == 0 and found.run == "a":
                there.forget_snapshots([f"id:{found.id}"])
            return real(copier, names, found)

        monkeypatch.setattr(Copier, "_present", present)
        result = here.copy(to=there)
        assert ([s.ref for s in result.left_out], result.failed) == (["a@0"], [])
        assert [s.ref for s in result.copied] == ["a@1", "a@2", "b@0"]


def test_a_session_that_is_called_taken_fails_one_copy_alone(source):
    class Taken(MemoryStore):
        left = 1

        def lock(self, key, data):
            if self.left:
                self.left = 0
                raise AlreadyExistsError(f"{key}: taken")
            super().lock(key, data)

    with opened(source) as here, Repository.create(Taken(), like=here, options=OPTIONS) as there:
        result = here.copy(["a@0", "a@1"], to=there)
        assert [s.ref for s, _ in result.failed] == ["a@0"]
        assert [s.ref for s in result.copied] == ["a@1"]


def test_refs_and_run_are_refused_together_and_one_str_is_no_list(source):
    with opened(source) as here:
        with pytest.raises(InvalidInputError, match="pass either refs or run"):
            here.copy(["a@0"], run="b", to=MemoryStore())
        with pytest.raises(InvalidInputError, match="expected a list of str, got one str"):
            here.forget_snapshots("a@0")


def test_a_gc_that_cannot_read_an_object_stops_no_mirror(source, monkeypatch):
    def unreadable(context):
        raise StorageError("snapshots/b: 503")

    retention = Retention("a", [KeepLast(1)])
    with opened(source) as there:
        monkeypatch.setattr(mirror_retention.gc, "collect", unreadable)
        retention.apply(there.context)
        assert retention.has_left
        monkeypatch.undo()
        retention.apply(there.context)
        assert not retention.has_left
    check_clean(source)


# --- digests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def rebuilt(monkeypatch):
    """The number of chunks that each call of ChunkRebuilder.failures has rebuilt."""
    counts, real = [], ChunkRebuilder.failures

    def failures(self, ref, m, *args, **options):
        counts.append(len(m.table))
        return real(self, ref, m, *args, **options)

    monkeypatch.setattr(ChunkRebuilder, "failures", failures)
    return counts


@pytest.fixture
def forging(monkeypatch):
    """This process takes the digests of the noise of version 0 for those of version 9, until `undo`."""
    real = reference.digest
    taken, meant = (values("a", version)["optimizer"]["noise"] for version in (0, 9))
    swap = {bytes(a): b for a, b in zip(taken.reshape(-1, 1024), meant.reshape(-1, 1024), strict=True)}
    replace_digest(monkeypatch, lambda chunk, seed: real(swap.get(bytes(chunk), chunk), seed))
    return monkeypatch


@pytest.mark.parametrize("count", [1, 3])
def test_a_forged_snapshot_stays_out_and_the_others_come(count, forging):
    source, options = created(), replace(OPTIONS, verify_writes="off")
    with Repository.open(source, options=options) as repository:
        save(repository, "a", 0, 5)
        assert save_shared([repository] * count, "a", 1, 0, save_options=None)[0].step == 1
        save(repository, "b", 0, 7)
    forging.undo()
    with opened(source) as repository:
        assert repository.check("data").ok  # only level "restore" compares digests
        assert [s.ref for s in repository.check("restore").damaged] == ["a@1"]
    target = created_like(source)
    with opened(source) as repository:
        result = repository.copy(to=target)
    ((failed, why),) = result.failed
    assert failed.ref == "a@1"
    assert "optimizer.noise, chunk 0: its stored bytes are not the content of its digest" in why
    assert [s.ref for s in result.copied] == ["a@0", "b@0"]
    with opened(target) as repository:
        save(repository, "a", 9, 9)
        assert same(repository.restore("a@9"), values("a", 9))
        repository.gc()
    check_clean(target, level="restore")


def test_only_chunks_that_are_sent_are_rebuilt(source, rebuilt):
    chunks = snapshot_of(source, "a@0").chunks
    target, _ = copied(source, "a@0")
    assert sum(rebuilt) == chunks + 1  # one was tried before the first put
    rebuilt.clear()
    copied(source, "a@1", to=target)
    assert 0 < sum(rebuilt) < chunks
    rebuilt.clear()
    copied(source, "a@2", "a@3", to=target)  # a@3 has the chunks of a@2
    assert 0 < sum(rebuilt) < chunks
    rebuilt.clear()
    copied(source, to=MemoryStore(), verify=False)
    assert rebuilt == []


def test_chunks_are_rebuilt_in_batches_and_a_copy_may_end_between_them(source, rebuilt, monkeypatch):
    monkeypatch.setattr(moving, "VERIFIED_AT_ONCE_BYTES", 4096)
    target = created_like(source)
    with opened(source) as repository, opened(target) as other:
        copier = Copier(repository.context, other.context, lambda: rebuilt[3:] and pytest.fail("ended"))
        with pytest.raises(pytest.fail.Exception, match="ended"):
            copier.copy(repository.snapshot("a@0"), named=True)
        assert len(rebuilt) == 4
        assert other.snapshots() == []
        other.gc()
    copied(source, to=target)
    check_clean(target, level="restore")


def test_a_machine_that_cannot_rebuild_a_chunk_says_so_and_copies_without(source, monkeypatch):
    monkeypatch.setenv(limits.DECODED, "1")
    monkeypatch.setattr(limits, "MIN_DECODED_BYTES", 1)
    target = created_like(source)
    with opened(source) as repository:
        result = repository.copy(["a@0"], to=target)
        ((_, why),) = result.failed
        assert "cannot be verified on this machine: " in why
        assert "--no-verify" in why
        assert len(keys_of(target, "snapshots/")) == 1  # nothing was put that another revision has to explain
        assert repository.copy(["a@0"], to=target, verify=False).failed == []
    monkeypatch.undo()
    check_clean(target, level="restore")


@pytest.mark.parametrize("how", ["copy", "repair", "another place"])
def test_a_copy_without_verification_is_no_base_until_it_is_proven(source, how):
    """Copies of the same source build on it meanwhile: they are not proven either."""
    target, _ = copied(source, "a@0", "a@1", verify=False)
    _, second = copied(source, "a@2", to=target, verify=False)
    with opened(source) as repository:
        uuid, unchanged = repository.config.uuid, repository.snapshot("a@3")
        assert second.stored_bytes < 1.1 * repository.snapshot("a@2").stored_bytes + 512
    with opened(target) as repository:
        assert {s.unproven for s in repository.snapshots()} == {uuid}
        assert [save(repository, "a", step, 2).new_chunks for step in (4, 5)] == [unchanged.chunks, 0]
        notes = [note.message for note in repository.check("restore").notes]
        assert notes == [f"a@{step}: copied without verification; no save builds on it" for step in (0, 1, 2)]
    if how == "copy":
        _, result = copied(source, run="a", to=target)
        assert [s.ref for s in result.copied] == ["a@0", "a@1", "a@2", "a@3"]
    elif how == "repair":
        with opened(target) as repository:
            assert not any(action.kind == "prove" for action in repository.repair(apply=True).actions)
            done = repository.repair(apply=True, level="restore").actions
            assert [action.kind for action in done if action.kind != "index"] == ["prove"] * 3
    else:
        target, _ = copied(target, "a@0", "a@1", "a@2")
    with opened(target) as repository:
        assert not any(s.unproven for s in repository.snapshots())
        shared = repository.save(values("a", 2), run="c", step=0, bases=["a@2"], metadata=["a", 2])
        assert shared.new_chunks == 0
        assert repository.check().notes == []
        repository.gc()
    check_clean(target, level="restore")


def test_the_shell_copies_without_verification_and_marks_it(tmp_path, capsys):
    def said(*words, place):
        commands([*words, "--repo", str(tmp_path / place)], standalone_mode=False)
        return capsys.readouterr().out

    with Repository.create(tmp_path / "a") as repository:
        save(repository, "a", 0, 0)
    assert "1 snapshot copied" in said("copy", "--all", "--no-verify", "--to", str(tmp_path / "b"), place="a")
    assert "unproven" in said("log", place="b")
    assert "\nunproven  copied without verification" in said("show", "a@0", place="b")
    assert json.loads(said("show", "a@0", "--json", place="b"))["unproven"] is True
    assert "copied without verification; no save builds on it" in said("check", place="b")
    assert "done, prove: a@0" in said("repair", "--level", "restore", "--apply", place="b")
    assert "unproven" not in said("log", place="b") + said("show", "a@0", place="b")
    assert json.loads(said("show", "a@0", "--json", place="b"))["unproven"] is False


def test_a_record_rebuilt_from_the_manifests_of_a_copy_is_not_proven(source):
    """Nothing tells whether that copy was verified."""
    target, _ = copied(source, "a@0", verify=False)
    flip(target, max(key for key in keys_of(target) if key.startswith("snapshots/")), 40)
    with opened(target) as repository:
        repository.repair(apply=True)
        assert repository.snapshot("a@0").unproven == repository.config.uuid
        repository.repair(apply=True, level="restore")
        assert not repository.snapshot("a@0").unproven


def test_a_tag_a_forget_and_a_rewrite_keep_it_unproven(source):
    target, _ = copied(source, "a@0", "a@1", verify=False)
    with opened(target) as repository:
        repository.tag("a@0", "kept")
        repository.untag("a@1", "good")
        repository.forget_snapshots(["a@1"], force=True)
        repository.unforget("a@1")
        repository.compact()
        assert all(s.unproven for s in repository.view().snapshots(states=("committed", "forgotten")))


# --- lost in the destination -----------------------------------------------------------------------------------------


def lost(store, ref, kind="packs/"):
    """Delete the objects of a kind that only one snapshot needs; return the snapshot."""
    with opened(store) as repository:
        snapshot = repository.snapshot(ref)
        others = {key for s in repository.snapshots() if s.id != snapshot.id for key in objects_of(store, s)}
    keys = [key for key in objects_of(store, snapshot) if key not in others and key.startswith(kind)]
    assert keys
    store.delete(keys)
    return snapshot


@pytest.mark.parametrize("collected", [False, True], ids=["forgotten", "swept"])
@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "run"])
def test_what_a_repair_has_dropped_in_the_destination_is_copied_again(kind, collected, named):
    to, _ = copied(source := three(), run="a")
    snapshot = lost(to, "a@2", kind)
    with opened(to) as repository:
        assert [s.id for s in repository.repair(apply=True, drop=True).dropped] == [snapshot.id]
        if collected:
            repository.gc()
    _, result = copied(source, *(["a@2"] if named else []), to=to, **({} if named else {"run": "a"}))
    assert [s.id for s in result.copied] == [snapshot.id]
    with opened(to) as repository:
        assert same(repository.restore("a@2"), values("a", 2))
        assert repository.in_need_of_quarantined(repository.snapshots()) == set()  # else policies would not count it


@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
@pytest.mark.parametrize("repaired", [False, True], ids=["unnoticed", "noted"])
def test_a_committed_snapshot_that_lost_bytes_is_copied_again(kind, repaired):
    to, _ = copied(source := three(), run="a")
    with opened(to) as repository:
        repository.tag("a@2", "mine")
    snapshot = lost(to, "a@2", kind)
    if repaired:
        with opened(to) as repository:
            repository.repair(apply=True)
    _, result = copied(source, *([] if repaired else ["a@2"]), to=to, **({"run": "a"} if repaired else {}))
    assert [s.id for s in result.copied] == [snapshot.id]
    with opened(to) as repository:
        assert same(repository.restore("a@mine"), values("a", 2))
        assert repository.in_need_of_quarantined(repository.snapshots()) == set()


def test_a_forgotten_snapshot_that_lost_bytes_is_copied_and_not_brought_back():
    to, _ = copied(source := three(), run="a")
    snapshot = lost(to, "a@2")
    with opened(to) as repository:
        repository.forget_snapshots(["a@2"], force=True)
    _, result = copied(source, "a@2", to=to)
    assert [s.id for s in result.copied] == [snapshot.id]
    with opened(to) as repository:
        assert same(repository.restore("a@2"), values("a", 2))


@pytest.mark.parametrize("is_cut", [False, True], ids=["missing", "cut"])
def test_a_source_that_lacks_a_pack_leaves_nothing_in_the_destination(is_cut):
    source, to = three(), MemoryStore()
    with opened(source) as repository:
        for key in [key for key in objects_of(source, repository.snapshot("a@2")) if key.startswith("packs/")][-1:]:
            data = source.get(key)
            source.delete([key])
            if is_cut:
                source.put(key, data[:-1])
        assert [s.step for s, _ in repository.copy(["a@2"], to=to).failed] == [2]
    assert keys_of(to, "packs/") == []


def listings(store):
    """Return how often records were listed, and begin to count again."""
    count = store.log.count(("list", "snapshots/")) + store.log.count(("list", "snapshots/a/"))
    store.log.clear()
    return count


@pytest.mark.parametrize("count", [5, 10])
def test_a_copy_lists_the_records_three_times_a_snapshot_and_once_if_all_are_there(count):
    """Each listing takes as long as there are records: a few more for each snapshot make a first copy slow."""
    source = FaultStore(created())
    with opened(source) as repository:
        for step in range(count):
            save(repository, "a", step, step, parent="a@0" if step > 2 else None)
    target = FaultStore(created_like(source.inner))
    with opened(source) as repository, opened(target) as other:
        for at_most in (count, 1):
            listings(source)
            listings(target)
            result = repository.copy(to=other)
            assert len(result.copied) == (count if at_most == count else 0)
            assert listings(source) <= at_most + 2  # the first listing of a process is made twice
            assert listings(target) <= (2 * count if at_most == count else 1) + 2
        repository.forget_snapshots(["a@1"])
        other.forget_snapshots(["a@2"])
        listings(target)
        assert len(repository.copy(to=other).left_out) == 1
        assert listings(target) == 1


def test_a_copy_looks_again_before_it_copies_what_was_not_there_at_the_first_look(source):
    """Until then others may have copied it."""
    target, _ = copied(source, "a@0", "a@1")
    with opened(source) as repository, opened(target) as other, opened(target) as third:
        real = Copier._present

        def present(self, names, there):
            if not third.snapshots("b"):
                repository.copy(["a@2", "a@3", "b@0"], to=third)
            return real(self, names, there)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Copier, "_present", present)
            result = repository.copy(to=other)
    assert (len(result.present), result.copied, result.failed) == (5, [], [])
    check_clean(target, level="restore")


def test_a_copy_by_another_program_while_a_job_saves(tmp_path):
    """It may have the records of snapshots and lack their packs. These are not restored wrongly."""
    source, target = tmp_path / "source", tmp_path / "target"
    with SnapshotManager(source, run="a", keep=KeepLast(1)) as snapshots:
        snapshots.save(0, {"w": np.full(300_000, 0)}).result()
        shutil.copytree(source, target, ignore=lambda *_: ["snapshots"])
        for step in (1, 2):
            snapshots.save(step, {"w": np.full(300_000, step)})
    shutil.copytree(source, target, ignore=lambda *_: ["packs"], dirs_exist_ok=True)
    with Repository.open(target) as repository:
        check = repository.check()
        assert [s.step for s in check.damaged] == [s.step for s in repository.snapshots("a")] == [2]
        with pytest.raises(IntegrityError, match=r"a@2 .*packs/.*no older snapshot of run 'a' is whole"):
            repository.restore("a@latest")
