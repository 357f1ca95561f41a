"""The numbers of metrics: read at once, or copied from a GPU while the caller goes on.

In: a tensor of one element, a NumPy scalar, or anything with `__float__`. Out: a function that returns the number.

`.item()` of a CUDA tensor waits until the device has done all work that was enqueued before it: the training step. So
such a tensor is copied to pinned host memory on the current stream, and only the thread that needs the number waits for
that copy. Later changes of the tensor do not change the number. Neither the tensor nor its graph is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InvalidInputError
from ...text import said
from ...threads import imported

if TYPE_CHECKING:
    import torch

MetricRead = Callable[[], float]


def begin_read(value: Any) -> MetricRead:
    """Begin to read a number; return a function that waits for it and returns it.

    Raises:
        InvalidInputError: it is not one real number; the message begins with "expected".
    """
    torch = imported("torch")  # if torch is not imported, there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach()  # else torch warns about its graph
        _require_one("tensor", value.dtype, value.is_complex(), tuple(value.shape))
    elif isinstance(value, np.ndarray | np.generic):
        _require_one(type(value).__name__, value.dtype, value.dtype.kind not in "biuf", value.shape)
        value = value.reshape(())
    elif not hasattr(value, "__float__") and not hasattr(value, "__index__"):  # float() reads str and bytes too
        raise InvalidInputError(f"expected a number, got {type(value).__name__}")
    try:
        if getattr(value, "is_cuda", False):
            return _copied(value)
        number = float(value)
    except InvalidInputError:
        raise
    except Exception as error:  # whatever a type's `__float__` raises
        raise InvalidInputError(f"expected a number, got {type(value).__name__}: {said(error)}") from error
    return lambda: number


def _require_one(kind: str, dtype: Any, is_other: bool, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor or array has one element, which is a real number."""
    if is_other:
        raise InvalidInputError(f"expected a real number, got {kind} of {dtype}")
    if math.prod(shape) != 1:
        raise InvalidInputError(
            f"expected one number, got {kind} of shape {shape}; reduce it first, such as with .mean()"
        )


def _copied(value: torch.Tensor) -> MetricRead:
    """Copy a CUDA tensor of one element to host memory, after the work that computes it."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise InvalidInputError("expected a save between replays of a CUDA graph, not while one is being captured")
    float(torch.empty((), dtype=value.dtype, device="cpu"))  # raises now for a dtype that cannot be converted
    with torch.no_grad(), torch.cuda.device(value.device):
        host = value.reshape(()).to("cpu", non_blocking=True)  # pinned memory; no kernel runs, which might have to load
        copied = torch.cuda.current_stream().record_event()

    def read() -> float:
        copied.synchronize()
        return float(host)

    return read
