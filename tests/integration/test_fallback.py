"""restore_into(fallback=True): the newest snapshot that every rank can read whole, and nothing is written before.

What is whole is known from the undamaged repository: the bytes that each snapshot needs of each object. So the expected
snapshot is the newest whose bytes no damage has touched, whatever the code under test reads.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit.damage import encoded_wrongly
from kit.faults import Crash, FaultStore, Unreadable
from kit.objects import clone, copy_objects, flip, keys_of, replace
from kit.ranks import Managers, RankStore, fail_message, part_of, small_boxes
from kit.repositories import OPTIONS, created, opened, same, values
from kit.samples import SEED, THOROUGH, sampled
from kit.tally import tally
from snapstore import (
    IntegrityError,
    InvalidInputError,
    KeepLast,
    NotFoundError,
    RanksError,
    Repository,
    SaveOptions,
    Skipped,
    SnapshotManager,
    StorageError,
)
from snapstore.check import fallback, verify_wanted
from snapstore.format import records
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.format.records import Snapshot
from snapstore.storage.local import LocalStore
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
        if verify_wanted.SPAN_BYTES == 1 and not any("it is altered" in why for *_, why in skipped.snapshots):
            require_few_reads(count, stores, wanted, skipped)


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


def require_agreed(results: Sequence[Any], states: Sequence[Any], wanted: int, about: str) -> None:
    """Each rank has restored the same step, or has raised an error and changed nothing."""
    for rank, (found, state) in enumerate(zip(results, states, strict=True)):
        if isinstance(found, Snapshot):
            assert found.step == wanted, about
            require_version(state, wanted, rank, COUNT)
        else:
            assert isinstance(found, RanksError | Crash), f"{about}, rank {rank}: {found!r}"
            require_blank(state, rank, COUNT)


@pytest.mark.parametrize("bad", range(COUNT))
def test_a_rank_that_dies_while_it_verifies(bad: int) -> None:
    """The process of a rank ends at any of its reads: the others raise errors within the known time."""
    store = clone(saved(COUNT))
    damaged_newest(store, COUNT)
    dry = 1
    for at in [None, *range(0 if THOROUGH else SEED % 9, 40, 1 if THOROUGH else 9)]:
        if at is not None and at >= dry:
            break
        stores = [RankStore(store) for _ in range(COUNT)]
        managers = job(stores, silent_s=0.5, total_s=10.0)
        for one, ranks in zip(stores, managers.ranks, strict=True):
            one.ranks = ranks
        first = len(stores[bad].log)
        if at is not None:
            stores[bad].at, stores[bad].mode = first + at, "crash-before"
        states = [blank(state_of(0, rank, COUNT)) for rank in range(COUNT)]
        results = managers.all(lambda m, r, s=states: m.restore_into(s[r], fallback=True))
        dry = len(stores[bad].log) - first if at is None else dry
        assert at is None or isinstance(results[bad], Crash)
        states[bad] = states[bad] if at is None else blank(state_of(0, bad, COUNT))  # it is gone
        require_agreed(results, states, STEPS - 2, f"rank {bad} dies at {at} of {dry}")
        managers.end()
        for manager in managers:
            manager.repository.close()


@pytest.mark.parametrize("mode", ["drop", "delay", "double", "crash-before", "crash-after"])
def test_messages_that_are_lost_late_or_twice(mode: str) -> None:
    """Each message of each rank is lost, late or doubled, or its process dies there: no two ranks differ."""
    store = clone(saved(COUNT))
    damaged_newest(store, COUNT)
    for bad in range(COUNT):
        for at in range(4) if THOROUGH else [SEED % 3]:
            managers = job([store] * COUNT, silent_s=0.5, total_s=2.0)
            for ranks in managers.ranks:
                ranks.die = lambda ranks=ranks: setattr(ranks, "dead", True)
            fail_message(managers.ranks[bad], at, mode, 0.3)
            states = [blank(state_of(0, rank, COUNT)) for rank in range(COUNT)]
            results = managers.all(lambda m, r, s=states: m.restore_into(s[r], fallback=True))
            if mode.startswith("crash") and isinstance(results[bad], Crash):
                states[bad] = blank(state_of(0, bad, COUNT))
            require_agreed(results, states, STEPS - 2, f"rank {bad}, message {at}, {mode}")
            managers.end()
            for manager in managers:
                manager.repository.close()


# -- how much is read, and how much memory is taken


@cache
def plain_reads(count: int) -> dict[str, int]:
    """Return the bytes of packs that a plain restore of each whole snapshot reads, by id; of `count` ranks, in all."""
    found = {}
    for one in needs(count):
        stores = [Counted(saved(count)) for _ in range(count)]
        managers = Managers(saved(count), count, stores=stores)
        managers.each(lambda m, r, one=one: m.restore_into(blank(state_of(0, r, count)), one.snapshot.step))
        managers.end()
        found[one.snapshot.id] = sum(store.read_bytes for store in stores)
    return found


def require_few_reads(count: int, stores: Sequence[Counted], wanted: Needs, skipped: Skipped) -> None:
    """Beyond the restore: one read of what was skipped, one of what is restored, and the lost chunk once more or so."""
    reads, ids = plain_reads(count), {name for _, name, _ in skipped.snapshots}
    found = sum(store.read_bytes for store in stores)
    chain = sum(sorted((length for *_, length in needs(count)[0].ranges), reverse=True)[:STEPS])
    again = 6 * chain * count * len(ids)
    assert found <= 2 * reads[wanted.snapshot.id] + sum(reads[name] for name in ids) + again
    if not ids:
        assert found <= 2 * reads[wanted.snapshot.id]


def test_memory_is_that_of_a_restore(tmp_path: Path) -> None:
    """A restore with fallback takes no more than one span beyond a plain restore, however large the state is."""
    state = {"a": np.random.default_rng(1).integers(0, 255, 24 << 20, np.uint8), "b": np.zeros(8 << 20, np.uint8)}
    target = {key: np.zeros_like(value) for key, value in state.items()}
    with SnapshotManager(tmp_path / "r", run="a", async_save=False) as manager, pytest.MonkeyPatch.context() as patch:
        manager.save(1, state)
        peaks = []
        for span, options in ((0, {}), (2 << 20, {"fallback": True}), (verify_wanted.SPAN_BYTES, {"fallback": True})):
            patch.setattr(verify_wanted, "SPAN_BYTES", span)
            manager.restore_into(target)  # takes buffers, which are kept
            tracemalloc.start()
            manager.restore_into(target, **options)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert same(target, state)
    assert max(peaks[1:]) <= peaks[0] + (2 << 20)


# -- marks


def local(store: MemoryStore, folder: Path) -> Path:
    """Copy objects into a local repository, whose index outlives a process."""
    copy_objects(store, LocalStore(folder, create=True))
    return folder


def notes(folder: Path) -> dict[str, list[int]]:
    """Return the notes of quarantine: pack -> offsets."""
    store = LocalStore(folder)
    keys = [key for key in keys_of(store, "gc/") if key.endswith(".quarantine")]
    found = (records.decode(store.get(key), records.Quarantine, key) for key in keys)
    return {pack_key(note.pack): list(note.blobs) for note in found}


def verified(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, list[str], Skipped]:
    """Restore with fallback; return (the snapshot, the steps that were verified, what was skipped)."""
    tried: list[Any] = []
    read = fallback.read_small
    with monkeypatch.context() as patch:
        patch.setattr(fallback, "read_small", lambda *args: tried.append(read(*args)) or tried[-1])
        with SnapshotManager(folder, run="a", **options) as manager:
            snapshot = manager.restore_into(state := blank(state_of(0)), fallback=(skipped := Skipped()))
    require_version(state, snapshot.step)
    return snapshot, [one.step for one in tried], skipped


def test_the_next_restore_goes_directly_to_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = clone(saved(1))
    pack = damaged_newest(store)
    replace(store, needs(1)[1].snapshot.manifests[0].key, b"")
    folder = local(store, tmp_path / "r")
    snapshot, tried, _ = verified(folder, monkeypatch)
    assert (snapshot.step, tried) == (STEPS - 3, [STEPS - 1, STEPS - 2, STEPS - 3])
    assert notes(folder) == {pack: []}
    snapshot, tried, skipped = verified(folder, monkeypatch)
    assert (snapshot.step, tried) == (STEPS - 3, [STEPS - 3])
    assert [step for step, *_ in skipped.snapshots] == [STEPS - 1, STEPS - 2]
    assert all("marked in the index: " in why for *_, why in skipped.snapshots)
    with Repository.open(folder) as repository:  # the bytes are put back, and a check finds all whole
        for key in (pack, needs(1)[1].snapshot.manifests[0].key):
            replace(LocalStore(folder), key, saved(1).get(key))
        repository.check(level="metadata")
        assert len(repository.context.index.marks.packed()) == 2
        repository.rebuild_index()
        assert len(repository.context.index.marks.packed()) == 2  # a rebuild proves nothing
        repository.check(level="restore")
        assert repository.context.index.marks.packed() == {}
    assert verified(folder, monkeypatch)[0].step == STEPS - 1


def test_a_mark_never_makes_a_restore_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no other snapshot is whole, those with a mark are tried again: the mark may be stale."""
    store = clone(saved(1))
    pack = damaged_newest(store)
    folder = local(store, tmp_path / "r")
    assert verified(folder, monkeypatch)[0].step == STEPS - 2
    replace(LocalStore(folder), pack, saved(1).get(pack))
    for one in needs(1)[1:]:
        replace(LocalStore(folder), one.snapshot.manifests[0].key, b"")
    snapshot, _, skipped = verified(folder, monkeypatch)
    assert snapshot.step == STEPS - 1
    assert STEPS - 1 not in [step for step, *_ in skipped.snapshots]


