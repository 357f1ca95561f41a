"""Explore all states that some actors can reach, one step of one actor at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

S = TypeVar("S", bound=Hashable)


def explore(
    first: S, steps: Callable[[S], Iterable[tuple[str, S]]], holds: Callable[[S], bool], limit: int = 5_000_000
) -> tuple[list[str] | None, int]:
    """Return (a schedule that breaks the invariant, or None; the number of states seen).

    Raises:
        RuntimeError: there are more states than `limit`.
    """
    came: dict[S, tuple[str, S] | None] = {first: None}  # the step that led there, and from where
    stack = [first]
    with _uncollected():
        while stack:
            state = stack.pop()
            if not holds(state):
                return _schedule(came, state), len(came)
            for name, after in steps(state):
                if after not in came:
                    came[after] = (name, state)
                    stack.append(after)
            if len(came) > limit:
                raise RuntimeError(f"more than {limit} states")
    return None, len(came)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let Python's collector rest: it would look at all states again and again, and none is in a cycle."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _schedule(came: dict[S, tuple[str, S] | None], state: S) -> list[str]:
    """Return the steps that led to a state."""
    names: list[str] = []
    while (step := came[state]) is not None:
        name, state = step
        names.append(name)
    return names[::-1]


def report(rules: Mapping[str, str], explore_without: Callable[[frozenset[str]], tuple[list[str] | None, int]]) -> None:
    """Print what a model finds with all rules, and without each of them."""
    for rule in ("", *rules):
        broken, count = explore_without(frozenset([rule]) - {""})
        print(f"{'without: ' + rules[rule] if rule else 'all rules'}: {count} states")
        print(f"    {' | '.join(broken) if broken else 'the invariant holds'}")
