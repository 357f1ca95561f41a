"""The order in which the dimensions of an array lie in memory, the one part of its strides that a snapshot keeps.

In: an array, or a shape and strides. Out: its dimension order: its dimensions from the largest stride to the smallest,
as torch's `dim_order` and `empty_permuted` have it. () stands for C order, which most arrays have. Kernels that walk
memory, such as fused optimizers, need parameters and moments of one layout.

Invariants: an order is a permutation of all dimensions, never of C order. torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

DimOrder = tuple[int, ...]


def dim_order_of(value: Any) -> DimOrder:
    """Return the dimension order of a tensor, ndarray or bytes; () if it is in C order or overlaps itself.

    An array with gaps, such as some rows of a matrix in Fortran order, has the order of its strides.
    """
    if isinstance(value, bytes | bytearray) or value.ndim < 2:
        return ()
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous or any(stride % value.itemsize for stride in value.strides):
            return ()
        return _order(value.shape, tuple(stride // value.itemsize for stride in value.strides))
    return _order(tuple(value.shape), value.stride())


@lru_cache(maxsize=4096)  # a state has thousands of tensors of a few shapes
def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> DimOrder:
    """Return the dimension order of elements at these strides; see `dim_order_of`.

    A dimension of size 1 has a stride too, from which torch chooses the layout of a convolution's output. If some order
    gives all strides, that is the order. Else dimensions of size 1 keep their places. A stride reaches at least over
    the dimension that comes next in the order, or elements may share memory.
    """
    if not math.prod(shape):
        return ()
    every = tuple(range(len(shape)))
    found = tuple(sorted(every, key=lambda d: (-strides[d], shape[d] == 1, d)))
    if strides_of(shape, found) != strides:
        large = [d for d in every if shape[d] > 1]
        of_large = iter(sorted(large, key=lambda d: -strides[d]))
        found = tuple(next(of_large) if shape[d] > 1 else d for d in every)
        inside = sorted(large, key=lambda d: strides[d])
        reach = [1, *(strides[d] * shape[d] for d in inside)]
        if any(strides[d] < least for d, least in zip(inside, reach, strict=False)):
            return ()
    return () if found == every else found


def strides_of(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides [elements] of a shape whose dimensions lie in memory in an order without gaps."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def inverse(order: DimOrder) -> DimOrder:
    """Return the permutation that undoes an order."""
    return tuple(order.index(d) for d in range(len(order)))


def is_dim_order(order: Sequence[int], dimensions: int) -> bool:
    """Return whether a sequence is an order of so many dimensions other than C order."""
    every = list(range(dimensions))
    return sorted(order) == every != list(order)
