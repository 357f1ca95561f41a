"""restore_into(fallback=True): the newest snapshot that every rank can read whole, and nothing is written before.

What is whole is known from the undamaged repository: the bytes that each snapshot needs of each object. So the expected
snapshot is the newest whose bytes no damage has touched, whatever the code under test reads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from kit.faults import Crash, FaultStore, Unreadable
from kit.objects import clone, flip, keys_of, replace
from kit.ranks import Managers, RankStore, part_of, small_boxes
from kit.repositories import OPTIONS, created, opened, same, values
from kit.samples import SEED, THOROUGH, sampled
from kit.tally import tally
from snapstore import (
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    RanksError,
    Skipped,
    SnapshotManager,
    StorageError,
)
from snapstore.check import verify_wanted
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.format.records import Snapshot
from snapstore.storage.memory import MemoryStore

STEPS = 6


def state_of(version: int, rank: int = 0, count: int = 1) -> dict[str, Any]:
    """Return a rank's share of a version: of one process, the whole of it."""
    whole = values("a", version)
    if count == 1:
        return whole
    return whole | {"model": whole["model"] | {"drift": part_of(whole["model"]["drift"], rank, count)}}


def blank(value: Any) -> Any:
    """Return a state of the same form with other values."""
    if isinstance(value, dict):
        return {key: blank(child) for key, child in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 7)
    if isinstance(value, np.ndarray):
        return np.full_like(value, 7)
    if hasattr(value, "global_shape"):
        copy = type(value)(**vars(value))
        copy.data = torch.full_like(value.data, 7)
        return copy
    return value if isinstance(value, str) else type(value)()


def plain(value: Any) -> Any:
    """Return a state with the local tensors of sharded ones."""
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return value.data if hasattr(value, "global_shape") else value


@cache
def saved(count: int) -> MemoryStore:
    """Return a store with the steps 0 to STEPS - 1 of run a, saved by `count` ranks."""
    store = created()
    with small_boxes():
        if count == 1:
            with SnapshotManager(store, run="a", options=OPTIONS, async_save=False) as manager:
                for step in range(STEPS):
                    manager.save(step, state_of(step))
        else:
            managers = Managers(store, count, async_save=False)
            for step in range(STEPS):
                managers.each(lambda m, r, step=step: m.save(step, state_of(step, r, count)).result())
            managers.end()
    return store


@dataclass
class Needs:
    """The bytes that a snapshot needs: objects as a whole, and ranges of packs."""

    snapshot: Snapshot
    whole: set[str] = field(default_factory=set)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def packs(self) -> list[str]:
        return sorted({key for key, _, _ in self.ranges})

    @property
    def nbytes(self) -> int:
        return sum(length for _, _, length in self.ranges)


@cache
def needs(count: int) -> list[Needs]:
    """Return what each snapshot of `saved` needs, newest first."""
    store, found = saved(count), []
    with opened(store) as repository:
        snapshots = repository.view().snapshots("a")
    for snapshot in reversed(snapshots):
        one = Needs(snapshot, {snapshot.key})
        refs, ranges = list(snapshot.manifests), set()
        while refs:
            m = manifest.read(store, ref := refs.pop(), None)
            one.whole.add(ref.key)
            refs += m.header.children
            table = m.table
            for pack, offset, length in zip(table.ref_packs, table.ref_offsets, table.ref_lengths, strict=True):
                ranges.add((pack_key(m.header.pack_names[pack]), int(offset), int(length)))
        one.ranges = sorted(ranges)
        found.append(one)
    return found


@dataclass
class Damages:
    """Damage to objects, and which snapshots it leaves whole."""

    store: MemoryStore
    touched: dict[str, tuple[int, int]] = field(default_factory=dict)  # key -> the bytes [first, end) that are wrong

    def do(self, key: str, how: str, at: int) -> None:
        if key in self.touched:
            return
        data = self.store.get(key)
        if how == "flip":
            flip(self.store, key, at, 4)
            self.touched[key] = at, at + 1
        elif how == "cut":
            replace(self.store, key, data[:at])
            self.touched[key] = at, len(data)
        else:
            self.store.delete([key])
            self.touched[key] = 0, len(data)

    def spares(self, one: Needs) -> bool:
        if one.whole & self.touched.keys():
            return False
        hit = (self.touched[key] + (first, first + length) for key, first, length in one.ranges if key in self.touched)
        return not any(max(a, first) < min(b, end) for a, b, first, end in hit)


