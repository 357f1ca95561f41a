"""Retention: decide which snapshots of a run stay, and why.

In: policies, and the committed snapshots of one run in any order. Out: one `Decision` per snapshot, oldest first. No
I/O, no torch, no clock: the same input gives the same answer everywhere, and any thread may call this. `KeepBytes`
alone needs more than the snapshots: the caller tells which objects they need.

Rules, in this order:

1. If a step was saved several times, only the save with the highest `seq` is current. The others are superseded:
   policies do not look at them.
2. Policies are ORed: each gives reasons to current snapshots, and one reason is enough to stay.
3. A tagged snapshot always stays, superseded or not ("tag NAME"); the newest one of the run always stays ("newest").
4. `KeepBytes` comes last: objects that a snapshot with another reason needs cost it nothing. Only the newest snapshot
   costs it something although it stays anyway.
5. A snapshot without a reason is forgotten.

"Newer" means a higher `seq`, never a later `created`: clocks jump. Two writers that raced may hold the same `seq`; the
higher id then counts as newer, everywhere. `created` only names the calendar periods and measures `KeepWithin`, back
from the newest snapshot and never from now, so a run loses nothing while it pauses. After a pause that is longer than
the duration, its first save is the newest, and `KeepWithin` keeps none of the older ones.
"""

import dataclasses
import datetime as dt
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from numbers import Real
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from .errors import FormatError, InvalidInputError
from .text import counted, quoted, size_in_bytes, size_text


class SnapshotLike(Protocol):
    """The part of a snapshot that policies look at; `snapstore.Snapshot` is one."""

    @property
    def id(self) -> str:
        """Unique in the run."""

    @property
    def run(self) -> str:
        """The name of its run."""

    @property
    def step(self) -> int:
        """Its training step; several saves may share one."""

    @property
    def seq(self) -> int:
        """Its place in the order of the run's snapshots."""

    @property
    def created(self) -> float:
        """When it was saved: [s] since 1970, UTC, by the writer's clock."""

    @property
    def tags(self) -> Sequence[str]:
        """Names that keep it."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers that `KeepBest` compares, by name."""


S = TypeVar("S", bound=SnapshotLike)
Reasons = dict[str, str]  # snapshot id -> why this policy keeps it
#: Returns the objects that each snapshot needs, without those that stay anyway: snapshot id -> key -> size [bytes].
Needs = Callable[[], Mapping[str, Mapping[str, int]]]


class Policy(Protocol):
    """One rule. Only the classes below are policies: a policy is stored, so its kind is part of the format."""

    def reasons(self, current: Sequence[SnapshotLike]) -> Reasons:
        """Return why this policy keeps snapshots, by id. `current` is one snapshot per step, newest first."""


