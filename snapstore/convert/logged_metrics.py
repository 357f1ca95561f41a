"""The metrics that a checkpoint states: in its name, in the Trainer's log, or in Lightning's callbacks.

In: names and plain values of a file that is not trusted. Out: numbers by name; all else is left out. Only values of the
step of the checkpoint count, as `run@best` compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

#: NAME=NUMBER in the name of a checkpoint, such as val_loss=0.12 or lr=1e-05.
_IN_NAME = re.compile(r"([A-Za-z][\w@]*)=(-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![A-Za-z0-9.])")
#: The beginning of such a name that belongs to the step: "step_100_" of step_100_loss=0.12.
_STEP_BEFORE = re.compile(r".*?(?:^|_)(?:step|iter|epoch)?_?\d+_")
#: Numbers that count the progress of a training.
_COUNTS = frozenset({"step", "global_step", "iter", "iteration", "epoch", "total_flos"})
#: A checkpoint states at most so many metrics, with names of so many characters.
MOST_METRICS, MOST_CHARACTERS = 200, 200


def metrics_in_name(name: str) -> dict[str, float]:
    """Return the metrics in the name of a checkpoint, without the numbers of its step and epoch."""
    found = ((_STEP_BEFORE.sub("", match[1]), float(match[2])) for match in _IN_NAME.finditer(name))
    return _checked(found)


def metrics_of_trainer(stated: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that the Trainer has logged at the step of a checkpoint.

    Args:
        stated: the contents of its trainer_state.json.
    """
    step, history = stated.get("global_step"), stated.get("log_history")
    entries = history if isinstance(history, list) else []
    at_step = (one for one in entries if step is not None and isinstance(one, dict) and one.get("step") == step)
    return _checked((name, value) for one in at_step for name, value in one.items())


def metrics_of_lightning(state: Any) -> dict[str, float]:
    """Return the scores of the ModelCheckpoint callbacks that saved a checkpoint of Lightning, by what they monitor."""
    callbacks = state.get("callbacks") if isinstance(state, dict) and "pytorch-lightning_version" in state else None
    states = callbacks.values() if isinstance(callbacks, dict) else []
    return _checked((one.get("monitor"), one.get("current_score")) for one in states if isinstance(one, dict))


def _checked(found: Iterator[tuple[Any, Any]]) -> dict[str, float]:
    """Return the pairs of a name and a number among these pairs."""
    metrics: dict[str, float] = {}
    for name, value in islice(found, 10 * MOST_METRICS):
        number = _number(value)
        is_name = isinstance(name, str) and 0 < len(name) <= MOST_CHARACTERS and name.isprintable()
        if is_name and number is not None and name not in _COUNTS and len(metrics) < MOST_METRICS:
            metrics[name] = number
    return metrics


def _number(value: Any) -> float | None:
    if type(value) in (int, float):
        return float(value) if abs(value) < 1e300 or value != value else None  # a huge int is no float
    if getattr(value, "ndim", None) == 0 and getattr(value, "is_meta", False) is False:  # a tensor or NumPy scalar
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            return None
    return None
