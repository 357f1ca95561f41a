"""Each retention policy keeps exactly the snapshots that its definition names."""

import datetime as dt
import enum
import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import FormatError, InvalidInputError
from snapstore.format import records
from snapstore.format.records import RunPolicies
from snapstore.retention import (
    Decision,
    KeepBest,
    KeepBytes,
    KeepDaily,
    KeepEvery,
    KeepHourly,
    KeepLast,
    KeepMonthly,
    KeepSteps,
    KeepWeekly,
    KeepWithin,
    KeepYearly,
    apply,
    describe,
    from_dict,
    stays_without_neighbours,
    to_dict,
)
from snapstore.text import size_text

NUMBERS = (np.int64(3), np.uint8(3), np.array(3), torch.tensor(3))
NOON = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC).timestamp()  # a Saturday, in ISO week 47
HOUR_S = 3600
DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class Snap:
    id: str
    step: int
    seq: int
    run: str = "exp1"
    created: float = NOON
    tags: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    objects: dict[str, int] = field(default_factory=dict)


def series(*steps, **common):
    return [Snap(id=f"s{seq:03}", step=step, seq=seq, **common) for seq, step in enumerate(steps, start=1)]


def timed(*created):
    return [Snap(id=f"s{seq:03}", step=seq, seq=seq, created=time) for seq, time in enumerate(created, start=1)]


def measured(*losses):
    """Return one snapshot for each loss; None stands for a snapshot without the metric."""
    return [
        Snap(id=f"s{seq:03}", step=seq, seq=seq, metrics={} if loss is None else {"loss": loss})
        for seq, loss in enumerate(losses, start=1)
    ]


def utc(*when):
    return dt.datetime(*when, tzinfo=dt.UTC).timestamp()


def applied(policies, snapshots, **options):
    return apply(policies, snapshots, needs=lambda: {s.id: s.objects for s in snapshots}, **options)


def reasons(policies, snapshots, **options):
    """Return the reasons of each snapshot, by its step; in every answer one snapshot has the reason `newest`."""
    return {decision.snapshot.step: decision.reasons for decision in applied(policies, snapshots, **options)}


def kept(policies, snapshots, **options):
    return {decision.snapshot.id for decision in applied(policies, snapshots, **options) if decision.reasons}


# --- each policy ------------------------------------------------------------------------------------------------------


def test_last():
    assert reasons([KeepLast(2)], series(10, 20, 30)) == {10: (), 20: ("last 2",), 30: ("last 2", "newest")}


def test_last_goes_by_seq_not_by_step_or_clock():
    rewound = [
        Snap("a", step=100, seq=1, created=NOON + 9),
        Snap("b", step=50, seq=2, created=NOON),
        Snap("c", step=60, seq=3, created=NOON - 9),
    ]
    assert reasons([KeepLast(2)], rewound) == {100: (), 50: ("last 2",), 60: ("last 2", "newest")}


def test_every():
    found = reasons([KeepEvery(steps=1000)], series(0, 500, 1000, 1500))
    assert found == {0: ("every 1000 steps",), 500: (), 1000: ("every 1000 steps",), 1500: ("newest",)}


def test_steps():
    assert reasons([KeepSteps([20, 99])], series(10, 20, 30)) == {10: (), 20: ("step 20",), 30: ("newest",)}
    assert KeepSteps(step for step in (3, 1, 3)) == KeepSteps([1, 3])


def test_best_ranks():
    found = reasons([KeepBest("loss", n=2)], measured(3.0, 1.0, 2.0, 4.0))
    assert found == {1: (), 2: ("best loss (#1)",), 3: ("best loss (#2)",), 4: ("newest",)}


def test_best_by_max():
    assert kept([KeepBest("loss", mode="max")], measured(3.0, 4.0, 2.0)) == {"s002", "s003"}


def test_best_is_never_nan_or_missing():
    found = reasons([KeepBest("loss", n=9)], measured(math.nan, 5.0, None, math.inf, math.nan))
    assert found == {1: (), 2: ("best loss (#1)",), 3: (), 4: ("best loss (#2)",), 5: ("newest",)}