@dataclass(frozen=True)
class Decision(Generic[S]):
    """A snapshot and why it stays; without reasons it is forgotten."""

    snapshot: S
    reasons: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class _KeepCount(Policy):
    """Keep `n` of something."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _at_least_one(type(self).__name__, "n", self.n))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n})"


class KeepLast(_KeepCount):
    """Keep the `n` newest steps."""

    def reasons(self, current: Sequence[SnapshotLike]) -> Reasons:
        """Return the reason for each of the first `n`."""
        return {snapshot.id: f"last {self.n}" for snapshot in current[: self.n]}


@dataclass(frozen=True)
class KeepEvery(Policy):
    """Keep every step that `steps` divides, permanently; step 0 is one of them."""

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _at_least_one("KeepEvery", "steps", self.steps))

    def reasons(self, current: Sequence[SnapshotLike]) -> Reasons:
        """Return the reason for each whose step is a multiple."""
        return {snapshot.id: f"every {self.steps} steps" for snapshot in current if snapshot.step % self.steps == 0}


@dataclass(frozen=True, repr=False)
class KeepSteps(Policy):
    """Keep these steps permanently."""

    steps: tuple[int, ...]  # sorted, without repeats, whatever iterable was given

    def __init__(self, steps: Iterable[int]) -> None:
        if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
            raise InvalidInputError(f"KeepSteps: expected steps as a list of integers, got {quoted(steps)}")
        given = [(as_int(step), step) for step in steps]
        for number, step in given:
            if number is None or not 0 <= number <= _MAX_NUMBER:
                raise InvalidInputError(
                    f"KeepSteps: expected steps that are integers from 0 to 2^53, got {quoted(step)}"
                )
        if not given:
            raise InvalidInputError("KeepSteps: expected at least one step, got none")
        object.__setattr__(self, "steps", tuple(sorted({number for number, _ in given if number is not None})))

    def __repr__(self) -> str:
        return f"KeepSteps({list(self.steps)})"

    def reasons(self, current: Sequence[SnapshotLike]) -> Reasons:
        """Return the reason for each of the steps that exists."""
        named = frozenset(self.steps)
        return {snapshot.id: f"step {snapshot.step}" for snapshot in current if snapshot.step in named}


@dataclass(frozen=True, repr=False)
class KeepBest(Policy):
    """Keep the `n` best snapshots by a metric.

    A snapshot whose metric is NaN or missing is never best. If values are equal, the newer snapshot is better: it has
    trained longer for the same score, and another policy is more likely to keep it anyway.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        name = self.metric
        if not isinstance(name, str) or not name or not _is_short_text(name):
            raise InvalidInputError(f"KeepBest: expected the name of a metric, got {name!r:.100}")
        object.__setattr__(self, "n", _at_least_one("KeepBest", "n", self.n))
        if self.mode not in ("min", "max"):
            raise InvalidInputError(f"KeepBest: expected mode 'min' or 'max', got {quoted(self.mode)}")
        for field in ("metric", "mode"):  # plain: only such text can be stored
            object.__setattr__(self, field, str.__str__(getattr(self, field)))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return the policy that keeps the one best by METRIC, METRIC:min (the same) or METRIC:max."""
        metric, _, mode = text.rpartition(":")
        return cls(metric, mode="max" if mode == "max" else "min") if mode in ("min", "max") else cls(text)

    def __repr__(self) -> str:
        return f"KeepBest({self.metric!r}, n={self.n}, mode={self.mode!r})"

    def reasons(self, current: Sequence[SnapshotLike]) -> Reasons:
        """Return the reason for each of the first `n` of `ranked`, with its rank."""
        best = self.ranked(current)[: self.n]
        return {snapshot.id: f"best {self.metric} (#{rank})" for rank, snapshot in enumerate(best, start=1)}

    def ranked(self, snapshots: Iterable[S]) -> list[S]:
        """Return the snapshots that have the metric, best first; if values are equal, the newer one first."""
        measured = [snapshot for snapshot in snapshots if not math.isnan(snapshot.metrics.get(self.metric, math.nan))]
        measured.sort(key=_age, reverse=True)
        sign = 1 if self.mode == "min" else -1
        return sorted(measured, key=lambda snapshot: sign * snapshot.metrics[self.metric])


@dataclass(frozen=True, repr=False)
class KeepWithin(Policy):
    """Keep the snapshots created within `duration` before the newest one of the run.

    Args:
        duration: "90s", "30m", "2h", "7d", "2w" or a sum like "1d12h" (m is minutes); or a `datetime.timedelta`; or
            seconds. The attribute holds its shortest text, so equal durations are equal policies.
    """

    duration: str

    def __init__(self, duration: str | dt.timedelta | float) -> None:
        object.__setattr__(self, "duration", _duration_text(_parse_duration(duration)))

    def __repr__(self) -> str:
        return f"KeepWithin({self.duration!r})"

    def reasons(self, current: Sequence[SnapshotLike]) -> Reasons:
        """Return the reason for each that is not older, also for one that a wrong clock dated after the newest."""
        if not current:
            return {}
        oldest = current[0].created - _parse_duration(self.duration).total_seconds()
        return {snapshot.id: f"within {self.duration}" for snapshot in current if snapshot.created >= oldest}


class _KeepPeriodic(_KeepCount):
    """Keep the newest snapshot of each of the last `n` calendar periods (UTC) that have any."""

    #: A format of datetime that gives one text for all times of a period; the text is also the reason.
    period: ClassVar[str]

    def reasons(self, current: Sequence[SnapshotLike]) -> Reasons:
        """Return the reason for the newest snapshot of each of the first `n` periods, from the newest to the oldest.

        The order is that of `seq`: a snapshot that a wrong clock dated 2099 takes one period, and no more.
        """
        newest: dict[str, str] = {}  # period -> snapshot id
        for snapshot in current:
            newest.setdefault(format(utc(snapshot.created), self.period), snapshot.id)
            if len(newest) > self.n:
                newest.popitem()
                break
        return {snapshot_id: period for period, snapshot_id in newest.items()}


class KeepHourly(_KeepPeriodic):
    """Keep the newest snapshot of each of the last `n` hours (UTC) that have any."""

    period = "hourly %Y-%m-%d %H:00"


class KeepDaily(_KeepPeriodic):
    """Keep the newest snapshot of each of the last `n` days (UTC) that have any."""

    period = "daily %Y-%m-%d"


class KeepWeekly(_KeepPeriodic):
    """Keep the newest snapshot of each of the last `n` ISO weeks (Monday to Sunday, UTC) that have any."""

    period = "weekly %G-W%V"


class KeepMonthly(_KeepPeriodic):
    """Keep the newest snapshot of each of the last `n` months (UTC) that have any."""

    period = "monthly %Y-%m"


class KeepYearly(_KeepPeriodic):
    """Keep the newest snapshot of each of the last `n` years (UTC) that have any."""

    period = "yearly %Y"


@dataclass(frozen=True, repr=False)
class KeepBytes(Policy):
    """Keep the newest snapshots whose objects take at most `size` together, and at least one.

    Packs and manifests that a snapshot needs which stays for another reason, or a snapshot of another run, are not
    counted. Counting ends at the first snapshot that does not fit: no older one is kept instead.

    Args:
        size: "2T", "500G", "1.5TiB" (powers of 1024), or bytes. The attribute holds the bytes.
    """

    size: int

    def __init__(self, size: str | int) -> None:
        count = size_in_bytes(size) if isinstance(size, str) else as_int(size)
        if count is None or not 1 <= count <= _MAX_NUMBER:
            raise InvalidInputError(
                "KeepBytes: expected a size from 1 to 8P (2^53 bytes), such as '2T', '500G', '1.5TiB' or a number of "
                f"bytes, got {quoted(size)}"
            )
        object.__setattr__(self, "size", count)

    def __repr__(self) -> str:
        return f"KeepBytes({size_text(self.size)!r})"

    def reasons(self, current: Sequence[SnapshotLike], added: Iterable[int] = repeat(0)) -> Reasons:
        """Return the reason for each that fits.

        Args:
            added: of each, the bytes that it adds to those of all newer ones.
        """
        found, total, reason = Reasons(), 0, f"newest {size_text(self.size)}"
        for snapshot, size in zip(current, added, strict=False):
            total += size
            if found and total > self.size:
                break
            found[snapshot.id] = reason
        return found


_CLASSES = (
    KeepLast,
    KeepEvery,
    KeepSteps,
    KeepBest,
    KeepWithin,
    KeepHourly,
    KeepDaily,
    KeepWeekly,
    KeepMonthly,
    KeepYearly,
    KeepBytes,
)
_KINDS: dict[str, Callable[..., Policy]] = {kind.__name__: kind for kind in _CLASSES}


def apply(
    policies: Policy | Iterable[Policy], snapshots: Iterable[S], *, force: bool = False, needs: Needs | None = None
) -> list[Decision[S]]:
    """Decide which committed snapshots of one run stay, and why.

    Args:
        policies: ORed; reasons come in their order.
        snapshots: of one run, in any order.
        force: continue even if the policies keep nothing; tagged snapshots and the newest one stay even then.
        needs: called once if there is a `KeepBytes`.

    Returns:
        One decision per snapshot, oldest (lowest `seq`) first.

    Raises:
        InvalidInputError: the snapshots are of several runs; a value in `policies` is no policy. Unless forced, also:
            there are no policies, or there are snapshots and the policies alone keep none of them.
    """
    policies = check(policies)
    if not policies and not force:
        raise InvalidInputError("forget: no policy was given, so nothing would be kept; name one such as KeepLast(3)")
    oldest_first = sorted(snapshots, key=_age)
    runs = sorted({snapshot.run for snapshot in oldest_first})
    if len(runs) > 1:
        raise InvalidInputError(
            f"forget: expected snapshots of one run, got {', '.join(runs)}; apply policies run by run"
        )

    steps = current(oldest_first)
    by_policy = reasons_by_policy(policies, oldest_first, needs)
    if steps and not any(by_policy) and not force:
        raise InvalidInputError(
            f"forget: {describe(policies)} would keep none of the steps of run {runs[0]}, which has "
            f"{counted(len(steps), 'step')}; add a policy such as KeepLast(1), or pass force (--force)"
        )

    decisions = []
    for snapshot in oldest_first:
        reasons = [found[snapshot.id] for found in by_policy if snapshot.id in found]
        reasons += [f"tag {tag}" for tag in snapshot.tags]
        if snapshot is oldest_first[-1]:
            reasons.append("newest")
        decisions.append(Decision(snapshot, tuple(dict.fromkeys(reasons))))
    return decisions


def reasons_by_policy(policies: Sequence[Policy], snapshots: Sequence[S], needs: Needs | None) -> list[Reasons]:
    """Return the reasons that each policy gives to snapshots of one run; see `apply`."""
    steps = current(snapshots)
    found = [{} if isinstance(policy, KeepBytes) else policy.reasons(steps) for policy in policies]
    if any(isinstance(policy, KeepBytes) for policy in policies):
        if needs is None:
            raise InvalidInputError("KeepBytes: expected what each snapshot needs, got none")
        kept = {s.id for s in snapshots if s.tags}.union(*found)
        added = _added(needs(), [s.id for s in snapshots if s.id in kept], [s.id for s in steps])
        sized = [policy.reasons(steps, added) if isinstance(policy, KeepBytes) else {} for policy in policies]
        found = [reasons or by_size for reasons, by_size in zip(found, sized, strict=True)]
    return found


def _added(needs: Mapping[str, Mapping[str, int]], kept: Collection[str], names: Iterable[str]) -> list[int]:
    """Return the bytes that each of some snapshots adds to those of the ones before it, and of those that are kept."""
    seen: set[str] = set().union(*(needs[name] for name in kept))
    added = []
    for name in names:
        added.append(sum(size for key, size in needs[name].items() if key not in seen))
        seen.update(needs[name])
    return added


def current(snapshots: Iterable[S]) -> list[S]:
    """Return the newest snapshot of every step, newest first; superseded ones are left out."""
    by_step = {snapshot.step: snapshot for snapshot in sorted(snapshots, key=_age)}
    return sorted(by_step.values(), key=_age, reverse=True)


def stays_without_neighbours(policies: Iterable[Policy], step: int, interval: int) -> bool:
    """Return whether `step` certainly stays permanently, and the saves before it may not; it is then written full.

    Only `KeepEvery` and `KeepSteps` are certain. The choice of the others depends on later snapshots. A full snapshot
    pays only if the bases of its deltas would stay for it alone: not if `KeepEvery` keeps at least every second save.

    Args:
        interval: the number of steps from one save to the next.
    """
    for policy in policies:
        if isinstance(policy, KeepEvery) and step % policy.steps == 0 and policy.steps >= 3 * interval:
            return True
        if isinstance(policy, KeepSteps) and step in policy.steps:
            return True
    return False


def to_dict(policy: Policy) -> dict[str, Any]:
    """Return a policy as a plain dict for storage: its kind (the class name) and its fields."""
    (policy,) = check([policy])
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}  # type: ignore[arg-type]
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    return {"kind": type(policy).__name__, **plain}


def from_dict(stored: Mapping[str, Any]) -> Policy:
    """Return the policy of a dict that `to_dict` returned.

    Raises:
        FormatError: the kind is unknown (perhaps of a later release), or the fields do not fit the kind.
    """
    if not isinstance(stored, Mapping):
        raise FormatError(f"retention policy: expected a map, got {type(stored).__name__}")
    kind = stored.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise FormatError(
            f"retention policy: expected one of {', '.join(_KINDS)}, got {kind!r}; a later snapstore wrote it?"
        )
    try:
        return _KINDS[kind](**{name: value for name, value in stored.items() if name != "kind"})
    except (InvalidInputError, TypeError) as error:
        raise FormatError(f"retention policy {kind}: {error}") from error


def describe(policies: Iterable[Policy]) -> str:
    """Return the policies as a user would type them: "KeepLast(3), KeepEvery(steps=1000)"."""
    return ", ".join(map(repr, policies)) or "no policy"


def _age(snapshot: SnapshotLike) -> tuple[int, str]:
    """Return a sort key: oldest first."""
    return snapshot.seq, snapshot.id


def check(policies: Policy | Iterable[Policy]) -> list[Policy]:
    """Return a policy, or several, as a list.

    Raises:
        InvalidInputError: a value is no policy.
    """
    if type(policies) in _CLASSES:  # no subclass, which could not be read again
        return [policies]  # type: ignore[list-item]
    if isinstance(policies, str) or not isinstance(policies, Iterable):
        raise InvalidInputError(f"keep: expected policies such as KeepLast(3), got {quoted(policies)}")
    policies = list(policies)
    for policy in policies:
        if type(policy) not in _CLASSES:
            raise InvalidInputError(f"keep: expected policies ({', '.join(_KINDS)}), got {quoted(policy)}")
    return policies


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def utc(created: float) -> dt.datetime:
    """Return the UTC time of any float, clamped to the years 1 to 9999: a wrong clock must stop nothing."""
    try:
        return _EPOCH + dt.timedelta(seconds=created)
    except (OverflowError, ValueError):
        return (dt.datetime.max if created > 0 else dt.datetime.min).replace(tzinfo=dt.UTC)


def as_int(value: object) -> int | None:
    """Return an integer of Python, NumPy or torch as an int; None: it is no integer."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def named_step(step: object) -> str:
    """Return the text of a step or tag: NumPy's 3 is the same step as 3."""
    number = as_int(step)
    return quoted(step if number is None else number)


