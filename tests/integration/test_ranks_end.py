"""A rank that closes or fails says so: the others stop waiting for it, and still get its earlier messages."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kit.local_ranks import LocalRanks
from kit.ranks import Managers, together
from kit.repositories import OPTIONS, created
from kit.waits import until
from snapstore import InvalidInputError, RanksError, SnapshotManager, SnapstoreError, StorageError
from snapstore.distributed.base import ClosedError, Watch, say_ended, wait_for
from snapstore.save.ranks.writer import RankWriter
from snapstore.storage.memory import MemoryStore

STATE = {"a": torch.ones(3)}
SILENT_S = 60.0
#: Far below `SILENT_S`, and far above the time that these calls take [s].
SOON_S = 20.0


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr("snapstore.distributed.base.LOOK_ENDED_S", 0.05)


def managers_of(count: int = 3, **options) -> Managers:
    return Managers(created(), count, silent_s=SILENT_S, total_s=SILENT_S, **options)


def leave(manager: SnapshotManager, error: Exception | None) -> None:
    """Leave the manager's `with` block by an error, or at its end."""
    with manager:
        if error is not None:
            raise error


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [None, ValueError("boom in training")])
@pytest.mark.parametrize("call", ["first save", "save", "latest_step"])
def test_the_others_hear_at_once_that_a_rank_has_ended(rank, error, call):
    managers, began = managers_of(), time.monotonic()
    if call == "save":
        managers.all(lambda m, _: m.save(0, STATE).result())

    def act(manager, own):
        if own == rank:
            return leave(manager, error)
        return manager.latest_step() if call == "latest_step" else manager.save(1, STATE).result()

    found = managers.all(act)
    reason = "has ended: ValueError: boom in training" if error else "has closed its SnapshotManager"
    assert found[rank] is error
    if call == "latest_step" and rank == 1:
        assert found == [None, error, None]  # rank 0 alone is asked
    else:
        for own, said in enumerate(found):
            if own != rank:
                assert isinstance(said, RanksError), said
                assert f"rank {rank} of 3 {reason}" in str(said), said
                assert said.ranks == (rank,)
                if call != "latest_step":
                    assert str(said).count("save a@1: ") == 1, said
                    assert str(said).count("nothing was committed") == 1, said
    managers.end()
    assert time.monotonic() - began < SOON_S


def test_the_others_hear_that_a_rank_cannot_open_the_repository():
    class Broken(MemoryStore):
        def get(self, *args, **options):
            raise StorageError("no such disk")

    ranks, store, began = LocalRanks(2, silent_s=SILENT_S), created(), time.monotonic()

    def act(rank):
        manager = SnapshotManager(store if rank.rank == 0 else Broken(), run="a", ranks=rank, options=OPTIONS)
        try:
            manager.save(0, STATE).result()
        finally:
            manager._closed = True
            manager._job.close(ends_channel=False)

    found = together([lambda r=r: act(r) for r in ranks])
    assert isinstance(found[1], StorageError)
    assert "rank 1 of 2 has ended: StorageError: no such disk" in str(found[0])
    assert time.monotonic() - began < SOON_S


def test_a_message_before_the_end_is_heard():
    """The waiting rank looks and finds nothing; the other rank posts and ends; then the waiting rank sees the end."""
    ranks = LocalRanks(2, silent_s=SILENT_S)
    looks = []

    def look():
        looks.append(ranks[0].look("answer"))
        return looks[-1]

    watch = Watch(ranks[0], "an answer", lambda: [1], SILENT_S, "p/")

    def ends_between():
        if not watch._has_ended and time.monotonic() >= watch._next_ends:
            ranks[1].post("answer", b"x")
            say_ended(ranks[1], "p/", None)
        watch()

    assert wait_for(look, ends_between) == b"x"
    assert watch._has_ended


def test_the_rank_that_keeps_the_messages_closes_last():
    managers = managers_of()
    managers.ranks[0].is_hosted = True
    closed = []

    def act(manager, rank):
        with manager:
            manager.save(0, STATE).result()
            if rank == 2:
                time.sleep(0.5)
            step = manager.restore_into({"a": torch.zeros(3)}).step
            if rank:  # leaving the block tells rank 0 that this rank ends
                closed.append(rank)
        if rank == 0:
            closed.append(rank)
        return step

    assert managers.all(act) == [0, 0, 0]
    assert closed[-1] == 0
    assert sorted(closed) == [0, 1, 2]


@pytest.mark.parametrize("why", ["silent", "timeout", "error"])
def test_the_wait_of_a_closing_rank_is_bounded(why, monkeypatch):
    monkeypatch.setattr("snapstore.save.ranks.job.LINGER_S", 0.3)
    managers = Managers(created(), 2, silent_s=0.4 if why == "silent" else SILENT_S)
    managers.ranks[0].is_hosted = True
    if why == "silent":
        managers[1]._job.heart.close()
        time.sleep(0.1)
    began = time.monotonic()
    if why == "error":
        with pytest.raises(ValueError, match="boom"):
            leave(managers[0], ValueError("boom"))
    else:
        managers[0].close(timeout=0.3 if why == "timeout" else None)
    assert 0.05 < time.monotonic() - began < SOON_S
    managers[1].close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run": "b"}, "rank 1 asks for open.*run='b', and rank 0 has asked for open.*run='a'"),
        ({"on_busy": "skip"}, "rank 1 asks for open.*on_busy='skip', .*and rank 0 has asked for open.*on_busy='wait'"),
        ({"save_interval_steps": 5}, "save_interval_steps=5, .*and rank 0 has asked for open.*save_interval_steps=1, "),
        ({"repository": None}, "rank 1: the repository at .* expected [0-9a-f]{32}, got [0-9a-f]{32}"),
    ],
)
def test_unlike_managers_are_an_error_when_they_are_made(options, said):
    ranks, store, made = LocalRanks(2, silent_s=SILENT_S), created(), threading.Event()
    unlike = {key: value or created() for key, value in options.items()}

    def make(rank):
        given = {"repository": store, "run": "a", "on_busy": "wait"} | (unlike if rank.rank else {})
        manager = SnapshotManager(given.pop("repository"), **given, ranks=rank, options=OPTIONS)
        made.wait(SOON_S)
        manager.latest_step()
        manager.close()

    def second():
        with pytest.raises(InvalidInputError, match=said):
            make(ranks[1])
        made.set()

    assert together([lambda: make(ranks[0]), second]) == [None, None]