def test_the_newer_of_equal_metrics_is_better():
    ranked = KeepBest("loss").ranked(measured(2.0, 1.0, 1.0, None))
    assert [snapshot.id for snapshot in ranked] == ["s003", "s002", "s001"]
    assert kept([KeepBest("loss", mode="max")], measured(1.0, 1.0, 0.0)) == {"s002", "s003"}


def test_within_measures_back_from_the_newest():
    snapshots = timed(NOON - 2 * DAY_S - 1, NOON - 2 * DAY_S, NOON - 5, NOON)
    found = reasons([KeepWithin("2d")], snapshots)
    assert found == {1: (), 2: ("within 2d",), 3: ("within 2d",), 4: ("within 2d", "newest")}


def test_within_keeps_what_a_wrong_clock_dated_after_the_newest():
    assert kept([KeepWithin("1h")], timed(NOON + 30 * DAY_S, NOON - 2 * HOUR_S, NOON)) == {"s001", "s003"}


@pytest.mark.parametrize(
    ("policy", "created", "expected"),
    [
        (
            KeepHourly(2),
            [utc(2026, 11, 21, 9, 59), utc(2026, 11, 21, 11, 0), utc(2026, 11, 21, 11, 59), utc(2026, 11, 21, 12)],
            [(), (), ("hourly 2026-11-21 11:00",), ("hourly 2026-11-21 12:00", "newest")],
        ),
        (
            KeepDaily(2),  # days without snapshots do not count
            [utc(2026, 11, 1), utc(2026, 11, 19, 0), utc(2026, 11, 19, 23, 59, 59), utc(2026, 11, 21)],
            [(), (), ("daily 2026-11-19",), ("daily 2026-11-21", "newest")],
        ),
        (
            KeepWeekly(3),  # ISO: 2027-01-03 is a Sunday of 2026-W53, 2027-01-04 the Monday of 2027-W01
            [utc(2026, 12, 27), utc(2026, 12, 28), utc(2027, 1, 3), utc(2027, 1, 4)],
            [("weekly 2026-W52",), (), ("weekly 2026-W53",), ("weekly 2027-W01", "newest")],
        ),
        (
            KeepMonthly(2),
            [utc(2026, 9, 30), utc(2026, 10, 1), utc(2026, 10, 31), utc(2026, 11, 1)],
            [(), (), ("monthly 2026-10",), ("monthly 2026-11", "newest")],
        ),
        (
            KeepYearly(2),
            [utc(2024, 1, 1), utc(2025, 1, 1), utc(2025, 12, 31, 23, 59, 59), utc(2026, 1, 1)],
            [(), (), ("yearly 2025",), ("yearly 2026", "newest")],
        ),
    ],
)
def test_periods(policy, created, expected):
    assert [decision.reasons for decision in apply([policy], timed(*created))] == expected


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("kind", [KeepLast, KeepHourly, KeepDaily, KeepWeekly, KeepMonthly, KeepYearly])
def test_as_many_periods_stay_as_the_policy_says(kind, n):
    created = [utc(2020 + i, 1, 15) for i in range(8)]  # each in a period of its own
    assert kept([kind(n)], timed(*created)) == {f"s{i:03}" for i in range(9 - n, 9)}


def test_a_clock_once_wrong_does_not_hold_the_latest_period():
    snapshots = timed(utc(2099, 1, 1), NOON - 2 * DAY_S, NOON - DAY_S, NOON)
    assert kept([KeepDaily(2)], snapshots) == {"s003", "s004"}


@pytest.mark.parametrize("created", [math.nan, math.inf, -math.inf, 1e300, -1e300, 253402300800.0])
def test_a_clock_far_off_stops_nothing(created):
    assert kept([KeepHourly(1), KeepWeekly(9), KeepYearly(9), KeepWithin("1d")], timed(created, NOON)) >= {"s002"}


# --- what always stays, and what never does ---------------------------------------------------------------------------