def test_a_read_only_manager_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = clone(saved(1))
    damaged_newest(store)
    folder = local(store, tmp_path / "r")
    before = keys_of(LocalStore(folder))
    assert verified(folder, monkeypatch, read_only=True)[0].step == STEPS - 2
    assert keys_of(LocalStore(folder)) == before
    assert verified(folder, monkeypatch, read_only=True)[1] == [STEPS - 2]  # the index has a mark


def test_a_store_that_refuses_notes_prevents_no_restore() -> None:
    store = clone(saved(1))
    pack = damaged_newest(store)
    refusing = FaultStore(store, 0, "full")
    with opened_by(refusing) as manager:
        assert manager.restore_into(blank(state_of(0)), fallback=True).step == STEPS - 2
        assert not [key for key in keys_of(store, "gc/") if key.endswith(".quarantine")]
        refusing.heal()
        manager.save(STEPS, state_of(STEPS - 1)).result()  # the same content as the damaged one
    with opened(store) as repository:
        assert pack_key_in(repository, f"a@{STEPS}") & {pack} == set()
        assert same(repository.restore(f"a@{STEPS}"), state_of(STEPS - 1))


def pack_key_in(repository: Repository, ref: str) -> set[str]:
    """Return the packs that a snapshot needs."""
    headers = repository.context.index.headers(repository.snapshot(ref).manifests)
    return {pack_key(name) for header in headers for name in header.pack_names}