def test_an_unequal_call_is_told_before_the_limit(monkeypatch, caplog):
    """`if rank == 0: manager.save(...)`: the other rank lives and trains, so the limit is an hour."""
    monkeypatch.setattr("snapstore.distributed.base.WARN_S", 0.2)
    managers = managers_of(2)

    def act(manager, rank):
        if rank == 0:
            return manager.save(0, STATE).result()
        until(lambda: "still missing: rank 1" in caplog.text, SOON_S)
        return manager.save(0, STATE).result()

    found = managers.all(act)
    assert [one.step for one in found] == [0, 0]
    told = [r.getMessage() for r in caplog.records if "still missing" in r.getMessage()]
    assert len(told) == 1, told
    assert "rank 0 has waited" in told[0]
    assert "for all ranks to call save; still missing: rank 1; all ranks must make the same calls" in told[0]


@pytest.mark.parametrize("others_close", [False, True])
def test_the_waits_of_a_closing_rank_share_one_limit(others_close, monkeypatch):
    """After an error rank 0 waits for the ends of the others, and then the channel waits for the time that is left."""
    monkeypatch.setattr("snapstore.save.ranks.job.LINGER_S", 0.5)
    managers, left = managers_of(2), []
    managers.ranks[0].is_hosted = managers[0]._made_ranks = True
    monkeypatch.setattr(managers.ranks[0], "close", left.append, raising=False)
    if others_close:
        managers[1].close()
    with pytest.raises(ValueError, match="boom"):
        leave(managers[0], ValueError("boom"))
    assert len(left) == 1
    assert (0.0 < left[0] <= 0.5) if others_close else left[0] == 0.0
    managers[1].close()


def test_a_channel_that_does_not_answer_keeps_close_for_its_timeout_at_most(monkeypatch):
    monkeypatch.setattr("snapstore.manager.GIVE_UP_S", 0.2)
    managers, gate, posted = managers_of(2), threading.Event(), []
    post = managers.ranks[1].post

    def slow(key, value):
        gate.wait(2 * SOON_S)
        post(key, value)
        posted.append(key)

    monkeypatch.setattr(managers.ranks[1], "post", slow)
    began = time.monotonic()
    managers[1].close(timeout=0.3)
    assert time.monotonic() - began < SOON_S
    gate.set()
    until(lambda: "0/ended" in posted, SOON_S)
    assert posted == ["0/ended/1", "0/ended"]
    managers[0].close()


def end_channel(managers: Managers, rank: int) -> None:
    """Let `close` of a rank's manager end its channel, as with a channel that the manager has made itself."""
    ranks = managers.ranks[rank]
    managers[rank]._made_ranks = True

    def closed(*_):
        raise ClosedError("these ranks are closed")

    def close(limit_s=0.0):
        for name in ("post", "look", "look_all", "remove", "beat", "silences"):
            setattr(ranks, name, closed)

    ranks.close = close


def test_a_save_that_outlives_its_manager_ends_with_its_own_error(monkeypatch):
    """`close` has raised TimeoutError; the save then finds its channel closed."""
    monkeypatch.setattr("snapstore.manager.GIVE_UP_S", 0.2)
    gate, managers = threading.Event(), managers_of(2)
    write = RankWriter.write
    monkeypatch.setattr(RankWriter, "write", lambda *given: (gate.wait(SOON_S), write(*given))[1])
    for rank in range(2):
        end_channel(managers, rank)
    handles = managers.all(lambda m, _: m.save(1, STATE))
    assert [type(error) for error in managers.all(lambda m, _: m.close(timeout=0.2))] == [TimeoutError] * 2
    gate.set()
    for handle in handles:
        with pytest.raises(SnapstoreError, match=r"a@1: close\(timeout=0.2\) has given it up; nothing was committed"):
            handle.result(SOON_S)


def test_a_save_that_is_committed_after_its_manager_has_closed_is_no_error(monkeypatch, caplog):
    monkeypatch.setattr("snapstore.manager.GIVE_UP_S", 0.2)
    gate, committed, managers = threading.Event(), threading.Event(), managers_of(2)
    commit = RankWriter.commit

    def slow(*given):
        snapshot = commit(*given)
        committed.set()
        gate.wait(SOON_S)
        return snapshot

    monkeypatch.setattr(RankWriter, "commit", slow)
    end_channel(managers, 0)
    handles = managers.all(lambda m, _: m.save(1, STATE))
    assert committed.wait(SOON_S)
    with pytest.raises(TimeoutError):
        managers[0].close(timeout=0.2)
    gate.set()
    assert [handle.result(SOON_S).step for handle in handles] == [1, 1]
    assert "the other ranks learn the outcome from the record: these ranks are closed" in caplog.text
    managers[1].close()
