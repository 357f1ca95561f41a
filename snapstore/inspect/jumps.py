"""Jumps: the snapshots between which a tensor of a run changed far more than before.

In: a TensorHistory. Out: (tensor, number of the snapshot, evidence). A change is measured by its largest element, and
by its rms over the elements that changed. It is compared with the changes of the same tensor before it and after it,
then with those of the other tensors: a learning rate that rises for all is no jump.

If the changes between all snapshots take too many bytes to read, those between some are measured first. A jump
stays in the values, so the interval that has it differs from its neighbours, and bisection finds the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .tensor_history import TensorHistory, Track, eps_of

#: A jump is this many times the largest of the LOOK_BACK changes before it, and LESS_AFTER times the next one.
JUMP, LOOK_BACK, LESS_AFTER = 8.0, 3, 3.0
#: From this ratio on, the change after it does not matter: the training may have diverged.
HUGE_JUMP = 1000.0
#: The changes between all snapshots are read if they take at most this share of the plain bytes of all snapshots.
READ_SHARE = 0.02
#: Else there are at least so many intervals; those of this ratio to their neighbours are searched, at most so many.
MIN_INTERVALS, UNLIKE, MOST_SEARCHED = 8, 2.0, 8
#: A change is compared with those of so many other tensors.
OTHERS = 8
#: The bytes of so many snapshots are estimated.
SAMPLED = 16

#: Measures of the changes of a tensor up to each snapshot, (2, n) float64: the largest of an element, and the rms.
Changes = npt.NDArray[np.float64]
MEASURES = "largest change of an element", "rms of the change"


def jumps(history: TensorHistory, tracks: Sequence[Track], until: int) -> Iterator[tuple[Track, int, str]]:
    """Yield the jumps of tensors up to a snapshot: (tensor, number of the snapshot, evidence).

    Raises:
        IntegrityError, FormatError, CapabilityError: as `TensorHistory.values` raises them.
    """
    tracks = [track for track in tracks if sum(track.moved(i) for i in range(until + 1)) > LOOK_BACK]
    stride = _stride(history, tracks, until)
    if stride == 1:
        yield from _judged({track: changes_of(history, track, range(until + 1)) for track in tracks}, tracks)
        return
    by_size = sorted(tracks, key=lambda track: track.spec.nbytes)
    for track, after, number in _unlike(history, tracks, [*range(0, until, stride), until]):
        number = _narrowed(history, track, after, number)
        numbers = range(max(0, number - LOOK_BACK - 1), min(until, number + 1) + 1)
        others = [other for other in by_size if other is not track][:OTHERS]
        changes = {one: changes_of(history, one, numbers) for one in (track, *others)}
        yield from (jump for jump in _judged(changes, [track]) if jump[1] == number)


def _stride(history: TensorHistory, tracks: Sequence[Track], until: int) -> int:
    """Return the distance of the snapshots between which changes are measured first; 1: between all."""
    numbers = np.unique(np.linspace(1, until, SAMPLED).astype(int)).tolist()
    moved = ((number, track) for track in tracks for number in numbers if track.moved(number))
    cost = sum(history.cost(n, track, track.pieces_changed(n - 1, n)) for n, track in moved) * until / len(numbers)
    return max(1, min(int(-(-cost // max(1, READ_SHARE * history.plain_bytes))), until // MIN_INTERVALS))


def changes_of(history: TensorHistory, track: Track, numbers: Sequence[int]) -> Changes:
    """Return the changes of a tensor from each of some snapshots to the next; 0 elsewhere.

    A change that is not 0 counts as at least the rounding of the largest value.
    """
    numbers = [number for number in numbers if track.begin <= number < track.end]
    found = np.zeros((2, len(history.snapshots)))
    count, floor, eps = np.zeros(len(history.snapshots)), np.zeros(len(history.snapshots)), eps_of(track.spec)
    pairs = [(b, set(track.pieces_changed(a, b).tolist())) for a, b in pairwise(numbers)]
    for piece in sorted(set[int]().union(*(pieces for _, pieces in pairs))):
        ends = [number for number, pieces in pairs if piece in pieces]
        values = history.values([(number, track, np.array([piece])) for number in (numbers[0], *ends)])
        before = next(values)
        for number, after in zip(ends, values, strict=True):
            with np.errstate(all="ignore"):
                change = np.nan_to_num(np.abs(after - before), posinf=0)
            floor[number] = max(floor[number], 2 * eps * np.abs(before).max(initial=0))
            found[0, number] = max(found[0, number], change.max(initial=0))
            found[1, number] += float((change**2).sum())
            count[number] += np.count_nonzero(change)
            before = after
    found[1] = np.sqrt(found[1] / np.maximum(count, 1))
    return np.where(found > 0, np.maximum(found, floor), 0)


def _unlike(history: TensorHistory, tracks: Sequence[Track], numbers: Sequence[int]) -> list[tuple[Track, int, int]]:
    """Return the intervals in which tensors changed more than in both neighbours: (tensor, its two snapshots)."""
    ratios = {track: _to_neighbours(changes_of(history, track, numbers)[:, numbers]) for track in tracks}
    found = []
    for track, own in ratios.items():
        score = (own / _usual(ratios, track)).max(axis=0)
        found += [(score[i], track, numbers[i - 1], numbers[i]) for i in np.flatnonzero(score >= UNLIKE).tolist()]
    found.sort(key=lambda one: -one[0])
    return [one[1:] for one in found[:MOST_SEARCHED]]


def _to_neighbours(changes: Changes) -> Changes:
    padded = np.pad(changes, ((0, 0), (1, 1)))
    largest = np.maximum(padded[:, :-2], padded[:, 2:])
    return np.divide(changes, largest, out=np.zeros_like(changes), where=largest > 0)


def _narrowed(history: TensorHistory, track: Track, after: int, number: int) -> int:
    """Return the snapshot of the largest change between two, by bisection."""
    while number - after > 1:
        middle = (after + number) // 2
        changes = changes_of(history, track, [after, middle, number])
        measure = int(np.argmax(changes[:, [middle, number]].max(axis=1) / np.maximum(changes.sum(axis=1), 1e-300)))
        after, number = (after, middle) if changes[measure, middle] >= changes[measure, number] else (middle, number)
    return number


def _judged(changes: Mapping[Track, Changes], tracks: Sequence[Track]) -> Iterator[tuple[Track, int, str]]:
    """Yield the jumps of some tensors, from the changes of these and others."""
    ratios = {track: _to_those_before(own) for track, own in changes.items()}
    for track in tracks:
        own = ratios[track]
        for number in np.flatnonzero((own / _usual(ratios, track) >= JUMP).any(axis=0)).tolist():
            measure = int(np.argmax(own[:, number]))
            values = changes[track][measure]
            now, ratio = float(values[number]), float(own[measure, number])
            after = values[number + 1] if number + 1 < len(values) else 0
            if ratio >= HUGE_JUMP or now >= LESS_AFTER * after:
                yield track, number, f"{MEASURES[measure]} {now:.2g}, before at most {now / ratio:.2g}"


def _usual(ratios: Mapping[Track, Changes], track: Track) -> Changes | float:
    """Return the median ratio of the other tensors, at least 1."""
    others = [np.max(ratio, axis=0) for other, ratio in ratios.items() if other is not track]
    return np.maximum(1, np.median(np.array(others), axis=0)) if others else 1.0


def _to_those_before(changes: Changes) -> Changes:
    """Return the ratio of each change to the largest of those before it; 0 if there are too few."""
    found = np.zeros(changes.shape)
    for own, values in zip(found, changes, strict=True):
        for number in np.flatnonzero(values).tolist():
            before = [value for value in values[max(0, number - LOOK_BACK) : number] if value > 0]
            if len(before) > 1:
                own[number] = values[number] / max(before)
    return found
