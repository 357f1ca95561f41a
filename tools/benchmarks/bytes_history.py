"""`tools/bench bytes --history`: how much less a step would take if a coder knew which elements changed before.

Two models are trained on the CPU as for `--codings`, then 40 steps at a rate of 1e-6. The entropy of each of the last
steps is measured given the exponent of the base, as `bytes_runs.entropy_bytes` does; and also given when the element
changed the last time, in which direction, if that was at most `horizon` steps ago. A reader knows that only of the
links that it applies, so the horizon stands for the links since the last skip.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import bytes as codings
from benchmarks import gpu_train
from snapstore.format.chunking import DEFAULT_CHUNK_BYTES

STEPS, LEAD = 40, 20
HORIZONS = (0, 5, 10, 20)
#: The ages of the last change [steps] from which on an element is in the next class.
AGES = (2, 4, 9)
Context = npt.NDArray[np.int64]


def shares(model: str) -> dict[int, float]:
    """Return the mean entropy of a step by horizon, as a share of the plain bytes; 0: given the exponent alone."""
    trainer = codings.trainer_of(model, codings.SIZE, torch.device("cpu"), codings.PRETRAIN_STEPS)
    trainer.train(codings.PRETRAIN_STEPS)
    trainer.train(gpu_train.SETTLE_STEPS, gpu_train.RL_LR)
    before = codings.elements_of(gpu_train.weights_only(trainer.state()), "w")
    ages = [np.full(array.size, STEPS + 1) for array in before]
    rises = [np.zeros(array.size, bool) for array in before]
    totals = dict.fromkeys(HORIZONS, 0.0)
    for step in range(STEPS):
        trainer.train(1, gpu_train.RL_LR)
        after = codings.elements_of(gpu_train.weights_only(trainer.state()), "w")
        for old, new, age, rose in zip(before, after, ages, rises, strict=True):
            if step >= LEAD:
                for horizon in HORIZONS:
                    totals[horizon] += _entropy(old, new, _classes(age, rose, horizon))
            changed = old != new
            age[:] = np.where(changed, 1, age + 1)
            rose[changed] = new[changed].view(np.int16) > old[changed].view(np.int16)
        before = after
    plain = sum(array.nbytes for array in before) * (STEPS - LEAD)
    return {horizon: total / plain for horizon, total in totals.items()}


def _classes(age: Context, rose: npt.NDArray[np.bool_], horizon: int) -> Context:
    """Return the class of each element by its last change: 0 if that is too long ago."""
    found: Context = 1 + 2 * np.digitize(age, AGES) + rose
    return np.where(age <= horizon, found, 0)


def _entropy(old: codings.Elements, new: codings.Elements, classes: Context) -> float:
    """Return the entropy of a difference in bytes, given exponent and class, each chunk by itself."""
    total, size = 0.0, DEFAULT_CHUNK_BYTES // old.itemsize
    for i in range(0, old.size, size):
        base, chunk, own = old[i : i + size], new[i : i + size], classes[i : i + size]
        symbols = np.minimum(codings.zigzag(base, chunk), 63).astype(np.int64)
        keys = codings.exponents(base).astype(np.int64) * 16 + own
        counts = np.bincount(keys * 64 + symbols, minlength=256 * 16 * 64).reshape(-1, 64).astype(float)
        sums = counts.sum(axis=1)
        bits = (sums * np.log2(np.maximum(sums, 1))).sum() - (counts * np.log2(np.maximum(counts, 1))).sum()
        bits += ((counts > 0).sum() - (sums > 0).sum()) / (2 * np.log(2))  # Miller's and Madow's correction
        total += float(bits) / 8
    return total


def report() -> None:
    """Print a table."""
    print(f"| entropy of a step, % of the plain bytes | {' | '.join(codings.MODELS)} |\n|---|---|---|")
    found = {model: shares(model) for model in codings.MODELS}
    for horizon in HORIZONS:
        name = f"and the last change, at most {horizon} steps ago" if horizon else "given the exponent"
        columns = (f"{100 * one[horizon]:.3f} ({one[horizon] / one[0]:.2f})" for one in found.values())
        print(f"| {name} | {' | '.join(columns)} |")