def damaged(count: int, dice: random.Random) -> Damages:
    """Damage the newest snapshots, each in a random way."""
    done = Damages(clone(saved(count)))
    for one in needs(count)[: dice.randint(1, STEPS - 2)]:
        kind = dice.choice(["record", "manifest", "pack", "pack"])
        if kind == "record":
            key = one.snapshot.key
        elif kind == "manifest":
            key = dice.choice(sorted(one.whole - {one.snapshot.key}))
        else:
            key, first, length = dice.choice(one.ranges)
        how = dice.choice(["flip", "flip", "cut", "missing"])
        size = len(saved(count).get(key))
        at = dice.randrange(first, first + length) if kind == "pack" and dice.random() < 0.8 else dice.randrange(size)
        done.do(key, how, at)
    return done


class Counted(FaultStore):
    """Counts the bytes that are read from packs."""

    read_bytes = 0

    def _act(self, name: str, key: str, effect: Any) -> Any:
        found = super()._act(name, key, effect)
        if key.startswith("packs/") and name in ("get", "get_range"):
            self.read_bytes += len(found)
        return found


def restored(store: Any, **options: Any) -> tuple[Any, Any, Skipped]:
    """Return (the snapshot, the state, what was skipped) of a restore by one process; or (its error, ...)."""
    skipped, state = Skipped(), blank(state_of(0))
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        try:
            return manager.restore_into(state, fallback=skipped, **options), state, skipped
        except Exception as error:  # noqa: BLE001
            return error, state, skipped


def restored_by(managers: Managers, **options: Any) -> list[tuple[Any, Any, Skipped]]:
    """Return the same of every rank."""
    count = len(managers)
    states = [blank(state_of(0, rank, count)) for rank in range(count)]
    skips = [Skipped() for _ in states]
    done = managers.all(lambda m, r: m.restore_into(states[r], fallback=skips[r], **options))
    return list(zip(done, states, skips, strict=True))


def require_version(state: Any, version: int, rank: int = 0, count: int = 1) -> None:
    assert same(plain(state), plain(state_of(version, rank, count))), f"rank {rank}: not the state of {version}"


