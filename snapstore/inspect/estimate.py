"""Estimate the cost of the snapshots of a run (bytes, time, money), and the interval that loses the least time.

In: the run (parameters, dtypes, optimizer, ranks, failures) and rates, given or measured on this machine. Out: an
`Estimate`. Pure functions; engine/rates.py measures. docs/guides/planning.md has the sources of all numbers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from ..checks import check_choice
from ..engine.rates import Rates, codec_for
from ..errors import InvalidInputError
from ..format.blobs.pack import DEFAULT_PACK_BYTES, LARGE_PACK_BYTES, MANY_PACKS
from ..text import quoted

YEAR_S = 365.25 * 86400
#: Bounds of the numbers of a run, so that no result overflows.
LEAST, MOST = 1e-9, 1e24
#: Stored bits per element, by the steps between two snapshots (GAPS); the last number is of a full snapshot. Measured
#: on fp32 p, m and v of an HF Llama of 1.0 B parameters with AdamW, and on bf16 weights of a GPT of 269 M while lr
#: decays (at 200 steps: extrapolated).
GAPS = (1, 10, 50, 200)
BITS = {
    "p": (17.5, 20.7, 22.7, 24.3, 26.5),
    "m": (23.4, 25.4, 26.5, 26.7, 26.7),
    "v": (19.3, 22.4, 24.4, 25.8, 25.8),
    "w": (2.0, 4.8, 5.6, 6.3, 10.66),
}
#: Tensors of each parameter, by optimizer.
MOMENTS = {"adamw": ("m", "v"), "momentum": ("m",), "sgd": (), "none": ()}
#: GPU hours between two failures that end a job: 419 in 54 days of 16,384 GPUs (Llama 3, arXiv 2407.21783, table 5).
FAILURE_GPU_HOURS = 54 * 24 * 16384 / 419
#: AWS list prices of S3 Standard in us-east-1, first 50 TB, as published in 2025 [USD per GB and month; USD per
#: thousand requests].
STORAGE_PRICE, PUT_PRICE = 0.023, 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run to be estimated.

    Attributes:
        parameters: number of parameters.
        dtype: of the weights that train: "float32", or "bfloat16" with fp32 masters.
        optimizer: a key of MOMENTS.
        ranks: number of ranks; each writes its share.
        step_s: time of a training step [s].
        interval_steps: steps between two snapshots; 0: the interval that loses the least time.
        failure_s: mean time between failures of the whole job [s]; 0: derived from the number of ranks.
        restart_s: time from a failure to the first step after it, without the restore itself [s].
        keep: number of snapshots that are kept; 0: all of a year.
        codec: "portable", "auto" or "raw".

    Raises:
        InvalidInputError: an argument is out of range.
    """

    parameters: float
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    ranks: int = 1
    step_s: float = 1.0
    interval_steps: int = 0
    failure_s: float = 0.0
    restart_s: float = 300.0
    keep: int = 3
    codec: str = "portable"

    def __post_init__(self) -> None:
        """Check the arguments; raises InvalidInputError."""
        check_choice("dtype", self.dtype, ("float32", "bfloat16"))
        check_choice("optimizer", self.optimizer, tuple(MOMENTS))
        check_choice("codec", self.codec, ("portable", "auto", "raw"))
        least = dict.fromkeys(("parameters", "ranks", "step_s"), LEAST)
        least |= dict.fromkeys(("interval_steps", "failure_s", "restart_s", "keep"), 0)
        for name, lowest in least.items():
            value = getattr(self, name)
            if not lowest <= value <= MOST:
                raise InvalidInputError(f"{name} {quoted(value)}: expected a number from {lowest} to {MOST}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The costs of the snapshots of a run.

    Attributes:
        state_bytes: size of one state.
        first_bytes, next_bytes: bytes that the first snapshot stores, and each later one.
        stall_s: time that training waits for each snapshot [s].
        save_s: time until a snapshot is committed [s].
        restore_s: time to read a snapshot back [s].
        failure_s: mean time between failures [s]: as given, or derived from the number of ranks.
        interval_steps: steps between two snapshots: as given, or the best number.
        best_interval_s: the interval that loses the least time (Daly), but no shorter than a save takes [s].
        lost_share: share of the time that is lost at `interval_steps`: stalls, steps done again, restarts.
        year_bytes: bytes stored after a year if all snapshots are kept.
        kept_bytes: bytes stored at any time if `keep` snapshots are kept.
        year_puts: put requests in a year: a lower bound, since further parts and ranks put manifests of their own.
        storage_usd, puts_usd: price of a year, for `kept_bytes` and for `year_puts` [USD].
        codec: the codec of the estimate.
        auto_codec: the codec that codec="auto" chooses.
    """

    state_bytes: float
    first_bytes: float
    next_bytes: float
    stall_s: float
    save_s: float
    restore_s: float
    failure_s: float
    interval_steps: int
    best_interval_s: float
    lost_share: float
    year_bytes: float
    kept_bytes: float
    year_puts: float
    storage_usd: float
    puts_usd: float
    codec: str
    auto_codec: str


def _check(rates: Rates, **prices: float) -> None:
    for name, rate in asdict(rates).items():
        if not rate >= LEAST:
            raise InvalidInputError(f"rate {name} {quoted(rate)}: expected at least {LEAST} bytes a second")
    for name, price in prices.items():
        if not (math.isfinite(price) and price >= 0):
            raise InvalidInputError(f"{name} {quoted(price)}: expected a number of 0 or more")


def estimate(run: Run, rates: Rates, *, storage_price: float = STORAGE_PRICE, put_price: float = PUT_PRICE) -> Estimate:
    """Return the estimated cost of the snapshots of a run.

    Args:
        rates: speeds of this machine and the store, given or measured; at least 1e-9 bytes a second.
        storage_price: USD per GB (10^9 bytes) and month.
        put_price: USD per thousand requests.

    Raises:
        InvalidInputError: a price is negative or no number, or a rate is too low.
    """
    _check(rates, storage_price=storage_price, put_price=put_price)
    kinds = ("p", *MOMENTS[run.optimizer], *(("w",) if run.dtype == "bfloat16" else ()))
    state_bytes = run.parameters * sum(2 if kind == "w" else 4 for kind in kinds)
    first = run.parameters / 8 * sum(BITS[kind][-1] for kind in kinds)
    stall_s = state_bytes / run.ranks / rates.copy
    failure_s = run.failure_s or FAILURE_GPU_HOURS * 3600 / run.ranks
    auto = codec_for(rates.write, rates.encode)
    codec = auto if run.codec == "auto" else run.codec

    def costs(steps: int) -> tuple[float, float]:
        """Return (stored bytes of a later snapshot, seconds of its save) at an interval."""
        if codec == "raw":
            return state_bytes, state_bytes / rates.write / run.ranks
        stored = run.parameters / 8 * sum(bits_at(kind, steps) for kind in kinds)
        return stored, max(stored / rates.write, state_bytes / rates.encode) / run.ranks

    best_s = daly(stall_s, failure_s)
    for _ in range(3):  # if a save takes longer than the interval, its time becomes the interval
        steps = max(1, math.ceil(max(best_s, costs(max(1, round(best_s / run.step_s)))[1]) / run.step_s))
        best_s = max(best_s, costs(steps)[1])
    steps = run.interval_steps or max(1, round(best_s / run.step_s))
    stored, save_s = costs(steps)
    first = state_bytes if codec == "raw" else first
    restore_s = max(first / rates.read, 0 if codec == "raw" else state_bytes / rates.decode) / run.ranks
    interval_s = steps * run.step_s
    lost = stall_s / (interval_s + stall_s) + (interval_s / 2 + save_s + restore_s + run.restart_s) / failure_s
    saves = YEAR_S / max(interval_s + stall_s, save_s)
    kept = first + stored * ((run.keep or saves) - 1)
    pack = LARGE_PACK_BYTES if state_bytes > MANY_PACKS * DEFAULT_PACK_BYTES else DEFAULT_PACK_BYTES
    puts = saves * (math.ceil(stored / run.ranks / pack) * run.ranks + 5)
    return Estimate(
        state_bytes=state_bytes,
        first_bytes=first,
        next_bytes=stored,
        stall_s=stall_s,
        save_s=save_s,
        restore_s=restore_s,
        failure_s=failure_s,
        interval_steps=steps,
        best_interval_s=best_s,
        lost_share=min(1.0, lost),
        year_bytes=first + stored * (saves - 1),
        kept_bytes=kept,
        year_puts=puts,
        storage_usd=12 * storage_price * kept / 1e9,
        puts_usd=put_price * puts / 1000,
        codec=codec,
        auto_codec=auto,
    )


def bits_at(kind: str, steps: int) -> float:
    """Return the stored bits per element of a snapshot `steps` after its base, interpolated between measured gaps."""
    at = np.interp(math.log(max(1, steps)), [math.log(gap) for gap in GAPS], BITS[kind][:-1])
    return min(float(at), BITS[kind][-1])


def daly(cost_s: float, failure_s: float) -> float:
    """Return the interval between checkpoints that loses the least time [s].

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006), equation
    37; its first term is J. W. Young's, CACM 17 (1974).

    Args:
        cost_s: time that training waits for each checkpoint [s].
        failure_s: mean time between failures [s].
    """
    if cost_s >= 2 * failure_s:
        return failure_s
    root = math.sqrt(cost_s / (2 * failure_s))
    return max(0.0, math.sqrt(2 * cost_s * failure_s) * (1 + root / 3 + root * root / 9) - cost_s)
