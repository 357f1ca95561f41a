"""All ranks compute the same plan of an exchange: one reader for each shared chunk, balanced reads, bounded rounds."""

import numpy as np
import pytest

from snapstore.restore import exchange
from snapstore.restore.exchange import Needs, Plan
from snapstore.restore.overlaps import Shape

LENGTH = 1000


def needs(chunks, random):
    """Return the needs of a rank that wants a random number of bytes of each chunk; chunks are given by number."""
    count = len(chunks)
    return Needs(
        [Shape([count * LENGTH], [0], [count * LENGTH])] if count else [],
        np.array([count] if count else [], np.int64),
        np.array([[number, number * 7] for number in chunks], np.int64).ravel(),
        np.arange(count) * LENGTH,
        np.full(count, LENGTH),
        np.array([300 + number % 5 * 100 for number in chunks], np.int64),
        random.integers(1, LENGTH + 1, count),
    )


@pytest.mark.parametrize("wanted", ["all", "pairs", "some", "own", "none"])
def test_plan(monkeypatch, wanted):
    random = np.random.default_rng(3)
    sets = {
        "all": [range(400)] * 4,
        "pairs": [range(400), range(400, 800), range(400), range(400, 800)],
        "some": [np.flatnonzero(random.random(900) < 0.5) for _ in range(4)],
        "own": [range(rank * 100, rank * 100 + 100) for rank in range(4)],
        "none": [[]] * 4,
    }[wanted]
    monkeypatch.setattr(exchange, "ROUND_BYTES", 60 * LENGTH)
    every = [needs([*chunks], random) for chunks in sets]
    plans = [Plan(every, place) for place in range(4)]
    for one in plans[1:]:
        for name in ("reader", "round", "order", "is_shared"):
            assert np.array_equal(getattr(one, name), getattr(plans[0], name))
    plan, read = plans[0], [set() for _ in range(4)]
    stored, before = np.zeros(4, np.int64), np.zeros(4, np.int64)  # what each rank holds in the round before
    for number in range(plan.rounds):
        for rank, one in enumerate(plans):
            sent, received = one.sends(number), one.receives(number)
            used = (
                sum(int(one.nbytes[rows].sum()) for rows in (*sent, *received)) - int(one.nbytes[sent[rank]].sum()) * 2
            )
            mine = np.unique(one.chunk[np.concatenate(sent)])
            assert before[rank] + len(mine) * LENGTH <= 60 * LENGTH  # they are read ahead
            before[rank] = used + len(mine) * LENGTH
            for other, rows in enumerate(sent):
                assert np.array_equal(rows, plans[other].receives(number)[rank])
                read[other].update(one.order[one.chunk[rows]].tolist())
            stored[rank] += sum(300 + int(plan_number(every, one, chunk)) % 5 * 100 for chunk in mine)
    shared = [set(plan.order[plan.chunk[plan.of_rank(rank)][plan.is_shared[plan.of_rank(rank)]]]) for rank in range(4)]
    assert read == shared
    times = np.bincount(np.concatenate([np.asarray([*chunks], int) for chunks in sets]), minlength=1)
    assert len(set().union(*shared)) == np.count_nonzero(times > 1)
    assert stored.max() - stored.min() <= 20 * 700, stored


def plan_number(every, plan, chunk):
    """Return the number that the test gave to a chunk of a plan."""
    digests = np.concatenate([one.digests for one in every]).reshape(-1, 2)
    return digests[np.flatnonzero(plan.chunk == chunk)[0], 0]
