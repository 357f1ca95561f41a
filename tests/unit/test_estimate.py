"""Estimates follow from the run and the rates, and `codec="auto"` chooses a codec by the same rates."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from kit.forge import little_memory
from kit.repositories import same
from snapstore import InvalidInputError, Repository, SaveOptions
from snapstore.cli import commands
from snapstore.engine import registry
from snapstore.engine.rates import OBJECT_BYTES, OBJECTS, Rates, codec_for, measure
from snapstore.inspect.estimate import BITS, FAILURE_GPU_HOURS, LEAST, MOST, Run, bits_at, daly, estimate
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "planning.md"
RATES = Rates(write=1e9, read=2e9, encode=4e9, decode=8e9, copy=16e9)
RUN = Run(parameters=1e9, dtype="float32", step_s=1.0, failure_s=86400.0)


def test_bytes_of_a_state():
    assert estimate(RUN, RATES).state_bytes == 12e9
    assert estimate(replace(RUN, dtype="bfloat16"), RATES).state_bytes == 14e9
    assert estimate(replace(RUN, dtype="bfloat16", optimizer="none"), RATES).state_bytes == 6e9
    found = estimate(replace(RUN, interval_steps=10), RATES)
    assert found.first_bytes == pytest.approx(1e9 / 8 * (26.5 + 26.7 + 25.8))
    assert found.next_bytes == pytest.approx(1e9 / 8 * (20.7 + 25.4 + 22.4))
    assert found.kept_bytes == pytest.approx(found.first_bytes + 2 * found.next_bytes)


@pytest.mark.parametrize("kind", BITS)
def test_bits_between_the_measured_gaps(kind):
    bits = [bits_at(kind, steps) for steps in (0, 1, 3, 10, 30, 50, 200, 10**6)]
    assert bits == sorted(bits)
    assert bits[0] == bits[1] == BITS[kind][0]
    assert bits[-1] <= BITS[kind][-1]


def test_the_interval_that_loses_least():
    """By Daly's own model, his interval loses at most 0.1 % more time than the best interval."""
    for cost, failure in ((1.0, 3600.0), (60.0, 86400.0), (300.0, 7200.0)):

        def loss(interval, cost=cost, failure=failure):
            return failure * math.exp(0) * (math.exp((interval + cost) / failure) - 1) / interval

        best = daly(cost, failure)
        assert loss(best) <= min(loss(best * factor) for factor in np.linspace(0.5, 2, 200)) * 1.001
        assert best == pytest.approx(math.sqrt(2 * cost * failure), rel=0.2)
    assert daly(100.0, 10.0) == 10.0
    assert daly(0.0, 3600.0) == 0.0


def test_an_interval_is_no_shorter_than_a_save():
    found = estimate(RUN, replace(RATES, copy=1e15))
    assert found.save_s > 5
    assert found.best_interval_s >= found.save_s
    assert found.interval_steps * RUN.step_s >= found.save_s


def test_losses_and_money():
    rare, often = (estimate(replace(RUN, interval_steps=steps), RATES) for steps in (20000, 10))
    best = estimate(RUN, RATES)
    assert best.lost_share < min(rare.lost_share, often.lost_share)
    assert estimate(replace(RUN, failure_s=0.0, ranks=8), RATES).failure_s == FAILURE_GPU_HOURS * 3600 / 8
    assert best.storage_usd == pytest.approx(12 * 0.023 * best.kept_bytes / 1e9)
    assert estimate(RUN, RATES, storage_price=0.0, put_price=1.0).puts_usd == pytest.approx(best.year_puts / 1000)
    eight = estimate(replace(RUN, ranks=8), RATES)
    assert eight.stall_s == pytest.approx(best.stall_s / 8)


def test_codecs():
    assert codec_for(2.0, 1.0) == "raw"
    assert codec_for(1.0, 2.0) == "portable"
    fast = replace(RATES, write=1e10)
    assert estimate(RUN, fast).auto_codec == "raw"
    auto, portable = (estimate(replace(RUN, codec=codec, interval_steps=100), fast) for codec in ("auto", "portable"))
    assert auto.next_bytes == auto.state_bytes > portable.next_bytes
    assert auto.save_s < portable.save_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int8"}, {"optimizer": "x"}, {"parameters": 0}, {"keep": -1}, {"ranks": math.inf},
        {"parameters": 1e308}, {"parameters": 10**400}, {"ranks": math.nan}, {"step_s": 1e-300}, {"failure_s": 1e308},
    ],
    ids=str,
)  # fmt: skip
def test_runs_that_make_no_sense(wrong):
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        replace(RUN, **wrong)