def test_only_the_newest_save_of_a_step_counts():
    snapshots = series(10, 20, 10)
    assert [d.reasons for d in apply([KeepLast(9), KeepEvery(steps=10), KeepSteps([10])], snapshots)] == [
        (),
        ("last 9", "every 10 steps"),
        ("last 9", "every 10 steps", "step 10", "newest"),
    ]


def test_a_tag_keeps_a_superseded_save():
    snapshots = [Snap("a", 10, 1, tags=("paper", "v1")), Snap("b", 10, 2), Snap("c", 20, 3)]
    assert [d.reasons for d in apply([KeepLast(1)], snapshots)] == [("tag paper", "tag v1"), (), ("last 1", "newest")]


def test_the_higher_id_is_newer_when_racing_writers_took_one_seq():
    snapshots = [Snap("b", 10, 1), Snap("a", 10, 1)]
    assert kept([KeepLast(1)], snapshots) == {"b"}


def test_reasons_add_up_once_each_in_the_order_of_the_policies():
    snapshots = [Snap("a", 1000, 1, tags=("paper",), metrics={"loss": 1.0})]
    policies = [KeepEvery(steps=1000), KeepLast(3), KeepLast(3), KeepBest("loss"), KeepDaily(1), KeepWithin("7d")]
    assert apply(policies, snapshots) == [
        Decision(
            snapshots[0],
            (
                "every 1000 steps",
                "last 3",
                "best loss (#1)",
                "daily 2026-11-21",
                "within 7d",
                "tag paper",
                "newest",
            ),
        )
    ]


def test_no_policy_is_an_error_unless_forced():
    with pytest.raises(InvalidInputError, match="no policy"):
        apply([], series(1, 2))
    with pytest.raises(InvalidInputError, match="no policy"):
        apply([], [])
    assert reasons([], series(1, 2), force=True) == {1: (), 2: ("newest",)}


def test_policies_that_keep_nothing_are_an_error_unless_forced():
    snapshots = [Snap("a", 1, 1), Snap("b", 2, 2, tags=("paper",)), Snap("c", 3, 3)]
    policies = [KeepEvery(steps=1000), KeepBest("accuracy")]
    with pytest.raises(
        InvalidInputError, match=r"KeepEvery\(steps=1000\), .* none of the steps of run exp1, which has 3 steps"
    ):
        apply(policies, snapshots)
    assert reasons(policies, snapshots, force=True) == {1: (), 2: ("tag paper",), 3: ("newest",)}


def test_no_snapshots_no_decisions():
    assert apply([KeepEvery(steps=1000), KeepWithin("1d"), KeepBest("loss"), KeepDaily(1)], []) == []


def test_several_runs_are_an_error():
    with pytest.raises(InvalidInputError, match="one run, got exp1, exp2"):
        apply([KeepLast(1)], [Snap("a", 1, 1), Snap("b", 1, 1, run="exp2")])


# --- bad arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeepLast, KeepEvery, KeepHourly, KeepDaily, KeepWeekly, KeepMonthly, KeepYearly])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None, math.nan, 2**53 + 1, 10**30])
def test_counts_are_integers_of_at_least_one(kind, value):
    with pytest.raises(
        InvalidInputError, match=rf"{kind.__name__}: expected \w+ to be an integer from 1 to 2\^53, got"
    ):
        kind(value)


