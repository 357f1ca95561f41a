"""restore_into(fallback=True): the newest snapshot that every rank can read whole, and nothing is written before.

What is whole is known from the undamaged repository: the bytes that each snapshot needs of each object. So the expected
snapshot is the newest whose bytes no damage has touched, whatever the code under test reads.
"""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.fallbacks import (
    STEPS,
    Counted,
    blank,
    damaged,
    damaged_newest,
    needs,
    opened_by,
    require_blank,
    require_few_reads,
    require_version,
    restored,
    restored_by,
    saved,
    state_of,
)
from kit.faults import FaultStore, Unreadable
from kit.objects import clone, flip, keys_of, replace
from kit.ranks import Managers
from kit.repositories import OPTIONS, same
from kit.samples import SEED, THOROUGH, sampled
from kit.tally import tally
from snapstore import IntegrityError, InvalidInputError, NotFoundError, Skipped, SnapshotManager, StorageError
from snapstore.check import verify_wanted


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


CASES = [(count, SEED * 1000 + number) for number in range(250 if THOROUGH else 8) for count in (1, 4)]


@pytest.mark.parametrize("part", range(25 if THOROUGH else 1))
def test_the_newest_whole_one_is_restored(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips, cut and missing packs, manifests and records: 500 cases by 1 and 4 ranks in a thorough run."""
    for count, seed in CASES[part :: 25 if THOROUGH else 1]:
        check_case(count, seed, monkeypatch)


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


def test_one_failure_at_any_operation_skips_nothing() -> None:
    """The store fails once, while a snapshot is listed, verified or filled: the newest comes back, or the error."""
    store = FaultStore(clone(saved(1)))
    with opened_by(store) as manager:
        for _ in range(2):  # the first one lists twice
            dry = len(store.log)
            manager.restore_into(blank(state_of(0)), fallback=True)
        restored_all = 0
        for at in sampled(len(store.log) - dry, 3):
            skipped, state = Skipped(), blank(state_of(0))
            store.at, store.mode = len(store.log) + at, "fail"
            try:
                assert manager.restore_into(state, fallback=skipped).step == STEPS - 1
                require_version(state, STEPS - 1)
                restored_all += 1
            except StorageError as error:
                if "partly filled" not in str(error):
                    require_blank(state)
            store.heal()
            assert not skipped
        assert restored_all > 0
        assert manager.repository.context.index.marks.packed() == {}


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