@pytest.mark.parametrize("rate", [0, -1, math.nan, 1e-300])
@pytest.mark.parametrize("name", ["write", "read", "encode", "decode", "copy"])
def test_rates_that_make_no_sense(name, rate):
    with pytest.raises(InvalidInputError, match=name):
        estimate(RUN, replace(RATES, **{name: rate}))


def test_the_extremes_give_numbers():
    sizes = dict.fromkeys(("parameters", "interval_steps", "failure_s", "restart_s", "keep"), 1e24)
    for run in (replace(RUN, **sizes, ranks=1, step_s=LEAST), replace(RUN, parameters=LEAST, ranks=MOST, step_s=MOST)):
        for speed in (LEAST, math.inf):
            found = asdict(estimate(run, Rates(**dict.fromkeys(asdict(RATES), speed))))
            assert all(isinstance(value, str) or math.isfinite(value) for value in found.values()), found


@pytest.mark.parametrize("wrong", [{"put_price": -1.0}, {"storage_price": math.nan}])
def test_prices_that_make_no_sense(wrong):
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        estimate(RUN, RATES, **wrong)


def test_rates_of_this_machine():
    store = MemoryStore()
    found = measure(store)
    assert all(0 < rate < math.inf for rate in (found.write, found.read, found.encode, found.decode, found.copy))
    assert list(store.list("")) == []
    assert registry.measure is measure


def test_a_measurement_takes_little_memory(tmp_path):
    store = LocalStore(tmp_path)
    with little_memory(2 * OBJECTS * OBJECT_BYTES):
        measure(store, threads=2)


@pytest.mark.parametrize("is_fast", [True, False])
def test_auto_stores_what_the_rates_call_for(is_fast, monkeypatch):
    """If the store is faster than the encoder, `codec="auto"` stores chunks uncompressed, but still sparse deltas.

    Recode and compact can read and rewrite such chunks.
    """
    calls = []
    rates = replace(RATES, write=8e9) if is_fast else RATES
    monkeypatch.setattr(registry, "measure", lambda *_: calls.append(1) or rates)
    weights = np.random.default_rng(0).normal(0, 0.02, 1 << 16).astype(np.float32)
    states = [{"w": weights.copy()}]
    states += [{"w": weights + np.float32(1e-4)}]
    states += [{"w": states[1]["w"].copy()}]
    states[2]["w"][::200] = 1
    options = SaveOptions(codec="auto", threads=1)
    with Repository.create(MemoryStore(), chunk_bytes=1 << 16, options=options) as repository:
        saved = [repository.save(state, run="a", step=step) for step, state in enumerate(states)]
        assert len(calls) == 1
        assert (saved[0].stored_bytes > weights.nbytes) == is_fast
        assert (saved[1].stored_bytes > weights.nbytes) == is_fast
        assert saved[2].stored_bytes < weights.nbytes / 20
        for compacted in (False, True):
            assert all(same(repository.restore(f"a@{step}"), state) for step, state in enumerate(states))
            assert repository.check("restore").ok
            if not compacted:
                assert repository.recode().failed == repository.compact().failed == []


def test_a_store_that_cannot_be_measured_is_no_error(caplog, monkeypatch):
    from snapstore import StorageError

    def fail(*_):
        raise StorageError("no sandbox")

    monkeypatch.setattr(registry, "measure", fail)
    with Repository.create(MemoryStore(), options=SaveOptions(codec="auto", threads=1)) as repository:
        repository.save({"w": np.zeros(5000)}, run="a", step=0)
    assert "cannot be measured" in caplog.text


def test_the_verb(capsys):
    given = [f"--rate={name}=1G" for name in ("write", "read", "encode", "decode", "copy")]
    commands(["estimate", "--params", "7B", "--ranks", "8", "--json", *given], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"]["state_bytes"] == 98e9
    assert found["rates"]["write"] == 2**30
    commands(["estimate", "--params", "7B", *given], standalone_mode=False)
    assert "best interval" in capsys.readouterr().out
    for huge in (["--params", "1e308"], ["--params", "7B", "--keep", "9" * 400]):
        assert commands(["estimate", *huge, *given], standalone_mode=False) == 1
        assert "expected a number from" in capsys.readouterr().err


def test_the_guide_shows_what_the_command_prints(capsys):
    """With all rates given, the output is the same on every machine."""
    blocks = re.findall(
        r"```console\n\$ snapstore (estimate [^\n]*--rate[^\n]*)\n(.*?)```", GUIDE.read_text(), re.DOTALL
    )
    assert len(blocks) == 1
    for command, printed in blocks:
        commands(shlex.split(command), standalone_mode=False)
        assert capsys.readouterr().out == printed
