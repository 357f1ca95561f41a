"""The rules of pages are sufficient and necessary in their model."""

import sys
from pathlib import Path

import pytest

from kit.samples import THOROUGH
from kit.tally import tally

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import pages

#: Fewer than there are in the smallest scene.
LEAST_STATES = 8_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scene", pages.SHORT)
def test_the_rules_hold(scene):
    holds(scene)


@pytest.mark.skipif(not THOROUGH, reason="long")
@pytest.mark.parametrize("scene", pages.LONG)
def test_the_rules_hold_in_long_scenes(scene):
    holds(scene)


def holds(scene):
    broken, states = pages.explore(scene=scene)
    tally("model states", states)
    assert broken is None
    assert states > LEAST_STATES


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rule", pages.RULES)
def test_no_rule_can_be_spared(rule):
    broken, _ = pages.explore(frozenset([rule]))
    assert broken is not None


def test_each_rule_has_a_scene():
    assert pages.RULES.keys() == pages.NEEDED_IN.keys()
    assert set(pages.NEEDED_IN.values()) <= pages.SCENES.keys()