#: No number in a policy is larger; JSON and floats hold all up to this one.
_MAX_NUMBER = 2**53
_MAX_NAME_BYTES = 4096


def _is_short_text(name: str) -> bool:
    """Return whether a name can be stored: as UTF-8, and of at most _MAX_NAME_BYTES."""
    try:
        return len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _at_least_one(policy: str, name: str, value: object) -> int:
    number = as_int(value)
    if number is None or not 1 <= number <= _MAX_NUMBER:
        raise InvalidInputError(f"{policy}: expected {name} to be an integer from 1 to 2^53, got {quoted(value)}")
    return number


_UNITS_US = {"d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000}  # largest first
_DURATION = re.compile(
    r"(?:(?P<w>\d{1,9})w)?(?:(?P<d>\d{1,9})d)?(?:(?P<h>\d{1,9})h)?(?:(?P<m>\d{1,9})m)?(?:(?P<s>\d{1,9}(\.\d{1,6})?)s)?",
    re.ASCII,
)


def _parse_duration(duration: str | dt.timedelta | float) -> dt.timedelta:
    """Return a positive duration, exact to the microsecond."""
    try:
        if isinstance(duration, dt.timedelta):
            parsed = duration
        elif isinstance(duration, str) and (match := _DURATION.fullmatch(duration)):
            w, d, h, m = (int(match[unit] or 0) for unit in "wdhm")
            whole, _, fraction = (match["s"] or "0").partition(".")
            us = int(fraction.ljust(6, "0"))
            parsed = dt.timedelta(weeks=w, days=d, hours=h, minutes=m, seconds=int(whole), microseconds=us)
        elif (seconds := as_int(duration)) is not None:
            parsed = dt.timedelta(seconds=seconds)
        elif isinstance(duration, Real) and not isinstance(duration, bool):
            parsed = dt.timedelta(seconds=float(duration))
        else:
            parsed = dt.timedelta(0)
    except (OverflowError, ValueError):  # NaN, infinite, or longer than 2.7 million years
        parsed = dt.timedelta(0)
    if parsed <= dt.timedelta(0):
        raise InvalidInputError(
            "KeepWithin: expected a duration > 0 such as '2h', '7d', '1d12h', a timedelta or seconds, got "
            f"{quoted(duration)}"
        )
    return parsed


def _duration_text(duration: dt.timedelta) -> str:
    """Return the shortest text that `_parse_duration` reads as the same duration."""
    left_us = duration // dt.timedelta(microseconds=1)
    text = ""
    for unit, unit_us in _UNITS_US.items():
        count, left_us = divmod(left_us, unit_us)
        if unit == "s" and left_us:
            text += f"{count}.{left_us:06}".rstrip("0") + unit
        elif count:
            text += f"{count}{unit}"
    return text