def check_case(count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage the newest snapshots at random; the newest whole one is restored, with few reads."""
    dice = random.Random(seed)
    done = damaged(count, dice)
    monkeypatch.setattr(verify_wanted, "SPAN_BYTES", dice.choice([1, 1024, 1 << 25]))
    wanted = next((one for one in needs(count) if done.spares(one)), None)
    stores = [Counted(done.store) for _ in range(count)]
    if count == 1:
        results = [restored(stores[0])]
    else:
        managers = Managers(done.store, count, stores=stores)
        results = restored_by(managers)
        managers.end()
    tally("fallbacks")
    for rank, (snapshot, state, skipped) in enumerate(results):
        about = f"{count} ranks, seed {seed}, rank {rank}: {done.touched}: {snapshot!r}"
        if wanted is None:
            assert isinstance(snapshot, IntegrityError), about
            require_blank(state, rank, count)
            continue
        assert getattr(snapshot, "id", None) == wanted.snapshot.id, about
        require_version(state, wanted.snapshot.step, rank, count)
        listed, all_of_it = keys_of(done.store, "snapshots/"), [one.snapshot for one in needs(count)]
        newer = {s.step for s in all_of_it if s.step > wanted.snapshot.step and s.key in listed}
        wanted_steps = newer | {s.step for s in all_of_it if s.key in done.touched and s.key in listed}  # maybe newer
        assert sorted(step for step, _, _ in skipped.snapshots) == sorted(wanted_steps), about
        assert all(why for *_, why in skipped.snapshots)


def require_blank(state: Any, rank: int = 0, count: int = 1) -> None:
    assert same(plain(state), plain(blank(state_of(0, rank, count)))), f"rank {rank}: its state has changed"


CASES = [(count, SEED * 1000 + number) for number in range(250 if THOROUGH else 8) for count in (1, 4)]


@pytest.mark.parametrize("part", range(25 if THOROUGH else 1))
def test_the_newest_whole_one_is_restored(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips, cut and missing packs, manifests and records: 500 cases by 1 and 4 ranks in a thorough run."""
    for count, seed in CASES[part :: 25 if THOROUGH else 1]:
        check_case(count, seed, monkeypatch)


# -- one process


def damaged_newest(store: MemoryStore, count: int = 1, how: str = "flip") -> str:
    """Damage a blob that only the newest snapshot needs; return its pack."""
    newest, *older = needs(count)
    others = {one for other in older for one in other.ranges}
    key, first, length = next(one for one in newest.ranges if one not in others)
    data = bytearray(store.get(key))
    if how == "flip":
        flip(store, key, first + length // 2, 4)
    else:
        replace(store, key, data[: first + length // 2])
    return key


def opened_by(store: Any, **options: Any) -> SnapshotManager:
    return SnapshotManager(store, run="a", options=OPTIONS, **options)


def test_a_whole_newest_is_restored_without_a_word() -> None:
    snapshot, state, skipped = restored(clone(saved(1)))
    assert (snapshot.step, len(skipped), bool(skipped)) == (STEPS - 1, 0, False)
    require_version(state, STEPS - 1)


def test_true_falls_back_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = clone(saved(1))
    damaged_newest(store)
    state = blank(state_of(0))
    with opened_by(store) as manager:
        with pytest.raises(IntegrityError, match="newest whole"):
            manager.restore_into(blank(state_of(0)))
        caplog.clear()
        assert manager.restore_into(state, fallback=True).step == STEPS - 2
        assert "is skipped: " in caplog.text
        assert "checksum mismatch" in caplog.text
        with pytest.raises(IntegrityError):  # a mark withholds only choices: a plain restore tries
            manager.restore_into(blank(state_of(0)))
    require_version(state, STEPS - 2)


def test_a_wrong_argument() -> None:
    with opened_by(clone(saved(1))) as manager, pytest.raises(InvalidInputError, match=r"expected True, False or Skip"):
        manager.restore_into(blank(state_of(0)), fallback=[])  # type: ignore[arg-type]


def test_a_run_without_snapshots() -> None:
    with (
        SnapshotManager(clone(saved(1)), run="b", options=OPTIONS) as manager,
        pytest.raises(NotFoundError, match="'b'"),
    ):
        manager.restore_into(blank(state_of(0)), fallback=True)


def test_none_is_whole() -> None:
    """The error names all that were tried, and nothing has changed."""
    store = clone(saved(1))
    store.delete(keys_of(store, "packs/"))
    error, state, _ = restored(store)
    assert isinstance(error, IntegrityError)
    assert all(f"a@{step} (id:" in str(error) for step in range(STEPS))
    require_blank(state)


def test_a_step_and_older_ones() -> None:
    """With a step the candidates are that step and older ones: newer whole ones are not restored."""
    store = clone(saved(1))
    third = needs(1)[2]
    replace(store, third.snapshot.manifests[0].key, b"")
    snapshot, state, skipped = restored(store, step=third.snapshot.step)
    assert snapshot.step == third.snapshot.step - 1
    assert [(step, name) for step, name, _ in skipped.snapshots] == [(third.snapshot.step, third.snapshot.id)]
    require_version(state, third.snapshot.step - 1)
    assert restored(store)[0].step == STEPS - 1


def test_one_wrong_answer_proves_nothing() -> None:
    """Each object is misread once, in each way: nothing is skipped."""
    for key in sorted({*needs(1)[0].whole, *needs(1)[0].packs}):
        for how in ("unread", "missing", "flipped"):
            store = Unreadable(clone(saved(1)), key, times=1, how=how)
            snapshot, state, skipped = restored(store)
            if key.startswith("snapshots/") and isinstance(snapshot, StorageError):
                assert "restore again" in str(snapshot)  # its record could not be read, and now can
                continue
            assert getattr(snapshot, "step", snapshot) == STEPS - 1, (key, how)
            assert not skipped, (key, how)
            require_version(state, STEPS - 1)


def test_what_is_withheld_is_no_damage() -> None:
    """A fallback because a server refuses would lose training: the error comes, and nothing has changed."""
    for key in sorted({*needs(1)[0].whole, *needs(1)[0].packs}):
        error, state, _ = restored(Unreadable(clone(saved(1)), key, how="withheld"))
        assert isinstance(error, StorageError), key
        require_blank(state)


def test_a_store_that_is_away_is_no_damage() -> None:
    """The store fails from any operation on: an error, and no older snapshot."""
    store = FaultStore(clone(saved(1)))
    with opened_by(store) as manager:
        for _ in range(2):  # the first one lists twice
            dry = len(store.log)
            manager.restore_into(blank(state_of(0)), fallback=True)
        for at in sampled(len(store.log) - dry, 3):
            state = blank(state_of(0))
            store.at, store.mode = len(store.log) + at, "outage"
            with pytest.raises(StorageError) as found:
                manager.restore_into(state, fallback=True)
            store.heal()
            if "partly filled" not in str(found.value):
                require_blank(state)
        assert manager.repository.context.index.marks.packed() == {}
        assert manager.restore_into(state, fallback=True).step == STEPS - 1


def test_a_target_that_does_not_fit_is_no_damage() -> None:
    store = clone(saved(1))
    damaged_newest(store)
    with opened_by(store) as manager:
        with pytest.raises(InvalidInputError, match="shape"):
            manager.restore_into(state_of(0) | {"optimizer": {"noise": np.zeros(3), "constant": 1}}, fallback=True)
        with pytest.raises(NotFoundError, match="nothing"):
            manager.restore_into(blank(state_of(0)), fallback=True, keys=["nothing.*"])


def test_only_what_is_read_is_verified() -> None:
    """A restore of keys whose chunks are whole skips nothing."""
    store = clone(saved(1))
    damaged_newest(store)
    with opened_by(store) as manager:
        state: Any = {"version": 0}
        assert manager.restore_into(state, fallback=True, keys=["version"]).step == STEPS - 1
    assert state == {"version": STEPS - 1}


def test_unknown_formats_and_bits_that_look_like_one() -> None:
    """A pack whose SHA-256 is right and whose blob has another version is of another release: no damage."""
    store = clone(saved(1))
    newest, *older = needs(1)
    others = {one for other in older for one in other.ranges}
    key, first, _ = next(one for one in newest.ranges if one not in others)
    flip(store, key, first + 4, 4)  # the version in the header of the blob
    snapshot, state, skipped = restored(store)
    assert snapshot.step == STEPS - 2
    assert "it is altered" in skipped.snapshots[0][2]
    require_version(state, STEPS - 2)


# -- ranks

COUNT = 3


def job(stores: Sequence[Any], **options: Any) -> Managers:
    return Managers(stores[0], len(stores), stores=stores, **options)


@cache
def own_blob(count: int) -> tuple[str, int, int]:
    """Return a blob that only the newest snapshot needs."""
    newest, *older = needs(count)
    others = {one for other in older for one in other.ranges}
    return next(one for one in newest.ranges if one not in others)


@pytest.mark.parametrize("how", ["flipped", "missing", "unread"])
@pytest.mark.parametrize("bad", range(COUNT))
def test_a_corrupt_replica_of_one_rank(bad: int, how: str) -> None:
    """Elsewhere a corrupt replica made a job restart 44 times into NaN: here no rank restores what one cannot read."""
    key = next(key for key in needs(COUNT)[0].packs if key not in needs(COUNT)[1].packs)
    stores: list[Any] = [clone(saved(COUNT)) for _ in range(COUNT)]
    stores[bad] = Unreadable(stores[bad], key, how=how)
    managers = job(stores)
    results = restored_by(managers)
    managers.end()
    reads_it = any(len(skipped) for *_, skipped in results)  # a rank may need no byte of it
    for rank, (snapshot, state, skipped) in enumerate(results):
        assert snapshot.step == (STEPS - 2 if reads_it else STEPS - 1)
        require_version(state, snapshot.step, rank, COUNT)
        assert skipped == results[0][2]
        assert all(f"rank {bad}: " in why for *_, why in skipped.snapshots)


def test_corrupt_replicas_make_all_skip() -> None:
    """A damaged manifest on any one rank is read by all, so all skip."""
    key = needs(COUNT)[0].snapshot.manifests[0].key
    for bad in range(COUNT):
        stores: list[Any] = [clone(saved(COUNT)) for _ in range(COUNT)]
        flip(stores[bad], key, 30)
        managers = job(stores)
        for rank, (snapshot, state, skipped) in enumerate(restored_by(managers)):
            assert snapshot.step == STEPS - 2
            require_version(state, STEPS - 2, rank, COUNT)
            assert [step for step, *_ in skipped.snapshots] == [STEPS - 1]
            assert f"rank {bad}: " in skipped.snapshots[0][2]
        managers.end()


def test_an_error_of_one_rank_ends_it_on_all() -> None:
    """A store that is away on one rank, or a target that does not fit there: no rank restores anything."""
    key = needs(COUNT)[0].snapshot.manifests[0].key
    for bad in range(COUNT):
        stores: list[Any] = [clone(saved(COUNT)) for _ in range(COUNT)]
        stores[bad] = Unreadable(stores[bad], key, how="withheld")
        managers = job(stores)
        for rank, (error, state, _) in enumerate(restored_by(managers)):
            assert isinstance(error, StorageError), (bad, rank, error)
            require_blank(state, rank, COUNT)
        stores[bad].times = 0
        states = [blank(state_of(0, rank, COUNT)) for rank in range(COUNT)]
        states[bad] = {"other": 1}
        for rank, error in enumerate(managers.all(lambda m, r, s=states: m.restore_into(s[r], fallback=True))):
            assert isinstance(error, InvalidInputError), (bad, rank, error)
            if rank != bad:
                require_blank(states[rank], rank, COUNT)
        for rank, (snapshot, state, skipped) in enumerate(restored_by(managers)):  # and the job goes on
            assert (snapshot.step, len(skipped)) == (STEPS - 1, 0)
            require_version(state, STEPS - 1, rank, COUNT)
        managers.end()


def test_ranks_that_disagree_on_the_call() -> None:
    """One rank calls without fallback, or for another step: errors, and no hang."""
    for bad in range(COUNT):
        for other in ({"fallback": False}, {"fallback": True, "step": 1}):
            managers = job([saved(COUNT)] * COUNT, total_s=10)
            states = [blank(state_of(0, rank, COUNT)) for rank in range(COUNT)]

            def call(m: SnapshotManager, r: int, bad: int = bad, other: Any = other, states: Any = states) -> Any:
                return m.restore_into(states[r], **(other if r == bad else {"fallback": True}))

            results = managers.all(call)
            for rank, error in enumerate(results):
                if isinstance(error, Snapshot):  # rank 0's plain restore asks nobody
                    assert (rank, bad) == (0, 0)
                    continue
                assert isinstance(error, InvalidInputError | RanksError), (bad, other, rank, error)
                require_blank(states[rank], rank, COUNT)
            managers.end()


def test_a_rank_that_dies_while_it_verifies() -> None:
    """The others do not wait longer than for any other message."""
    for bad in range(COUNT):
        stores: list[Any] = [RankStore(clone(saved(COUNT))) for _ in range(COUNT)]
        managers = job(stores, silent_s=1.0, total_s=10.0)
        states = [blank(state_of(0, rank, COUNT)) for rank in range(COUNT)]
        stores[bad].ranks = managers.ranks[bad]
        managers.ranks[bad].die, die = stores[bad].die, managers.ranks[bad].die
        key = needs(COUNT)[0].snapshot.manifests[0].key
        read = stores[bad].inner.get

        def get(name: str, bad: int = bad, die: Any = die, read: Any = read, key: str = key, **options: Any) -> bytes:
            if name == key:
                die()
                raise Crash(name)
            return read(name, **options)

        stores[bad].inner.get = get
        results = managers.all(lambda m, r, s=states: m.restore_into(s[r], fallback=True))
        for rank, error in enumerate(results):
            assert isinstance(error, Crash if rank == bad else RanksError), (bad, rank, error)
            if rank != bad:
                require_blank(states[rank], rank, COUNT)
