"""A rank that asks or restores alone: no rank takes an answer to another call, and no two ranks restore other steps."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from kit.ranks import Managers
from kit.repositories import created, opened
from snapstore import InvalidInputError, RanksError
from snapstore.distributed import questions


@pytest.fixture
def store():
    return created()


def saved(managers, *steps):
    for step in steps:
        managers.all(lambda m, rank, s=step: m.save(s, {"w": torch.full((4,), float(s)), "step": s}))
    managers.all(lambda m, _: m.wait_until_finished())


def restored(managers, **options):
    return managers.all(lambda m, _: m.restore(**options)["step"])


#: The questions about steps, by name.
LOOKS = {
    "latest_step": lambda m: m.latest_step(),
    "highest_step": lambda m: m.highest_step(),
    "all_steps": lambda m: m.all_steps(),
    "has_step 50": lambda m: m.has_step(50),
}


@pytest.mark.parametrize("alone", [lambda m: m.restore(), *LOOKS.values()], ids=["restore", *LOOKS])
def test_an_answer_that_rank_0_got_alone_is_for_no_later_call(store, alone, caplog):
    managers = Managers(store)
    saved(managers, 1)
    alone(managers[0])
    alone(managers[0])
    saved(managers, 2, 3)
    assert restored(managers) == [3] * 3
    assert "rank 0 alone has asked for" in caplog.text
    assert managers.all(lambda m, _: m.latest_step()) == [3] * 3
    saved(managers, 4)
    assert restored(managers) == [4] * 3
    managers.end()


def test_a_step_is_the_same_question_as_a_number_of_any_library(store):
    managers = Managers(store)
    saved(managers, 1, 2)
    steps = [1, np.int64(1), torch.tensor(1)]
    assert managers.all(lambda m, rank: m.restore(steps[rank])["step"]) == [1] * 3
    assert managers.end() == [None] * 3


def test_the_same_question_between_two_saves_whose_answer_has_changed(store):
    """All ranks ask twice, and another process saves between: all get the second answer."""
    managers = Managers(store)
    saved(managers, 1)
    assert restored(managers) == [1] * 3
    with opened(store) as repository:
        repository.save({"step": 50}, run="a", step=50)
    assert restored(managers) == [50] * 3
    managers.end()


def test_ranks_that_take_an_older_answer_to_the_same_question_are_noticed(store):
    """Rank 0 restored alone, and another process saved: the others would restore what rank 0 restored then."""
    managers = Managers(store)
    saved(managers, 1)
    managers[0].restore()
    with opened(store) as repository:
        repository.save({"step": 50}, run="a", step=50)

    def work(manager, rank):
        manager.restore()
        return manager.save(60, {"step": 60}).result()

    began = time.monotonic()
    for error in managers.all(work):
        assert isinstance(error, InvalidInputError), error
        assert "rank 0 waits in restore None" in str(error)
        assert "use a snapstore.Repository" in str(error)
    assert time.monotonic() - began < 20
    managers.all(lambda m, _: m.check_for_errors())
    managers.end()


def test_no_rank_looks_at_the_store_by_itself(store):
    """Another process saves after rank 0 has looked: the others see what rank 0 has seen, and all go the same way."""
    managers = Managers(store)
    saved(managers, 1)
    expected = [look(managers[0]) for look in LOOKS.values()]
    with opened(store) as repository:
        repository.save({"step": 50}, run="a", step=50)
    for rank in (1, 2):
        assert [look(managers[rank]) for look in LOOKS.values()] == expected == [1, 1, [1], False]
    assert managers.all(lambda m, _: [look(m) for look in LOOKS.values()]) == [[50, 50, [1, 50], True]] * 3
    managers.end()


def test_each_step_is_a_question_of_its_own(store):
    managers = Managers(store)
    saved(managers, 1)
    error = managers.all(lambda m, rank: m.has_step(min(rank, 1)))[1]
    assert isinstance(error, InvalidInputError)
    assert "asks for has_step 1, and rank 0 has asked for has_step 0" in str(error)
    managers.all(lambda m, _: m.close(timeout=0.1))


BAD = {
    "restore": (lambda m: m.restore(1, per_rank=-1), lambda m: m.restore(1)["step"], "per_rank -1: expected"),
    "has_step": (lambda m: m.has_step("x"), lambda m: m.has_step(1), "has_step 'x'"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_call_that_is_refused_on_another_rank_counts(store, what):
    bad, good, message = BAD[what]
    managers = Managers(store)
    saved(managers, 1)
    first, error, last = managers.all(lambda m, rank: bad(m) if rank == 1 else good(m))
    assert first == last == 1
    assert isinstance(error, InvalidInputError)
    assert message in str(error)
    assert managers.all(lambda m, _: m.latest_step()) == [1] * 3
    assert restored(managers) == [1] * 3
    assert managers.end() == [None] * 3


def test_a_call_that_is_refused_on_rank_0_is_an_error_on_all(store):
    bad, good, _ = BAD["has_step"]
    managers = Managers(store)
    saved(managers, 1)
    errors = managers.all(lambda m, rank: good(m) if rank else bad(m))
    assert all(isinstance(error, InvalidInputError) and "'x'" in str(error) for error in errors)
    assert managers.all(lambda m, _: m.latest_step()) == [1] * 3
    assert managers.end() == [None] * 3


def left(managers):
    return [key for key in managers.ranks.keys if "/answer/" in key or "/heard/" in key]


def test_answers_do_not_stay_for_the_whole_job(store):
    managers = Managers(store, on_busy="skip")
    for step in range(1, 8):
        saved(managers, step)
        assert managers.all(lambda m, _: m.latest_step()) == [step] * 3
        assert len(left(managers)) <= 4, left(managers)
    with opened(store) as repository:
        repository.save({"step": 50}, run="a", step=50)
    assert managers.all(lambda m, _: m.latest_step()) == [50] * 3
    assert not [key for key in left(managers) if "/heard/" in key]
    managers.end()


@pytest.mark.parametrize("count", [1, 3])
def test_answers_do_not_stay_where_nothing_is_saved(store, count):
    """Such as in a job that evaluates each new step."""
    managers = Managers(store, count)
    saved(managers, 1)
    for _ in range(4 * questions.TOLD_EVERY):
        assert managers.all(lambda m, _: m.latest_step()) == [1] * count
        assert len(managers.ranks.keys) < 3 * questions.TOLD_EVERY * (count > 1) + 20
    saved(managers, 2)
    assert restored(managers) == [2] * count
    managers.end()


def test_an_answer_stays_until_the_last_rank_has_read_it(store):
    """Rank 0 asks alone before each save, and rank 1 sees none of its answers until it asks: then it walks past all."""
    managers = Managers(store, 2)
    for step in range(1, 6):
        saved(managers, step)
        managers[0].latest_step()
    assert len(left(managers)) >= 5
    saved(managers, 6)
    assert managers.all(lambda m, _: m.latest_step()) == [6] * 2
    saved(managers, 7)
    assert left(managers) == []
    assert restored(managers) == [7] * 2
    managers.end()


@pytest.mark.parametrize("name", LOOKS)
def test_another_rank_that_asks_alone_hears_that_rank_0_goes_on(name, store):
    managers = Managers(store)
    saved(managers, 1)
    handles = [None] * 3

    def work(manager, rank):
        if rank == 1:
            return LOOKS[name](manager)
        handles[rank] = manager.save(2, {"step": 2})
        return None

    error = managers.all(work)[1]
    assert isinstance(error, RanksError)
    assert f"rank 1 calls {name}, but rank 0 is already in the next save" in str(error)
    handles[1] = managers[1].save(2, {"step": 2})
    assert [handle.result().step for handle in handles] == [2] * 3
    assert restored(managers) == [2] * 3
    managers.end()


def test_a_rank_that_has_missed_a_save_is_told(store):
    managers = Managers(store)
    saved(managers, 1)

    def work(manager, rank):
        if rank < 2:
            manager.save(2, {"step": 2})
        return manager.latest_step()

    error = managers.all(work)[2]
    assert isinstance(error, InvalidInputError)
    assert "rank 2 asks for latest_step after 1 saves, and rank 0 has asked for latest_step after 2 saves" in str(error)
    managers.all(lambda m, _: m.close(timeout=0.1))


def test_a_skipped_save_is_answered_for_its_step(store):
    """Rank 0 skips a step that the others do not save: they must not skip another step."""
    managers = Managers(store, on_busy="skip")
    gate = threading.Event()
    saved(managers, 1)

    def work(manager, rank):
        if rank:
            assert gate.wait(60)
        try:
            return manager.save(2 if rank == 0 else 3, {"step": 2})
        finally:
            gate.set()

    for error in managers.all(work)[1:]:
        assert isinstance(error, InvalidInputError)
        assert "asks for save a@3, or to skip it, and rank 0 has asked for save a@2, or to skip it" in str(error)
    managers.all(lambda m, _: m.close(timeout=0.1))
