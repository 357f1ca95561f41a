"""A verb that only reads reports no damage, whatever other processes rewrite or delete at any of its operations.

Its result is that of before or of after the change; if a snapshot is deleted, it may raise NotFoundError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, reduce
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kit import shell
from kit.actors import Actor
from kit.faults import Unreadable, one_thread
from kit.objects import clone, keys_of
from kit.repositories import created, opened, same, values
from kit.samples import sampled
from kit.schedules import collecting, forgetting
from kit.stalls import Stalling
from snapstore import NotFoundError, Repository
from snapstore.cli.app import Shell
from snapstore.storage.memory import MemoryStore


def state(step: int) -> dict[str, Any]:
    """Tensors, some larger than the plain values, which are stored as pages."""
    wide = np.random.default_rng(0).standard_normal(20_000)
    wide[::100] += step
    return values("a", step) | {"wide": wide, "losses": [1 / (step + i) for i in range(1, 8_000)]}


def shown(repository: Repository) -> Any:
    """Return what the shell's `show` says of a@1."""
    with mock.patch.object(Shell, "repository", return_value=nullcontext(repository)):
        found = shell.invoke(["show", "a@1", "--json", "--repo", "any"])
    if "deleted by a gc" in found.stderr:
        raise NotFoundError(found.stderr)
    assert "cannot be shown" not in found.stderr, found.stderr
    printed = json.loads(found.stdout)
    return printed["snapshot"]["state"], printed["tensors"], len(printed["plain"]), repr(printed["plain"])


def leaf(name: str) -> Any:
    """Return the tensor of a@1 under a dotted name."""
    return reduce(dict.__getitem__, name.split("."), state(1))


#: a@0 is the base of the others. Once it is forgotten and collected, a compact rewrites a@1 and a@2.
VERBS: dict[str, Callable[[Repository], Any]] = {
    "stats": lambda r: [(s.snapshots, s.logical_bytes, s.groups, s.chunks, s.depths) for s in [r.stats()]],
    "diff": lambda r: [(t.path, t.status, t.changed_share) for t in r.diff("a@1", "a@2").tensors],
    "first difference": lambda r: (found := r.first_difference("a@1", "a@2")) and (found.path, found.index),
    "restore": lambda r: same(r.restore("a@1"), state(1)),
    "tensors": lambda r: [(name, same(value, leaf(name))) for name, value in r.named_tensors("a@1")],
    "check": lambda r: r.check("restore").problems,
    "show": shown,
}


def forget(repository: Repository) -> None:
    """Delete a@1 and its packs."""
    repository.forget_snapshots(["a@1"])
    repository.gc()


def rewrite(repository: Repository) -> None:
    """Give a@1 and a@2 other packs and manifests."""
    repository.forget_snapshots(["a@0"])
    assert repository.compact().rewritten
    repository.gc()


@cache
def history() -> MemoryStore:
    store = created()
    with opened(store) as repository:
        for step in range(3):
            repository.save(state(step), run="a", step=step)
    return store


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", [forget, rewrite])
@pytest.mark.parametrize("verb", VERBS)
def test_another_process_changes_what_is_read(verb, change, monkeypatch):
    one_thread(monkeypatch, index=False)
    dry = Stalling(clone(history()), lambda: None, "before")
    with opened(dry) as repository:
        first = len(dry.log)
        expected = [VERBS[verb](repository)]
        total = len(dry.log) - first
    with opened(clone(history())) as repository:
        change(repository)
        try:
            expected.append(VERBS[verb](repository))
        except NotFoundError:
            assert change is forget
    for k in sampled(total, 3 + total // 5):
        inner = clone(history())

        def meanwhile(store=inner):
            with opened(store) as other:
                change(other)

        store = Stalling(inner, meanwhile, "before")
        with opened(store) as repository:
            store.stalls_at = first + k
            try:
                assert VERBS[verb](repository) in expected, f"{verb} at {k} of {total}: {store.log[first + k]}"
            except NotFoundError:
                assert change is forget


def test_a_note_that_one_gc_removes_and_another_puts_again_is_no_damage(actors):
    inner = clone(history())
    forgetting("a@1")(inner)
    actors.append(Actor("G", inner, collecting()).until("delete", ".wait"))
    (note,) = (key for key in keys_of(inner, "gc/") if key.endswith(".wait"))
    with opened(Unreadable(inner, note, times=2, how="missing")) as repository:
        assert repository.check("metadata").problems == []


class Doubtful(Stalling):
    """A store that once denies that it has a pack."""

    denied = ""

    def _act(self, name: str, key: str, effect: Callable[[], Any]) -> Any:
        if name == "stat" and key.startswith("packs/") and not self.denied:
            self.denied = key
            raise NotFoundError(f"{key}: no such object (injected)")
        return super()._act(name, key, effect)


def test_a_pack_that_is_put_after_the_packs_were_listed_is_looked_for_twice():
    inner = clone(history())

    def meanwhile() -> None:
        with opened(inner) as other:
            rewrite(other)

    store = Doubtful(inner, meanwhile, "before")
    with opened(store) as repository:
        dry = Stalling(clone(inner), lambda: None, "before")
        with opened(dry) as other:
            first = len(dry.log)
            other.check("metadata")
            after = next(i for i, asked in enumerate(dry.log[first:]) if asked == ("list", "gc/"))
        store.stalls_at = len(store.log) + after
        assert repository.check("metadata").problems == []
    assert store.denied
