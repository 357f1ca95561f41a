"""A snapshot that cannot be copied stops no other one, is not called mirrored, and gets to the mirror later."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from kit.damage import three, wound
from kit.faults import READ_FAULTS, FaultStore, Unreadable
from kit.mirrored import manager, mirrored, saved, steps_in
from kit.objects import keys_of
from kit.ranks import together
from kit.repositories import OPTIONS, check_clean, created, created_like, objects_of, opened, same, save, values
from kit.waits import until
from snapstore import IntegrityError, KeepLast, Repository, StorageError, StorageFullError
from snapstore.copy import mirror as mirrors
from snapstore.copy.copy import Copier
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(mirrors, "RETRY_S", 0.02)
    monkeypatch.setattr(mirrors, "RETRY_MAX_S", 0.02)


def with_bad_object(kind, how, times=10**9):
    """Return a store of a@0, a@1 and a@2 in which a pack or manifest that only a@1 needs cannot be read."""
    store = created()
    with opened(store) as repository:
        for step in range(3):
            save(repository, "a", step, 10 * step)
        others = {key for step in (0, 2) for key in objects_of(store, repository.snapshot(f"a@{step}"))}
        keys = [k for k in objects_of(store, repository.snapshot("a@1")) if k not in others and k.startswith(kind)]
    return Unreadable(store, keys[0], how=how, times=times)


@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
@pytest.mark.parametrize("how", READ_FAULTS)
def test_one_failed_read_leaves_no_snapshot_out(kind, how, caplog):
    fast, slow = with_bad_object(kind, how, times=1), MemoryStore()
    with manager(fast, slow) as snapshots:
        assert snapshots.wait_until_mirrored(20) == []
        assert fast.times == 0
    assert steps_in(slow) == [0, 1, 2]
    assert "left out" not in caplog.text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
@pytest.mark.parametrize("how", READ_FAULTS)
def test_a_snapshot_that_cannot_be_copied_stops_no_other_and_is_not_called_mirrored(kind, how, caplog):
    """No policy deletes it in the first store, where it may be whole. The mirror tries it again."""
    fast, slow = with_bad_object(kind, how), MemoryStore()
    with manager(fast, slow, keep=KeepLast(1), mirror_keep=()) as snapshots:
        assert snapshots.wait_until_mirrored(20) == snapshots.not_mirrored() == [1]
        for step in (3, 4):
            with suppress(IntegrityError):  # of the gc of the first store, which then deletes nothing
                saved(snapshots, [step])
            assert snapshots.wait_until_mirrored(20) == [1]
        assert steps_in(fast)[0] == 1
        assert steps_in(slow) == [0, 2, 3, 4]
        (text,) = [r.getMessage() for r in caplog.records if "step=1 cannot be mirrored" in r.getMessage()]
        assert next(iter(fast.bad)) in text
        fast.bad.clear()
        assert snapshots.wait_until_mirrored(20) == []
    assert steps_in(slow) == [0, 1, 2, 3, 4]
    with opened(slow) as repository:
        repository.gc()  # of attempts that failed
    check_clean(slow, level="restore")


def test_a_snapshot_that_could_not_be_copied_is_tried_again_without_a_wait():
    fast, slow = with_bad_object("packs/", "withheld"), MemoryStore()
    with manager(fast, slow) as snapshots:
        assert snapshots.wait_until_mirrored(20) == [1]
        fast.bad.clear()
        until(lambda: snapshots.not_mirrored() == [])


def test_close_says_why_a_snapshot_is_not_mirrored(caplog):
    fast = with_bad_object("packs/", "unread")
    manager(fast, MemoryStore()).close()
    (text,) = [r.getMessage() for r in caplog.records if "not mirrored in" in r.getMessage()]
    assert "steps 1:" in text
    assert next(iter(fast.bad)) in text


def test_policies_of_the_mirror_count_no_snapshot_that_it_cannot_get():
    """Else it would leave out an older one in favour of a snapshot that it never gets."""
    fast, slow = with_bad_object("packs/", "flipped"), MemoryStore()
    with opened(fast) as repository:
        repository.forget_snapshots(["a@2"], force=True)  # now the damaged one is the newest
    with manager(fast, slow, mirror_keep=KeepLast(1)) as snapshots:
        assert snapshots.wait_until_mirrored(20) == [1]
        until(lambda: snapshots.wait_until_mirrored(20) == [1] and steps_in(slow) == [0])
    with manager(fast.inner, slow, mirror_keep=KeepLast(1)) as snapshots:
        assert snapshots.wait_until_mirrored(20) == []
    assert steps_in(slow) == [1]


def test_each_attempt_wants_the_same_snapshots_while_none_can_be_copied():
    """The first store holds only what the last attempt has wanted."""
    fast = with_bad_object("packs/", "unread")
    fast.bad = {key for key in keys_of(fast.inner) if key.startswith("packs/")}
    with manager(fast, MemoryStore(), mirror_keep=KeepLast(1)) as snapshots:
        found = [snapshots.wait_until_mirrored(20) for _ in range(6)]
        assert found[2:] == [[0, 1, 2]] * 4
        fast.bad.clear()


def test_a_snapshot_that_a_gc_has_deleted_meanwhile_is_not_waited_for(monkeypatch):
    fast, slow = with_bad_object("packs/", "flipped"), MemoryStore()
    real = Copier.copy

    def copy(self, snapshot, **options):
        if snapshot.step == 1:
            with opened(fast.inner) as other:
                other.forget_snapshots(["a@1"], force=True)
                other.gc()
        return real(self, snapshot, **options)

    monkeypatch.setattr(Copier, "copy", copy)
    with manager(fast, slow) as snapshots:
        assert snapshots.wait_until_mirrored(20) == []
    assert steps_in(slow) == [0, 2]


class Limited(FaultStore):
    """A store whose packs must not exceed a number of bytes."""

    def __init__(self, inner, limit_bytes):
        super().__init__(inner)
        self.limit_bytes = limit_bytes

    def put(self, key, data):
        if key.startswith("packs/") and pack_bytes(self.inner) + len(bytes(data)) > self.limit_bytes:
            raise StorageFullError(f"{key}: no space left (injected)")
        super().put(key, data)


def pack_bytes(store):
    return sum(info.size_bytes for info in store.list("packs/"))


class WithoutManifests(FaultStore):
    """A store that takes packs and no manifests."""

    def put(self, key, data):
        if key.startswith("manifests/"):
            raise StorageError(f"{key}: no answer (injected)")
        super().put(key, data)


def test_a_full_mirror_gets_rid_of_what_a_failed_copy_has_left():
    fast = three()
    slow = created_like(fast)
    with opened(fast) as repository:
        with pytest.raises(StorageError, match="no answer"):
            repository.copy(["a@1"], to=WithoutManifests(slow))
        left = pack_bytes(slow)
        Repository.create(whole := MemoryStore(), like=repository).close()
        repository.copy(to=whole)
    with opened(slow) as repository:
        assert repository.gc(dry_run=True).deleted_bytes > 0
    limited = Limited(slow, pack_bytes(whole) + 100)
    assert left < limited.limit_bytes
    with manager(fast, limited) as snapshots:
        until(lambda: snapshots.wait_until_mirrored(20) == [])
        saved(snapshots, [3])
        assert snapshots.wait_until_mirrored(20) == [3]
    assert steps_in(slow) == [0, 1, 2]


@pytest.mark.parametrize("how", ["flipped", "withheld"])
def test_a_copy_that_finds_damage_leaves_nothing_in_the_mirror_at_any_attempt(how):
    """It finds the damage after it has put other packs; a mirror that keeps everything runs no gc."""
    fast, slow = with_bad_object("packs/", how), MemoryStore()
    with manager(fast, slow) as snapshots:
        for _ in range(3):
            assert snapshots.wait_until_mirrored(20) == [1]
            with opened(slow) as repository:
                assert repository.gc(dry_run=True).deleted_bytes == 0
        fast.bad.clear()
        assert snapshots.wait_until_mirrored(20) == []
    check_clean(slow, level="restore")


def test_policies_of_the_mirror_delete_what_a_failed_copy_has_left():
    fast, slow = with_bad_object("packs/", "flipped"), MemoryStore()
    with manager(fast, slow, mirror_keep=KeepLast(9)) as snapshots:
        assert snapshots.wait_until_mirrored(20) == [1]
        fast.bad.clear()
        assert snapshots.wait_until_mirrored(20) == []
    check_clean(slow, level="restore")


# --- the thread ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_ends_the_thread_ends_every_wait(monkeypatch):
    """No such error is known; an unknown one must not deadlock a save."""

    def fail(*_):
        raise LookupError("no such handler")

    snapshots = manager(created(), MemoryStore())
    mirror = snapshots._mirror
    monkeypatch.setattr(mirror, "_catch_up", fail)
    monkeypatch.setattr(mirror, "_warn", fail)
    saved(snapshots, [0])
    for _ in range(2):
        with pytest.raises(StorageError, match="thread has ended with LookupError: no such handler"):
            snapshots.wait_until_mirrored()
    assert snapshots.not_mirrored() == [0]
    snapshots.close()
    assert mirror.has_ended
    assert "LookupError" in mirror.problem


def test_two_threads_open_the_mirror_once(monkeypatch):
    fast, slow = created(), MemoryStore()
    with manager(fast, slow):
        pass
    real, count = Repository.open.__func__, []

    def slowly(cls, url, **options):
        if url is slow:
            count.append(url)
            time.sleep(0.2)
        return real(cls, url, **options)

    with manager(fast, slow, read_only=True) as snapshots:
        mirror = snapshots._mirror
        mirror._target.close()
        mirror._target = None
        monkeypatch.setattr(Repository, "open", classmethod(slowly))
        monkeypatch.setattr(mirror, "_open_target", lambda: Repository.open(slow, options=OPTIONS))
        together([mirror.view] * 2)
    assert len(count) == 1


# --- lost in one store -----------------------------------------------------------------------------------------------


def dropped(store, step, *, collected):
    """Delete the objects that only one step needs, and let a repair drop the step."""
    with opened(store) as repository:
        snapshot = repository.snapshot(f"a@{step}")
        others = {key for s in repository.snapshots() if s.id != snapshot.id for key in objects_of(store, s)}
        store.delete([key for key in objects_of(store, snapshot) if key not in others])
        assert [s.step for s in repository.repair(apply=True, drop=True).dropped] == [step]
        if collected:
            repository.gc()


@pytest.mark.parametrize("collected", [False, True], ids=["forgotten", "swept"])
@pytest.mark.parametrize("ref", [None, 2, 1])
def test_a_step_that_a_repair_has_dropped_comes_back_from_the_mirror(ref, collected):
    fast, slow = mirrored()
    dropped(fast, 2 if ref is None else ref, collected=collected)
    with manager(fast, slow) as snapshots:
        assert snapshots.latest_step() == 2
        assert same(snapshots.restore(ref), values("a", 2 if ref is None else ref))
    assert steps_in(fast) == [0, 1, 2]


def test_a_step_that_one_store_has_dropped_and_the_other_has_forgotten_is_restored():
    fast, slow = mirrored()
    dropped(fast, 1, collected=False)
    with opened(slow) as repository:
        repository.forget_snapshots(["a@1"])
    with manager(fast, slow) as snapshots:
        assert same(snapshots.restore(1), values("a", 1))


@pytest.mark.parametrize("collected", [False, True], ids=["forgotten", "swept"])
def test_a_mirror_gets_back_what_a_repair_has_dropped_there(collected):
    fast, slow = mirrored()
    dropped(slow, 2, collected=collected)
    with manager(fast, slow) as snapshots:
        assert snapshots.wait_until_mirrored(20) == []
    assert steps_in(slow) == [0, 1, 2]
    with opened(slow) as repository:
        assert same(repository.restore("a@2"), values("a", 2))


def test_the_error_of_a_damaged_step_names_the_mirror_that_has_it():
    fast, slow = mirrored()
    wound(fast, "a@2")
    with manager(fast, slow) as snapshots:
        for ref in (None, 2):
            with pytest.raises(IntegrityError, match="'snapstore repair --apply', then 'snapstore copy id:"):
                snapshots.restore(ref)
        with opened(fast) as repository, opened(slow) as mirror:
            repository.repair(apply=True)
            assert [s.step for s in mirror.copy(["a@2"], to=repository).copied] == [2]
        assert same(snapshots.restore(), values("a", 2))
