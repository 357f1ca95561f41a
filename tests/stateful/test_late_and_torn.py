"""Requests that take effect late, stall, or leave half an object cost no committed snapshot.

None of our stores tears an object, and S3 does not either. A file system may, if it loses power or is copied.
"""

from __future__ import annotations

import pytest
from test_crash_points import MAY_FORGET, VERBS, check_outcome, operations, run_until_fault

from kit.faults import Crash, FaultStore, one_thread
from kit.objects import clone
from kit.repositories import OPTIONS, check_clean, check_whole, committed, opened, same, save, values, version_of
from kit.samples import sampled
from kit.stalls import Stalling, others_meanwhile
from snapstore import KeepLast, Repository, SnapstoreError

pytestmark = pytest.mark.no_cover
#: Verbs that put or delete.
WRITING = [verb for verb in VERBS if verb not in ("rebuild", "restore")]


#: Verb -> what another process forgets meanwhile: a base of the verb, or its subject.
STALLED = {"delta save": "a@3", "skip save": "a@4", "forget": "a@2", "recode": "a@2", "compact": "a@8"}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("meanwhile", ["gc", "forget and gc", "forget and fence"])
@pytest.mark.parametrize("verb", STALLED)
def test_stalled(verb, meanwhile, where, monkeypatch):
    """One operation lasts until others have done all their work, then succeeds: nothing dangles, no space is lost."""
    one_thread(monkeypatch, index=False)
    prepare, act = VERBS[verb]
    before = committed(clone(prepare()))
    total = operations(verb)
    for k in sampled(total, 50):
        inner = clone(prepare())
        store = Stalling(inner, others_meanwhile(inner, STALLED[verb])[meanwhile], where)
        repository = Repository.open(store, options=OPTIONS)
        store.stalls_at = len(store.log) + k
        try:
            outcome = act(repository)
        except SnapstoreError as error:
            outcome = error
        repository.close()
        store.die()
        about = f"{verb}, {meanwhile} {where} {k} of {total}: {store.log[-1]}, {outcome!r}"
        after = committed(inner)
        if meanwhile == "gc":  # it waits for all live sessions, and blocks none
            assert not isinstance(outcome, SnapstoreError), about
        if verb in ("delta save", "skip save"):
            assert (after.keys() - before.keys()) == (set() if isinstance(outcome, SnapstoreError) else {outcome.id}), (
                about
            )
        gone = {(before[name][1][0], before[name][0]) for name in before.keys() - after.keys()}
        run, step = STALLED[verb].split("@")
        assert verb == "forget" or gone == (set() if meanwhile == "gc" else {(run, int(step))}), about
        check_whole(inner, about)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("others", ["alone", "after a gc"])
@pytest.mark.parametrize("verb", WRITING)
def test_late(verb, others, monkeypatch):
    """The process lives on, and never learns that its request was done; or others collect first, and it dies."""
    one_thread(monkeypatch, index=False)
    prepare = VERBS[verb][0]
    before = committed(clone(prepare()))
    total = operations(verb)
    for k in sampled(total, 18):
        inner = clone(prepare())
        store, repository, outcome = run_until_fault(verb, inner, k, "late")
        about = f"{verb}, late at {k} of {total}: {store.log[k - 1]}, {outcome}"
        if others != "alone":
            with opened(inner) as other:
                other.gc()
                other.gc()
        store.heal()
        if others != "alone":
            repository.close()
            store.die()
        check_outcome(verb, before, inner, outcome, about)
        with opened(inner) if others != "alone" else repository as living:
            save(living, "a", 800, 800)
            living.gc()
            assert living.gc().waiting_for == [], about
        check_clean(inner, about)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("verb", WRITING)
def test_torn(verb, monkeypatch):
    """Snapshots that were there restore; check names torn objects; repair replaces them, and space comes back."""
    one_thread(monkeypatch, index=False)
    prepare = VERBS[verb][0]
    before = committed(clone(prepare()))
    store = FaultStore(clone(prepare()))
    with opened(store) as repository:
        begin = len(store.log)
        VERBS[verb][1](repository)
    puts = [k for k, (name, _) in enumerate(store.log[begin:]) if name == "put"]
    for k in (puts[i] for i in sampled(len(puts), 3)):
        inner = clone(prepare())
        store, repository, outcome = run_until_fault(verb, inner, k, "torn")
        about = f"{verb}, torn at {k}: {store.log[-1]}, {outcome}"
        assert isinstance(outcome, Crash), about
        repository.close()
        torn = store.log[-1][1]
        with opened(inner) as repository:
            said = "".join(repository.view().damaged) or None  # the record is torn, so its snapshot is not listed
        try:
            if said is None:
                _check_whole(inner, before, verb, about)
        except SnapstoreError as error:
            said = str(error)
        if said is not None:
            assert torn in said, f"{about}: {said}"
            with opened(inner) as repository:
                problems = repository.check("data").problems
                assert any(torn in str(problem) for problem in problems), f"{about}: {problems}"
                assert repository.repair(apply=True, drop=True, purge=True).ok, about
            _check_whole(inner, before, verb, about)
        with opened(inner) as repository:
            repository.repair(apply=True, drop=True, purge=True)
            if torn.startswith("policies/"):  # only the user knows the policies
                repository.set_policies("a", [KeepLast(2)])
            for snapshot in repository.snapshots():
                if snapshot.metadata is None:  # its record was torn, and was reconstructed from its manifests
                    repository.restore(f"id:{snapshot.id}")
                    for tag in snapshot.tags:
                        repository.untag(f"id:{snapshot.id}", tag)
                    repository.forget_snapshots([f"id:{snapshot.id}"], force=True)
            repository.gc()
            repository.repair(apply=True, drop=True, purge=True)
            repository.gc()
        _check_torn_is_gone(inner, torn, about)


def _check_torn_is_gone(inner, torn, about):
    with opened(inner) as repository:
        if any(snapshot.metadata is None for snapshot in repository.view().snapshots(states=("forgotten",))):
            found = repository.check("restore")
            assert found.problems == [], about
            return
    check_clean(inner, about)


def _check_whole(inner, before, verb, about):
    """Committed snapshots restore; a save and a gc work."""
    with opened(inner) as repository:
        for snapshot in repository.snapshots():
            if snapshot.id in before:
                assert same(repository.restore(f"id:{snapshot.id}"), values(*version_of(snapshot))), about
        there = {snapshot.id for snapshot in repository.snapshots()}
        assert verb in MAY_FORGET or before.keys() <= there, about
        save(repository, "a", 900, 900)
        repository.gc()