@pytest.mark.parametrize("steps", [[], [-1], [1.5], [True], ["1"], "12", b"12", 3, None, [2**70]])
def test_bad_steps(steps):
    with pytest.raises(InvalidInputError, match="KeepSteps: expected"):
        KeepSteps(steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": ""}, "name of a metric"),
        ({"metric": 3}, "name of a metric"),
        ({"metric": "\ud800"}, "name of a metric"),
        ({"metric": "m" * 5000}, "name of a metric"),
        ({"metric": "loss", "n": 0}, "n to be an integer from 1"),
        ({"metric": "loss", "mode": "least"}, "'min' or 'max', got 'least'"),
        ({"metric": "loss", "mode": None}, "'min' or 'max', got None"),
    ],
)
def test_bad_best(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        KeepBest(**arguments)


@pytest.mark.parametrize(
    "duration",
    [
        *["", "7", "d", "7x", "7 d", "-1d", "1h1d", "1d1d", "0s", "0d0h", "1.5h", "٣d", "9" * 5000 + "d", "999999999w"],
        *[0, -1, math.nan, math.inf, -math.inf, 1e300, 1e-9, True, None, [1]],
        *[dt.timedelta(0), dt.timedelta(days=-1)],
    ],
)
def test_bad_durations(duration):
    with pytest.raises(InvalidInputError, match="KeepWithin: expected a duration > 0"):
        KeepWithin(duration)


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        ("2h", "2h"),
        ("7d", "7d"),
        ("1d12h", "1d12h"),
        ("36h", "1d12h"),
        ("1w", "7d"),
        ("1w1d1h1m1s", "8d1h1m1s"),
        ("90s", "1m30s"),
        ("0.5s", "0.5s"),
        ("010s", "10s"),
        (3600, "1h"),
        (0.25, "0.25s"),
        (90.000001, "1m30.000001s"),
        (dt.timedelta(days=1, hours=2), "1d2h"),
        (dt.timedelta.max, "999999999d23h59m59.999999s"),
    ],
)
def test_durations_have_one_text(duration, text):
    assert KeepWithin(duration).duration == text
    assert KeepWithin(duration) == KeepWithin(text)


@given(st.timedeltas(min_value=dt.timedelta(microseconds=1)))
def test_every_duration_survives_its_text(duration):
    policy = KeepWithin(duration)
    assert KeepWithin(policy.duration) == policy


def test_bytes():
    """Objects that a tag, a policy or a newer snapshot keeps cost nothing; counting ends where one does not fit."""
    snapshots = [
        Snap("a", 1, 1, objects={"a": 1}),
        Snap("b", 2, 2, objects={"base": 50, "b": 10}, tags=("paper",)),
        Snap("c", 3, 3, objects={"c": 90}),
        Snap("d", 4, 4, objects={"base": 50, "d": 40}),
        Snap("e", 5, 5, objects={"base": 50, "d": 40, "e": 60}),
    ]
    assert reasons([KeepBytes(100)], snapshots) == {
        **{1: (), 2: ("tag paper",), 3: ()},
        **{4: ("newest 100",), 5: ("newest 100", "newest")},
    }
    assert kept([KeepBytes(99)], snapshots) == {"b", "e"}  # never below one
    assert kept([KeepBytes(190)], snapshots) == {"b", "c", "d", "e"}
    assert kept([KeepBytes(100), KeepSteps([3])], snapshots) == {"b", "c", "d", "e"}
    assert kept([KeepBytes(101), KeepSteps([3])], snapshots) == {"a", "b", "c", "d", "e"}
    assert kept([KeepBytes(50), KeepBytes(190)], snapshots) == {"b", "c", "d", "e"}  # the larger counts
    with pytest.raises(InvalidInputError, match="expected what each snapshot needs"):
        apply([KeepBytes(1)], snapshots)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ("2T", "2T"),
        ("500GB", "500G"),
        ("1.5tib", "1536G"),
        ("1024K", "1M"),
        (1000, "1000"),
        (np.int64(4096), "4K"),
        (2**53 - 1, "9007199254740991"),
        (10**15 + 1, "1000000000000001"),
    ],
)
def test_sizes_have_one_text(size, text):
    assert repr(KeepBytes(size)) == f"KeepBytes('{text}')"
    assert KeepBytes(size) == KeepBytes(text)


@given(st.integers(1, 2**53))
def test_every_size_survives_its_text(size):
    assert KeepBytes(size_text(size)).size == size


@pytest.mark.parametrize(
    "size", ["", "x", "0", "-1", "2 T", "1.5", "2E", "9P", "9" * 5000, 0, -1, 2.5, True, None, [1]]
)
def test_bad_sizes(size):
    with pytest.raises(InvalidInputError, match="KeepBytes: expected a size from 1 to 8P"):
        KeepBytes(size)


