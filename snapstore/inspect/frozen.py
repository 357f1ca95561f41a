"""Frozen and dead tensors: those of a run that changed although they were frozen, or that stopped changing.

In: a TensorHistory. Out: (tensor, number of the snapshot, what, evidence). The digests of chunks say between which
snapshots a tensor changed; only intervals in which another tensor of the model changed count, and an optimizer took a
step: statistics of a normalization go on without one. Values are read for two questions. Did a tensor seem frozen
because its updates were smaller than the rounding of its values? And does an optimizer, whose momentum and weight decay
still change a layer, get a gradient for it? Without one, all elements of a moment shrink by the same factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .tensor_history import TensorHistory, Track, eps_of

#: A tensor that did not change between so many snapshots, while others did, was frozen, or is dead.
MIN_STILL = 3
#: It is not, if it has paused for half as long before: few batches may use it.
PAUSES = 2
#: A layer that gets no gradient is dead after so many intervals, if it got one in the four before.
MIN_WITHOUT_GRADIENT, WITH_GRADIENT = 4, (1, 2, 3, 4)
#: A change of so many units in the last place is a matter of rounding.
ROUNDED = 2
#: A moment and the tensor that it moves agree in so many more of the signs than they disagree.
AGREED = 0.5

Found = tuple[Track, int, str, str]
Moved = Mapping[Track, npt.NDArray[np.bool_]]


def _is_statistic(track: Track) -> bool:
    """Return whether it is a running mean or variance of a normalization, which changes without an optimizer's step."""
    return track.path.rpartition(".")[2] in ("running_mean", "running_var")


