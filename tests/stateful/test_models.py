"""The protocol's rules are sufficient and necessary in its models."""

import sys
from pathlib import Path

import pytest

from kit.samples import THOROUGH
from kit.tally import tally

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import holders
import quarantine
import ranks
import shared_manifests
import wrong_answers
from rewriting import RULES, explore


@pytest.mark.parametrize("saver", [False, pytest.param(True, marks=pytest.mark.skipif(not THOROUGH, reason="long"))])
def test_the_rules_hold(saver):
    broken, states = explore(rounds=2 if THOROUGH and not saver else 1, saver=saver)
    tally("model states", states)
    assert broken is None
    assert states > (300_000 if THOROUGH else 100_000)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", RULES)
def test_no_rule_can_be_spared(rule):
    broken, _ = explore(frozenset([rule]))
    assert broken is not None


LEAST = {quarantine: 400, wrong_answers: 40_000, ranks: 70_000, holders: 60_000, shared_manifests: 100_000}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "least"), LEAST.items())
def test_the_rules_of_a_model_hold(model, least):
    broken, states = model.explore()
    tally("model states", states)
    assert broken is None
    assert states > least


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("model", "rule"), [(model, rule) for model in LEAST for rule in model.RULES])
def test_no_rule_of_a_model_can_be_spared(model, rule):
    broken, _ = model.explore(frozenset([rule]))
    assert broken is not None