class KeepLastOfMine(KeepLast):
    """A policy of a program; its kind is not part of the format."""


@pytest.mark.parametrize(
    "policies",
    [None, 3, "KeepLast(3)", [KeepLast], [3], [KeepLast(3), None], KeepLastOfMine(3), [KeepLastOfMine(3)]],
)
def test_values_that_are_no_policy(policies):
    with pytest.raises(InvalidInputError, match="keep: expected"):
        apply(policies, series(1))


def test_one_policy_is_a_list_of_one():
    snapshots = series(5)
    assert apply(KeepLast(3), snapshots) == apply([KeepLast(3)], snapshots)


# --- decisions at a save, stored forms, printed forms -----------------------------------------------------------------


def test_stays_without_neighbours():
    policies = [KeepLast(3), KeepBest("loss"), KeepDaily(7), KeepWithin("7d"), KeepEvery(steps=1000), KeepSteps([7])]
    steps = (0, 7, 8, 999, 1000, 3000)
    assert [step for step in steps if stays_without_neighbours(policies, step, 1)] == [0, 7, 1000, 3000]
    assert [step for step in steps if stays_without_neighbours(policies, step, 333)] == [0, 7, 1000, 3000]
    assert [step for step in steps if stays_without_neighbours(policies, step, 500)] == [7]  # every second save stays
    assert not stays_without_neighbours([], 1000, 1)
    assert stays_without_neighbours([KeepEvery(3)], 6, 1)


ALL = [
    (KeepLast(3), {"kind": "KeepLast", "n": 3}, "KeepLast(3)"),
    (KeepEvery(steps=1000), {"kind": "KeepEvery", "steps": 1000}, "KeepEvery(steps=1000)"),
    (KeepSteps([5, 1]), {"kind": "KeepSteps", "steps": [1, 5]}, "KeepSteps([1, 5])"),
    (
        KeepBest("loss", n=2, mode="max"),
        {"kind": "KeepBest", "metric": "loss", "n": 2, "mode": "max"},
        "KeepBest('loss', n=2, mode='max')",
    ),
    (KeepWithin("36h"), {"kind": "KeepWithin", "duration": "1d12h"}, "KeepWithin('1d12h')"),
    (KeepHourly(24), {"kind": "KeepHourly", "n": 24}, "KeepHourly(24)"),
    (KeepDaily(7), {"kind": "KeepDaily", "n": 7}, "KeepDaily(7)"),
    (KeepWeekly(4), {"kind": "KeepWeekly", "n": 4}, "KeepWeekly(4)"),
    (KeepMonthly(12), {"kind": "KeepMonthly", "n": 12}, "KeepMonthly(12)"),
    (KeepYearly(9), {"kind": "KeepYearly", "n": 9}, "KeepYearly(9)"),
    (KeepBytes("1.5TiB"), {"kind": "KeepBytes", "size": 3 << 39}, "KeepBytes('1536G')"),
]


@pytest.mark.parametrize(("policy", "plain", "text"), ALL)
def test_a_policy_has_a_stored_form_and_a_name(policy, plain, text):
    assert to_dict(policy) == plain
    assert from_dict(plain) == policy
    assert hash(from_dict(plain)) == hash(policy)
    assert describe([policy]) == text
    assert eval(text) == policy  # a user can type the printed form


def test_describe():
    assert describe([KeepLast(3), KeepEvery(steps=1000)]) == "KeepLast(3), KeepEvery(steps=1000)"
    assert describe([]) == "no policy"


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"kind": "KeepForever"},
        {"kind": 3, "n": 3},
        {"kind": ["KeepLast"], "n": 3},
        {"kind": "KeepLast"},
        {"kind": "KeepLast", "n": 0},
        {"kind": "KeepLast", "n": 3, "x": 1},
        {"kind": "KeepLast", 3: 3},
        {"kind": "KeepSteps", "steps": None},
        {"kind": "KeepWithin", "duration": "soon"},
        {"kind": "KeepBytes", "size": "much"},
        {"kind": "KeepBytes", "size": 0},
        {"kind": "KeepBest", "metric": "loss", "n": 1, "mode": []},
        None,
        ["KeepLast", 3],
    ],
)
def test_a_stored_policy_of_another_form(stored):
    with pytest.raises(FormatError, match="retention policy"):
        from_dict(stored)