class StillTensors:
    """Finds frozen tensors that changed, and dead ones, up to a snapshot."""

    def __init__(self, history: TensorHistory, until: int) -> None:
        self._history, self._until = history, until
        self._tracks = [track for track in history.tracks.values() if track.end > until]
        layers = {track.part for track in self._tracks if track.spec.shape}  # of other parts, scalars are no weights
        self._model = [track for track in self._tracks if not track.is_optimizer and track.part in layers]
        self._moments = [track for track in self._tracks if track.is_optimizer and track.spec.shape]
        numbers = range(until + 1)
        self._moved: Moved = {track: np.array([track.moved(i) for i in numbers]) for track in self._tracks}
        self._stepped = self._may_have_stepped()
        zeros = np.zeros(until + 1, np.int64)
        self._weights_moved = sum((self._moved[track] for track in self._model if not _is_statistic(track)), zeros)

    def _may_have_stepped(self) -> npt.NDArray[np.bool_]:
        """Return for each snapshot whether an optimizer may have taken a step since the one before."""
        optimizers = [track for track in self._tracks if track.is_optimizer]
        begins = [track.begin for track in optimizers if track.begin <= self._until]
        found = np.arange(self._until + 1) <= min(begins, default=self._until)
        found[begins] = True
        for track in optimizers:
            found |= self._moved[track]
        return found

    def found(self) -> Iterator[Found]:
        """Yield what was found; of an optimizer, only consequences."""
        found = [one for track in self._model for one in self._of(track)]
        yield from found
        shown = {(number, what, track.spec.shape) for track, number, what, _ in found}
        for track in self._moments:
            yield from (one for one in self._of(track) if (one[1], one[2], track.spec.shape) in shown)
        yield from self._without_gradient()

    def _of(self, track: Track) -> Iterator[Found]:
        moved, is_weight = self._moved[track], not track.is_optimizer and not _is_statistic(track)
        others = (self._weights_moved > (moved & is_weight)) & self._stepped
        counted = np.flatnonzero((others | moved) & (np.arange(self._until + 1) > track.begin))
        changes = np.flatnonzero(moved[counted])
        if not changes.size:
            return
        pause = max(MIN_STILL, PAUSES * int(np.diff(changes).max(initial=1) - 1) + 1)
        before, after = int(changes[0]), len(counted) - 1 - int(changes[-1])
        number = int(counted[changes[0]])
        is_untrained = bool(self._moments) and not self._moments_moved(track, number)
        if before >= (MIN_STILL if is_untrained else pause) and self._is_thawed(track, number):
            yield track, number, "thawed", f"had not changed in {before} snapshots before, as others did"
        if after >= pause and len(changes) >= MIN_STILL and self._is_dead(track, counted[changes[-1] :][:2].tolist()):
            number = int(counted[changes[-1] + 1])
            yield track, number, "died", f"did not change in the last {after} snapshots, as others did"

    def _is_thawed(self, track: Track, number: int) -> bool:
        """Return whether the first change of a tensor is more than the first that is not rounded off."""
        before, now = self._moments_moved(track, number - 1), self._moments_moved(track, number)
        if track.is_optimizer or now > before:
            return True
        if self._is_of_part(track, number, slice(0, number)):
            return False
        return (not now and bool(self._moments)) or self._is_large(track, number)

    def _is_dead(self, track: Track, last_and_next: list[int]) -> bool:
        """Return whether the changes of a tensor have ended, and are not only rounded off."""
        last, following = last_and_next
        before, now = self._moments_moved(track, last), self._moments_moved(track, following)
        if track.is_optimizer or now < before or _is_statistic(track):
            return True
        return not before and not self._is_of_part(track, last, slice(last + 1, None)) and self._is_large(track, last)

    def _is_of_part(self, track: Track, number: int, quiet: slice) -> bool:
        """Return whether a whole part begins or ends to change at a snapshot, such as an average of the weights."""
        part = [self._moved[other] for other in self._model if other.part == track.part]
        part = [own for own in part if own.any()]
        return len(part) > 1 and all(own[number] and not own[quiet].any() for own in part)

    def _moments_moved(self, track: Track, number: int) -> int:
        """Return how many tensors of optimizers, of a tensor's shape, changed."""
        return sum(bool(self._moved[one][number]) for one in self._moments if one.spec.shape == track.spec.shape)

    def _is_large(self, track: Track, number: int) -> bool:
        """Return whether a change exceeds the rounding of the values, in any element."""
        pieces = track.pieces_changed(number - 1, number)
        for piece in pieces.tolist():
            before, after = self._history.values([(n, track, np.array([piece])) for n in (number - 1, number)])
            if (np.abs(after - before) > ROUNDED * eps_of(track.spec) * np.abs(after)).any():
                return True
        return False

    # -- layers without a gradient

    def _without_gradient(self) -> Iterator[Found]:
        """Yield the tensors whose moments only decay, each once."""
        first = list({track.key[0][:-1]: track for track in reversed(self._moments)}.values())[::-1]
        for moment in first:
            number = self._decays_since(moment)
            if number is None:
                continue
            track = self._moved_by(moment, number) or self._in_order(first).get(moment, moment)
            decays = f"{moment.path} only decays in the last {self._until - number + 1} snapshots"
            yield track, number, "died", f"gets no gradient: {decays}"

    def _decays_since(self, moment: Track) -> int | None:
        """Return the first snapshot from which on a moment only decays; None if it gets gradients."""
        live, number = moment.begin, self._until
        if number - live <= MIN_WITHOUT_GRADIENT or not self._decays(moment, number):
            return None
        while number - live > 1:
            middle = (live + number) // 2
            live, number = (live, middle) if self._decays(moment, middle) else (middle, number)
        is_long = self._until - number + 1 >= MIN_WITHOUT_GRADIENT
        before = [number - back for back in WITH_GRADIENT if number - back > moment.begin]
        return number if is_long and before and not any(self._decays(moment, n) for n in before) else None

    def _decays(self, moment: Track, number: int) -> bool:
        """Return whether all elements of a moment shrank by one factor between a snapshot and the one before."""
        factor = None
        steps = self._history.snapshots[number].step - self._history.snapshots[number - 1].step
        tolerance = 4 * eps_of(moment.spec) * max(1, steps)
        for piece in moment.pieces_changed(moment.begin, self._until).tolist():
            before, after = self._history.values([(n, moment, np.array([piece])) for n in (number - 1, number)])
            size = np.abs(before)
            is_used = size > 1e-30  # smaller float32 lose bits
            if (np.abs(after[~is_used]) > 1e-30).any():
                return False
            before, after, size = before[is_used], after[is_used], size[is_used]
            if not size.size:
                continue
            if factor is None:
                factor = float(np.median(after / before))
            if not 0 < factor < 1 or (np.abs(after - factor * before) > tolerance * size).any():
                return False
        return factor is not None

    def _moved_by(self, moment: Track, number: int) -> Track | None:
        """Return the tensor of the model that a moment moves: its changes have the opposite signs."""
        alike = [t for t in self._model if t.spec.shape == moment.spec.shape and self._moved[t][number]]
        best = max(
            ((self._agreement(moment, track, number), track) for track in alike), default=None, key=lambda b: b[0]
        )
        return best[1] if best is not None and best[0] >= AGREED else None

    def _in_order(self, moments: Sequence[Track]) -> dict[Track, Track]:
        """Return the tensor of the model for each moment, if those that ever changed have the shapes in this order."""
        model = iter([track for track in self._model if self._moved[track].any()])
        pairs = {one: next((t for t in model if t.spec.shape == one.spec.shape), None) for one in moments}
        found = {one: track for one, track in pairs.items() if track is not None}
        return found if len(found) == len(moments) else {}

    def _agreement(self, moment: Track, track: Track, number: int) -> float:
        """Return the mean of the signs of a moment times those of the steps against it, -1 to 1, in one piece."""
        pieces = track.pieces_changed(number - 1, number)[:1]
        if moment.form[2:] != track.form[2:] or not pieces.size:
            return -1.0
        wanted = [(number, moment, pieces), (number - 1, track, pieces), (number, track, pieces)]
        direction, before, after = self._history.values(wanted)
        return float((np.sign(direction) * np.sign(before - after)).mean())
