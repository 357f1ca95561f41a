"""Spans of boxes agree with a plain reference, which numbers all elements."""

import itertools
import math

import numpy as np
import pytest

from snapstore.format.manifests import boxes

SHAPES = [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (1, 2, 1, 3), (2, 2, 2, 2)]


def inner_boxes(shape):
    """Yield every box that lies within a shape and is not empty."""
    spans = [[(at, n) for at in range(size) for n in range(1, size - at + 1)] for size in shape]
    for one in itertools.product(*spans):
        yield tuple(at for at, _ in one), tuple(n for _, n in one)


def numbers_in(shape, at, sizes):
    """Return the numbers of a box's elements in C order of the shape around it, ascending."""
    place = tuple(slice(start, start + n) for start, n in zip(at, sizes, strict=True))
    return np.arange(math.prod(shape)).reshape(shape)[place].reshape(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_runs_and_counts(shape):
    ends = np.arange(math.prod(shape) + 1)
    for at, sizes in inner_boxes(shape):
        numbers = numbers_in(shape, at, sizes)
        assert boxes.start_of(at, shape) == numbers[0]
        assert boxes.is_run(sizes, shape) == (numbers[-1] - numbers[0] == len(numbers) - 1)
        assert boxes.counts_before(ends, at, sizes, shape).tolist() == np.searchsorted(numbers, ends).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_of_spans(shape):
    count = math.prod(shape)
    for first, end in itertools.combinations_with_replacement(range(count + 1), 2):
        found = boxes.span_boxes(first, end, shape)
        assert len(found) <= 2 * len(shape) + 1
        parts = [numbers_in(shape, at, sizes) for at, sizes in found]
        assert np.concatenate([np.arange(0), *parts]).tolist() == list(range(first, end))