# --- properties -------------------------------------------------------------------------------------------------------

counts = st.integers(1, 8)
policies = st.one_of(
    st.builds(KeepLast, counts),
    st.builds(KeepEvery, steps=counts),
    st.builds(KeepSteps, st.lists(st.integers(0, 12), min_size=1, max_size=4)),
    st.builds(KeepBest, st.sampled_from(["loss", "accuracy"]), n=counts, mode=st.sampled_from(["min", "max"])),
    st.builds(KeepWithin, st.integers(1, 60 * DAY_S)),
    st.builds(KeepBytes, st.integers(1, 60)),
    st.sampled_from([KeepHourly, KeepDaily, KeepWeekly, KeepMonthly, KeepYearly]).flatmap(
        lambda kind: st.builds(kind, counts)
    ),
)
times = st.floats(NOON - 800 * DAY_S, NOON + 800 * DAY_S)
metrics = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats() | st.sampled_from([0.0, 1.0]))
objects = st.dictionaries(st.integers(0, 9), st.just(5)) | st.dictionaries(st.integers(10, 30), st.just(9))
tags = st.lists(st.sampled_from(["paper", "v1"]), max_size=2, unique=True).map(tuple)


@st.composite
def runs(draw):
    """Return a run in which steps are saved again and clocks jump."""
    count = draw(st.integers(0, 12))
    varying = {"created": times, "tags": tags, "metrics": metrics, "objects": objects}
    return [
        Snap(f"s{seq:03}", draw(st.integers(0, 12)), seq, **{name: draw(of) for name, of in varying.items()})
        for seq in range(1, count + 1)
    ]


@given(st.lists(policies), runs())
def test_the_newest_and_the_tagged_always_stay(policies, snapshots):
    decisions = applied(policies, snapshots, force=True)
    assert [decision.snapshot for decision in decisions] == snapshots
    for decision in decisions:
        for tag in decision.snapshot.tags:
            assert f"tag {tag}" in decision.reasons
        assert ("newest" in decision.reasons) == (decision.snapshot is snapshots[-1])


@given(st.lists(policies), runs())
def test_superseded_and_untagged_never_stays(policies, snapshots):
    current = {snapshot.step: snapshot.id for snapshot in snapshots}
    for decision in applied(policies, snapshots, force=True):
        if current[decision.snapshot.step] != decision.snapshot.id:
            assert decision.reasons == tuple(f"tag {tag}" for tag in decision.snapshot.tags)


@given(st.lists(policies), st.lists(policies), runs())
def test_policies_are_ored(some, others, snapshots):
    both = kept(some + others, snapshots, force=True)
    either = kept(some, snapshots, force=True) | kept(others, snapshots, force=True)
    if any(isinstance(policy, KeepBytes) for policy in some + others):
        assert either <= both  # what another policy keeps costs nothing, so more fits
    else:
        assert either == both


