"""`blame` names the step and the tensor of a fault that is injected into a real training, and nothing without one."""

import pytest

from kit.blamed import FAULTS, MODELS, train

pytestmark = pytest.mark.no_cover
CASES = [(fault, model, seed) for fault in FAULTS if fault != "zero gradient" for model in MODELS for seed in range(2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fault", "model", "seed"), CASES)
def test_a_fault_is_named(fault, model, seed):
    trained = train(fault, model, seed)
    with trained.repository as repository:
        first = repository.blame("r").found[0]
    assert (first.step, first.path, first.what) == (trained.step, trained.tensor, trained.what)
