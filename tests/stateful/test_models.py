"""The protocol's rules are sufficient and necessary in its models: rewriting, quarantine and wrong answers."""

import os
import sys
from pathlib import Path

import pytest

from kit.tally import tally

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import quarantine
import wrong_answers
from rewriting import RULES, explore

THOROUGH = "SNAPSTORE_TEST_THOROUGH" in os.environ


@pytest.mark.parametrize("saver", [False, pytest.param(True, marks=pytest.mark.skipif(not THOROUGH, reason="long"))])
def test_the_rules_hold(saver):
    broken, states = explore(rounds=1 if saver else 2, saver=saver)
    tally("model states", states)
    assert broken is None
    assert states > 300_000


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_can_be_spared(rule):
    broken, _ = explore(frozenset([rule]))
    assert broken is not None


def test_the_rules_of_quarantine_hold():
    broken, states = quarantine.explore()
    tally("model states", states)
    assert broken is None
    assert states > 400


@pytest.mark.parametrize("rule", quarantine.RULES)
def test_no_rule_of_quarantine_can_be_spared(rule):
    broken, _ = quarantine.explore(frozenset([rule]))
    assert broken is not None


def test_the_rules_about_wrong_answers_hold():
    broken, states = wrong_answers.explore()
    tally("model states", states)
    assert broken is None
    assert states > 40_000


@pytest.mark.parametrize("rule", wrong_answers.RULES)
def test_no_rule_about_wrong_answers_can_be_spared(rule):
    broken, _ = wrong_answers.explore(frozenset([rule]))
    assert broken is not None