@given(st.lists(policies), runs(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(policies, snapshots, shuffler: random.Random):
    shuffled = list(snapshots)
    shuffler.shuffle(shuffled)
    assert applied(policies, shuffled, force=True) == applied(policies, snapshots, force=True)


@given(counts, runs())
def test_last_keeps_as_many_steps_as_it_says(n, snapshots):
    untagged = [replace(snapshot, tags=()) for snapshot in snapshots]
    assert len(kept([KeepLast(n)], untagged)) == min(n, len({snapshot.step for snapshot in snapshots}))


@given(
    st.sampled_from(
        [
            *[KeepLast, KeepHourly, KeepDaily, KeepWeekly, KeepMonthly, KeepYearly, KeepWithin, KeepBytes],
            *[lambda n: KeepBest("loss", n), lambda n: KeepBest("loss", n, "max"), lambda n: KeepSteps(range(n))],
        ]
    ),
    counts,
    counts,
    runs(),
)
def test_more_keeps_more(kind, n, more, snapshots):
    assert kept([kind(n)], snapshots, force=True) <= kept([kind(n + more)], snapshots, force=True)


@given(st.lists(policies), st.integers(1, 90), runs())
def test_bytes_by_a_count_of_sets(others, size, snapshots):
    """Compare with another way to count: the most newest steps that fit, at least one; what stays anyway is free."""
    others = [policy for policy in others if not isinstance(policy, KeepBytes)]
    stay = kept(others, snapshots, force=True) - {s.id for s in snapshots[-1:] if not s.tags}
    stay |= {d.snapshot.id for d in applied(others, snapshots, force=True) if set(d.reasons) - {"newest"}}
    free = {key for s in snapshots if s.id in stay for key in s.objects}
    newest_first = sorted({s.step: s for s in snapshots}.values(), key=lambda s: -s.seq)

    def fits(count):
        return sum({k: n for s in newest_first[:count] for k, n in s.objects.items() if k not in free}.values()) <= size

    most = max([count for count in range(len(newest_first) + 1) if fits(count)] + [1])
    expected = {s.id for s in newest_first[:most]}
    found = applied([*others, KeepBytes(size)], snapshots, force=True)
    assert {d.snapshot.id for d in found if f"newest {size}" in d.reasons} == expected
    assert {d.snapshot.id for d in found if d.reasons} == expected | stay


@given(st.lists(policies), runs())
def test_forgetting_again_forgets_nothing(policies, snapshots):
    # Without tags: a tag may keep a superseded save when the newer save of its step is forgotten. Then the superseded
    # save is current, and a policy may prefer it to another snapshot.
    untagged = [replace(snapshot, tags=()) for snapshot in snapshots]
    left = [decision.snapshot for decision in applied(policies, untagged, force=True) if decision.reasons]
    assert kept(policies, left, force=True) == {snapshot.id for snapshot in left}


@given(st.lists(policies), runs())
def test_snapshots_kept_for_long_stay(policies, snapshots):
    current = {snapshot.step: snapshot.id for snapshot in snapshots}
    stays = kept(policies, snapshots, force=True)
    assert {id_ for step, id_ in current.items() if stays_without_neighbours(policies, step, 1)} <= stays


@given(policies)
def test_every_policy_survives_storage(policy):
    assert from_dict(to_dict(policy)) == policy


class Word(str, enum.Enum):  # noqa: UP042 - its text is not its value
    LOSS = "loss"
    MAX = "max"


@pytest.mark.parametrize(("loss", "largest"), [(Word.LOSS, Word.MAX), (np.str_("loss"), np.str_("max"))])
def test_texts_of_other_types(loss, largest):
    policy = KeepBest(loss, 2, largest)
    assert records.encode(RunPolicies(run="r", revision=0, policies=[to_dict(policy)]))
    assert (type(policy.metric), policy) == (str, KeepBest("loss", 2, "max"))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_integers_of_other_libraries(number):
    for policy in (
        KeepLast(number),
        KeepEvery(number),
        KeepBest("loss", number),
        KeepSteps([number]),
        KeepDaily(number),
    ):
        assert from_dict(to_dict(policy)) == policy
        assert policy in {KeepLast(3), KeepEvery(3), KeepBest("loss", 3), KeepSteps([3]), KeepDaily(3)}
    assert KeepSteps(np.arange(0, 300, 100)).steps == (0, 100, 200)
    assert KeepWithin(number) == KeepWithin(np.float32(3)) == KeepWithin("3s")
    for wrong in (np.float64(3), np.bool_(True), torch.tensor(3.0), 3.0):
        with pytest.raises(InvalidInputError, match="expected"):
            KeepLast(wrong)
