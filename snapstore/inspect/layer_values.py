"""Layer values: how far each layer moved between two snapshots: relative L2 and cosine, over all of its elements.

In: an open repository and two snapshots. Out: a LayerMove for each layer. Reads the values of both snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes
from ..context import Context
from ..format.records import Snapshot
from ..restore.manifests import require_decoding
from ..state.values.arrays import as_float64
from ..state.values.tensors import TensorSpec
from .changed_elements import layer_of
from .diff import pieces_of, unlike_form
from .stored_tensors import read_tensors


@dataclass(slots=True)
class LayerMove:
    """Sums over the elements of a layer in two snapshots, a and b, as float64.

    Attributes:
        difference, before, after: of the squares of b - a, a and b.
        product: of a b.
    """

    difference: float = 0.0
    before: float = 0.0
    after: float = 0.0
    product: float = 0.0

    @property
    def relative_l2(self) -> float:
        """Return norm(b - a) / norm(a); NaN if a is zero, or if a value is not finite."""
        return math.sqrt(self.difference / self.before) if self.before else math.nan

    @property
    def cosine(self) -> float:
        """Return a b / (norm(a) norm(b)), -1 to 1; NaN if a or b is zero, or if a value is not finite."""
        norms = math.sqrt(self.before) * math.sqrt(self.after)
        return max(-1.0, min(1.0, self.product / norms)) if norms and math.isfinite(norms) else math.nan


def moves_by_layer(context: Context, a: Snapshot, b: Snapshot) -> tuple[dict[str, LayerMove], int]:
    """Return how far each layer moved from a to b, and how many bytes of values were read.

    Tensors that only one of them has, or whose dtype or shape differs, do not count; nor do bytes and bits.

    Raises:
        IntegrityError, FormatError, NotFoundError: an object is damaged or missing.
        CapabilityError: the values take more decoding than the limits allow.
    """
    (_, before), (_, after) = read_tensors(context, a), read_tensors(context, b)
    keys = [key for key in before if key in after and not unlike_form(before[key].spec, after[key].spec)]
    pairs = [(before[key], after[key]) for key in keys]
    pieces = [piece for pair in pairs for stored in pair for piece in stored.pieces]
    require_decoding(context.store, pieces, f"comparing {a.ref} and {b.ref}:")
    read = (pieces_of(context, [pair[i] for pair in pairs]) for i in (0, 1))
    found: dict[str, LayerMove] = {}
    for key, (one, _), both in zip(keys, pairs, zip(*read, strict=True), strict=True):
        for x, y in _numbers(one.spec, both):
            move = found.setdefault(layer_of(key[0]), LayerMove())
            with np.errstate(all="ignore"):
                move.difference += float((y - x) @ (y - x))
                move.before, move.after = move.before + float(x @ x), move.after + float(y @ y)
                move.product += float(x @ y)
    return found, 2 * sum(stored.spec.nbytes for stored, _ in pairs)


def _numbers(
    spec: TensorSpec, both: tuple[Iterator[Bytes], Iterator[Bytes]]
) -> Iterator[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    for piece_a, piece_b in zip(*both, strict=True):
        with np.errstate(all="ignore"):  # a cast of a signaling NaN
            x, y = as_float64(piece_a, spec), as_float64(piece_b, spec)
        if x is not None and y is not None:
            yield x, y