def test_a_misbuilt_blob_is_named_in_the_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pack has its SHA-256: a repair that does not rebuild chunks must not release it."""
    options = SaveOptions(threads=1, pack_bytes=4096, verify_writes="off")
    with SnapshotManager(tmp_path / "r", run="a", options=options, async_save=False) as manager, small_boxes():
        manager.save(0, state_of(0))
        with encoded_wrongly():
            manager.save(1, state_of(1))
    assert verified(tmp_path / "r", monkeypatch)[0].step == 0
    (offsets,) = notes(tmp_path / "r").values()
    assert offsets
    with Repository.open(tmp_path / "r") as repository:
        repository.repair(apply=True)
    assert offsets in notes(tmp_path / "r").values()


# -- what counts as kept


@pytest.mark.parametrize("noted", [True, False])
def test_policies_count_no_damaged_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bool) -> None:
    """KeepLast(1) keeps the newest whole one, known by a note or by a mark alone; so does a forget by hand."""
    store = clone(saved(1))
    damaged_newest(store)
    folder = local(store, tmp_path / "r")
    assert verified(folder, monkeypatch, read_only=not noted)[0].step == STEPS - 2
    assert bool(notes(folder)) == noted
    with Repository.open(folder) as repository:
        with pytest.raises(InvalidInputError, match="not known to be damaged"):
            repository.forget_snapshots([f"a@{STEPS - 2}"])
        repository.forget([KeepLast(1)], run="a")
        assert [s.step for s in repository.snapshots("a")] == [STEPS - 2, STEPS - 1]
        repository.gc()
        assert same(repository.restore(f"a@{STEPS - 2}"), state_of(STEPS - 2))


def test_the_training_goes_on(tmp_path: Path) -> None:
    """Train, lose the newest, fall back, train on, save the same steps again, restore the newest, check, repair."""
    folder = local(saved(1), tmp_path / "r")
    pack = own_blob(1)[0]
    flip(LocalStore(folder), pack, own_blob(1)[1] + 60, 4)
    with SnapshotManager(folder, run="a", options=OPTIONS, keep=[KeepLast(3)], async_save=False) as manager:
        whole = manager.restore_into(blank(state_of(0)), fallback=True)
        assert whole.step == STEPS - 2
        saved_again = [manager.save(step, state_of(step)).result() for step in (STEPS - 1, STEPS, STEPS + 1)]
        assert saved_again[0].parent == whole.id
        assert manager.latest_step() == STEPS + 1
        state = blank(state_of(0))
        assert manager.restore_into(state).step == STEPS + 1
        require_version(state, STEPS + 1)
        manager.restore_into(state, STEPS - 1)  # of the two, the new one
        require_version(state, STEPS - 1)
    with Repository.open(folder) as repository:
        result = repository.check(level="restore")
        assert {s.id for s in result.damaged} == {needs(1)[0].snapshot.id}
        assert {one.id for one in saved_again} <= {s.id for s in result.restorable}
        repository.repair(apply=True, drop=True, purge=True)
        repository.gc()
        assert repository.check(level="restore").damaged == []
        found = repository.snapshots("a")
        assert [s.step for s in found] == [STEPS - 1, STEPS - 1, STEPS, STEPS + 1]  # the damaged one was healed
        assert all(same(repository.restore(f"id:{s.id}"), state_of(s.step)) for s in found)
    assert notes(folder) == {}
