"""Joins beside everything else: no record is lost, revived or told wrongly when it is joined at the worst moment.

The schedules that the model of pages prints when a rule is dropped, each driven by hand; then every verb, stopped at
each of its operations while a join runs to its end, and a join that is stopped, killed or misled at each of its own.
"""

import random
import sys
from contextlib import nullcontext, suppress
from functools import cache
from itertools import count

import numpy as np
import pytest

from kit.actors import Actor
from kit.faults import CRASHES, FAILURES, Crash, FaultStore, one_thread
from kit.objects import clone, flip, keys_of
from kit.processes import ROOT
from kit.repositories import OPTIONS, check_clean, check_whole, created, created_like, opened, save, values
from kit.samples import SEED
from kit.schedules import collecting, forgetting, saving, tagging, unforgetting
from kit.tally import tally
from snapstore import (
    ConflictError,
    IntegrityError,
    InvalidInputError,
    KeepEvery,
    KeepLast,
    NotFoundError,
    Repository,
    SnapshotManager,
    StorageError,
)
from snapstore.catalog import config
from snapstore.catalog.pages import PageReader
from snapstore.errors import SnapstoreError
from snapstore.format import records
from snapstore.format.records import PAGES
from snapstore.protocol import claim, joining
from snapstore.protocol.liveness import this_session
from snapstore.storage.memory import MemoryStore

sys.path.append(str(ROOT / "tools"))
import reader


def join(store, run="a", at_least=1):
    with opened(store) as repository:
        return joining.join(repository.context, run, at_least=at_least)


def history():
    """a@0 to a@3, of which a@1 is forgotten and a@2 was swept; b@0, forked from a@0; a tag on a@0."""
    store = created()
    with opened(store) as repository:
        for step in range(4):
            save(repository, "a", step, step)
        save(repository, "b", 0, 50, parent="a@0")
        repository.forget_snapshots(["a@2"], force=True)
        repository.gc()
        repository.forget_snapshots(["a@1"], force=True)
        repository.tag("a@0", "good")
    return store


@cache
def _made():
    return history()


@pytest.fixture
def store():
    return clone(_made())


def states(store, run="a"):
    """Return (step, state, tags) of every snapshot of a run."""
    with opened(store) as repository:
        return [(s.step, s.state, tuple(s.tags)) for s in repository.view().snapshots(run, states=None)]


def loose(store, run="a"):
    return [key for key in keys_of(store) if key.startswith(f"snapshots/{run}/")]


def give_up(store):
    """Fence every session, as a gc does that sees them silent for an hour."""
    return Actor("gc", store, collecting(0.0), seen_dead=True).finish()


def clean(store, about=""):
    """Check that all that is committed or forgotten restores, and that a gc then leaves nothing that is not needed."""
    check_whole(store, about)
    give_up(store)
    check_clean(store, about)


# --- one after the other ---------------------------------------------------------------------------------------------


def test_a_join_changes_no_answer(store):
    before = states(store)
    result = join(store)
    assert (result.snapshots, result.pages) == (3, 1)  # the newest stays loose
    assert len(loose(store)) == 1
    assert states(store) == before
    assert join(store) == joining.JoinResult()
    clean(store)


def test_a_long_run_under_policies(tmp_path, monkeypatch):
    """Managers join behind their commits; the store has few objects, and answers as one without pages."""
    answers = {}
    for features in ((PAGES,), ()):
        monkeypatch.setattr(config, "NEW_FEATURES", features)
        root = tmp_path / str(len(features))
        with SnapshotManager(root, run="a", keep=[KeepLast(3), KeepEvery(100)]) as snapshots:
            for step in range(300):
                snapshots.save(step, {"w": np.full(4, step)}, metrics={"loss": 1 / (1 + step)})
                snapshots.wait_until_finished()
        with Repository.open(root) as repository:
            view = repository.view()
            answers[len(features)] = [
                (s.step, s.state, s.seq, s.tags, s.metrics, s.policy, s.reason) for s in view.snapshots(states=None)
            ]
            assert repository.check("restore").ok
            assert repository.restore("a@100")["w"].tolist() == [100] * 4
            count_of_records = sum(1 for _ in repository.context.store.list("snapshots/"))
        if features:
            assert count_of_records < 300
            assert sum(1 for _ in (root / "pages").rglob("[0-9][0-9]")) in (3, 4, 5)
    assert answers[1] == answers[0]


def test_many_joins_make_few_volumes(store):
    with opened(store) as repository:
        for step in range(4, 80):
            save(repository, "a", step, step % 4)
            joining.join(repository.context, "a", at_least=1)
    pages = [key for key in keys_of(store) if key.startswith("pages/")]
    assert len(pages) == 76
    assert len([key for key in keys_of(store) if key.startswith("volumes/")]) == 1 + 1 + 4  # 64, 8 and 4 of one page
    clean(store)


def test_everything_goes_on_with_joined_records(store):
    join(store)
    with opened(store) as repository:
        repository.unforget("a@1")
        repository.tag("a@1", "good")
        assert repository.snapshot("a@good").step == 1
        assert repository.snapshot("a@0").tags == []
        with pytest.raises(NotFoundError, match="cannot come back"):
            repository.unforget("a@2")
        repository.untag("a@1", "good")
        repository.forget([KeepLast(1)], run="a")
        repository.gc()
    join(store)
    assert [(step, state) for step, state, _ in states(store)] == [
        (0, "swept"), (1, "swept"), (2, "swept"), (3, "committed"),
    ]  # fmt: skip
    with opened(store) as repository:
        assert save(repository, "a", 4, 4).seq == repository.snapshot("a@3").seq + 1
    clean(store)


def test_the_highest_number_may_be_that_of_a_grave(store):
    with opened(store) as repository:
        last = save(repository, "a", 4, 4)
        repository.forget_snapshots(["a@4"], force=True)
        repository.gc()
    join(store)
    with opened(store) as repository:
        assert save(repository, "a", 5, 5).seq == last.seq + 1


def test_repositories_without_the_feature_have_no_pages(monkeypatch):
    monkeypatch.setattr(config, "NEW_FEATURES", ())
    store = history()
    assert join(store) == joining.JoinResult()
    assert not [key for key in keys_of(store) if key.startswith(("pages/", "volumes/"))]


def test_damaged_and_lost_pages_are_mended(store):
    before = states(store)
    join(store)
    for how in ("damaged", "gone"):
        made = clone(store)
        key = next(key for key in keys_of(made) if key.startswith("pages/"))
        flip(made, key, -1) if how == "damaged" else made.delete([key])
        with opened(made) as repository:
            assert [p.key for p in repository.check().problems] == [key]
            assert [a.kind for a in repository.repair(apply=True).actions] == ["mend", "index"]
            assert repository.check("restore").ok
        assert states(made) == before
        clean(made)


def test_the_reader_of_the_format_finds_the_same(tmp_path, capsys):
    """tools/reader.py, which was written from docs/format.md: whole pages, a damaged and a missing one, and mended."""
    Repository.create(tmp_path / "r", chunk_bytes=1024).close()
    with opened(tmp_path / "r") as repository:
        for step in range(20):
            save(repository, "a", step, step, parent="a@0" if step == 5 else None)
            if step % 3 == 2:
                repository.forget_snapshots([f"a@{step - 1}"], force=True)
                repository.gc() if step % 2 else None
            joining.join(repository.context, "a", at_least=4)
        wanted = repository.view().snapshots("a", states=None)
        rows = [(s.step, s.state, s.seq, s.revision, s.parent, s.id, s.reason) for s in wanted]

        def found():
            records = reader.Repository(tmp_path / "r").records()
            fields = ("step", "state", "seq", "revision", "parent", "id", "reason")
            return [tuple(record[name] for name in fields) for record in records]

        assert found() == rows
        kept = reader.Repository(tmp_path / "r")
        state = reader.Snapshot(kept, next(r for r in kept.records() if r["step"] == 3)).state()
        assert state["version"] == 3
        first, second = sorted((tmp_path / "r" / "pages").rglob("0[01]"))
        first.unlink()
        second.write_bytes(second.read_bytes()[:-1])
        assert found() == rows
    with opened(tmp_path / "r") as repository:
        assert [action.kind for action in repository.repair(apply=True).actions] == ["mend", "mend", "index"]
    assert found() == rows
    assert "pages/a/0000000/01" in capsys.readouterr().err


def test_while_a_page_is_damaged_nobody_revises(store):
    """Without its volume a damaged page is no help: its records are loose."""
    Actor("join", store, join).until("put", "volumes/").stop()
    before = states(store)
    flip(store, next(key for key in keys_of(store) if key.startswith("pages/")), -1)
    assert states(store) == before
    with opened(store) as repository:
        for verb in (lambda: repository.unforget("a@1"), lambda: repository.tag("a@3", "x"), repository.gc):
            with pytest.raises(IntegrityError, match=r"pages/a/0000000/00: "):
                verb()
        with pytest.raises(IntegrityError):
            joining.join(repository.context, "a", at_least=1)
        save(repository, "a", 9, 9)
        assert repository.repair(apply=True).actions[0].kind == "mend"
        repository.unforget("a@1")
    clean(store)


# --- schedules of the model ------------------------------------------------------------------------------------------


def test_an_unforget_that_stalls_until_its_key_is_free_again(store):
    late = Actor("U", store, unforgetting("a@1")).until("put", "snapshots/a/")
    give_up(store)  # sweeps a@1
    assert join(store).deleted
    with pytest.raises(ConflictError, match="another process revised it first"):
        late.finish()
    assert (1, "swept", ()) in states(store)
    clean(store)


def test_a_save_whose_fence_is_joined_commits_nothing(store):
    late = Actor("S", store, saving("a", 9, 9), seen_dead=True).until("put", "snapshots/a/")
    give_up(store)
    join(store)
    with pytest.raises(ConflictError, match=r"nothing of this save was committed"):
        late.finish()
    assert (9, "aborted", ()) in states(store)
    clean(store)


def test_a_save_that_is_joined_after_its_put_is_told_that_it_is_committed(store):
    """Its PUT had no answer for an hour; a gc has fenced it too late, and a join has deleted its record."""
    late = Actor("S", store, saving("a", 9, 9), seen_dead=True).until("put", "snapshots/a/")
    late.step()
    assert (9, "committed", ()) in states(store)
    give_up(store)
    with opened(store) as repository:
        save(repository, "a", 10, 10)  # so that a@9 is not the newest
    join(store)
    assert not [key for key in loose(store) if "/000000000009-" in key]
    assert late.finish().step == 9
    clean(store)


class Deaf(MemoryStore):
    """Stores a new record, and does not answer: its puts and gets fail. At the fourth put, others have joined it."""

    def __init__(self, made):
        super().__init__()
        self._objects, self.puts = made._objects, 0

    revises = staticmethod(lambda repository: None)

    def _fails(self, key):
        return "/000000000009-" in key and self.puts < 5

    def put(self, key, data):
        if not key.startswith("snapshots/"):
            return super().put(key, data)
        self.puts += 1
        is_new = self.puts == 1 or not self._fails(key)
        if is_new:
            super().put(key, data)
        if self.puts == 4:
            honest = MemoryStore()
            honest._objects = self._objects
            give_up(honest)
            with opened(honest) as repository:
                save(repository, "a", 10, 10)  # so that a@9 is not the newest
                self.revises(repository)
            join(honest)
            assert not [key for key in loose(honest) if "/000000000009-" in key]
        if self._fails(key):
            raise StorageError(f"{key}: no answer")
        return None

    def get(self, key, **options):
        if key.startswith("snapshots/") and self._fails(key):
            raise StorageError(f"{key}: no answer")
        return super().get(key, **options)


@pytest.mark.parametrize("revised", ["", "tagged", "forgotten"])
def test_a_save_that_fails_finds_that_it_was_committed_and_joined(store, revised, monkeypatch):
    monkeypatch.setattr(claim.time, "sleep", lambda _: None)
    deaf = Deaf(store)
    if revised == "tagged":
        deaf.revises = lambda repository: repository.tag("a@9", "good")
    elif revised == "forgotten":
        deaf.revises = lambda repository: repository.forget_snapshots(["a@9"])
    with opened(deaf) as repository:
        save(repository, "a", 9, 9)
    assert deaf.puts == 5
    wanted = "forgotten" if revised == "forgotten" else "committed"
    assert [state for step, state, _ in states(store) if step == 9] == [wanted]
    clean(store)


@pytest.mark.parametrize("tagged", [False, True])
def test_a_save_that_is_tried_again_deletes_nothing_of_one_that_was_joined(store, tagged, monkeypatch):
    """The look behind its failure has no answer either, or others have tagged what it has committed."""
    monkeypatch.setattr(claim.time, "sleep", lambda _: None)
    deaf, real, failed = Deaf(store), PageReader.look, []
    if tagged:
        deaf.revises = lambda repository: repository.tag("a@9", "good")

    def look(self, run, **options):
        if not tagged and deaf.puts == 5 and self._store is deaf and not failed:
            failed.append(run)
            raise StorageError("no answer")
        return real(self, run, **options)

    monkeypatch.setattr(PageReader, "look", look)
    with (
        SnapshotManager(deaf, run="a", on_error="warn", options=OPTIONS, async_save=False) as snapshots,
        suppress(StorageError),
    ):
        snapshots.save(9, values("a", 9), metadata=["a", 9])
    assert next(state for step, state, _ in states(store) if step == 9) == "committed"
    clean(store)


def test_a_config_is_reconstructed_with_its_pages(store):
    before = states(store)
    join(store)
    store.delete(["config"])
    with opened(store, damaged=True) as repository:
        repository.repair(apply=True)
    assert states(store) == before
    clean(store)


def test_large_records_stay_loose(store):
    with opened(store) as repository:
        save(repository, "a", 4, 4, tags=())
        repository.save({"x": np.zeros(2)}, run="a", step=5, metadata="x" * 200_000)
        save(repository, "a", 6, 6)
    join(store)
    assert [key for key in loose(store) if "/000000000005-" in key]


def test_a_join_leaves_alone_what_sessions_announce(store):
    saving_now = Actor("S", store, saving("a", 9, 9)).until("put", "snapshots/a/")
    saving_now.step()
    with opened(store) as repository:
        save(repository, "a", 10, 10)
    assert join(store).snapshots == 4  # a@0 to a@3, not a@9
    assert [key for key in loose(store) if "/000000000009-" in key]
    assert saving_now.finish().step == 9
    assert join(store).snapshots == 1
    clean(store)


def test_a_fence_copies_what_rules(store):
    """An un-forget has died behind its PUT: its record is void, as a page says that the snapshot was swept."""
    source, store = store, created_like(store)
    with opened(source) as repository:
        repository.unforget("a@1")
        repository.copy(run="a", to=store)
    with opened(store) as repository:
        repository.forget_snapshots(["a@1"], force=True)
    late = Actor("U", store, unforgetting("a@1")).until("put", "snapshots/a/")
    give_up(store)
    join(store)
    late.step()
    late.stop()
    assert (1, "swept", ()) in states(store)

    def copy(target):
        with opened(source) as repository:
            return repository.copy(["a@1"], to=target)

    copying = Actor("C", store, copy, seen_dead=True).until("put", "snapshots/a/")
    give_up(store)
    assert (1, "swept", ()) in states(store)
    copying.finish()
    assert (1, "committed", ()) in states(store)
    clean(store)


def test_a_tag_is_not_taken_for_a_snapshot_that_was_forgotten_and_joined(store):
    late = Actor("T", store, tagging("a@3", "good")).until("put", "snapshots/a/")
    with opened(store) as repository:
        save(repository, "a", 4, 4)
        repository.forget_snapshots(["a@3"], force=True)
    join(store)
    with pytest.raises(SnapstoreError, match="is forgotten"):
        late.finish()
    assert (0, "committed", ("good",)) in states(store)
    clean(store)


def test_a_gc_whose_sweep_comes_too_late_deletes_nothing(store):
    late = Actor("G", store, collecting()).until("put", "snapshots/a/")
    with opened(store) as repository:
        repository.unforget("a@1")
    join(store)
    late.finish()
    assert (1, "committed", ()) in states(store)
    clean(store)


def test_a_policy_whose_revision_is_void_decides_again(store):
    with opened(store) as repository:
        repository.unforget("a@1")
    late = Actor("F", store, forgetting("a@1")).until("put", "snapshots/a/")
    with opened(store) as repository:
        repository.tag("a@1", "good")
    join(store)
    assert late.finish().forgotten == []
    assert (1, "committed", ("good",)) in states(store)
    clean(store)


def test_a_revision_that_is_joined_before_it_is_read_back(store):
    late = Actor("U", store, unforgetting("a@1")).until("put", "snapshots/a/")
    late.step()
    join(store)
    assert [key for key in loose(store) if "/000000000001-" in key] == []
    assert late.finish().state == "committed"
    clean(store)


def test_two_joiners_of_one_page(store):
    other = Actor("J", store, join).until("put", "pages/")
    join(store)
    assert other.finish().snapshots == 0
    assert [key for key in keys_of(store) if key.startswith("pages/")] == ["pages/a/0000000/00"]
    clean(store)


def test_a_page_that_is_lost_while_its_joiner_works_costs_nothing(store):
    before = states(store)
    late = Actor("J", store, join).until("put", "volumes/")
    store.delete(["pages/a/0000000/00"])
    with pytest.raises(StorageError, match="stay as they are"):
        late.finish()
    assert states(store) == before


def announce(store):
    """Put the session of a rewrite of a@0."""
    with opened(store) as repository:
        key = repository.snapshot("a@0").revised().key
        name = records.new_id()
        repository.context.store.put(f"sessions/{name}", records.encode(this_session(name, key)))
    return f"sessions/{name}"


def test_a_page_whose_number_was_given_again_before_the_volume(store):
    """The other joiner has left a@0 out, as a rewrite was announced: only its loose records say what a@0 is."""
    before = states(store)
    late = Actor("J", store, join).until("put", "volumes/")
    store.delete(["pages/a/0000000/00"])
    announce(store)
    assert join(store).snapshots == 2
    with pytest.raises(StorageError, match="stay as they are"):
        late.finish()
    assert states(store) == before


def test_a_number_that_a_volume_shows_is_not_given_again(store):
    before = states(store)
    late = Actor("J", store, join).until("delete", "snapshots/")
    store.delete(["pages/a/0000000/00"])
    announce(store)
    with pytest.raises((IntegrityError, StorageError), match="pages/a/0000000/00"):
        join(store)
    late.finish()
    assert states(store) == before


def test_a_record_that_an_older_page_makes_void_gets_into_no_page(store):
    """An un-forget has died behind its PUT; a later page would not revive the snapshot, but its author believe so."""
    late = Actor("U", store, unforgetting("a@1")).until("put", "snapshots/a/")
    give_up(store)
    join(store)
    late.step()
    join(store)
    with pytest.raises(ConflictError, match="revised it first"):
        late.finish()
    assert (1, "swept", ()) in states(store)


# --- everywhere ------------------------------------------------------------------------------------------------------

VERBS = {
    "save": saving("a", 9, 9),
    "save a fork": saving("c", 0, 60, parent="a@0"),
    "forget": forgetting(),
    "forget one": forgetting("a@1", "a@3"),
    "unforget": unforgetting("a@1"),
    "tag": tagging("a@3", "good"),
    "gc": collecting(),
    "gc of the dead": collecting(0.0),
    "join": join,
    "recode": lambda store: _recode(store),
    "compact": lambda store: _compact(store),
    "copy": lambda store: _copy(store),
}


def _recode(store):
    with opened(store) as repository:
        return repository.recode()


def _compact(store):
    with opened(store) as repository:
        return repository.compact()


@cache
def _source():
    return history()


def _copy(store):
    with opened(clone(_source())) as repository:
        return repository.copy(run="b", to=store)


def started(verb, store):
    return Actor(verb, store, VERBS[verb], seen_dead="dead" in verb)


def ends(actor):
    """Run an actor to its end; it may lose a race, or find its snapshot gone."""
    with suppress(ConflictError, NotFoundError, InvalidInputError, StorageError):
        actor.finish()


@pytest.mark.sampled(4)
@pytest.mark.no_cover
@pytest.mark.parametrize("verb", VERBS)
def test_a_join_at_every_stop_of_a_verb(verb, monkeypatch):
    one_thread(monkeypatch)
    rng = random.Random(f"{SEED} {verb}")
    first = rng.randrange(4)
    for stop in count(first, 4):
        tally("stops")
        made = history() if verb == "copy" else clone(_made())
        actor = started(verb, made)
        while not actor.ended and actor.steps < stop:
            actor.step()
        is_over = actor.ended
        join(made)
        join(made, "b")
        ends(actor)
        join(made)
        clean(made, f"{verb} at {stop}")
        if is_over:
            return


@pytest.mark.no_cover
@pytest.mark.parametrize("asked", ["a run", "all runs"])
def test_a_reader_misses_nothing_while_records_are_joined(asked, monkeypatch):
    one_thread(monkeypatch)

    def read(store):
        with opened(store) as repository:
            view = repository.context.index.refresh("a" if asked == "a run" else None)
            assert not view.unknown("a")
            return [(s.step, s.state) for s in view.snapshots("a", states=None)]

    wanted = read(_made())
    for stop in count():
        made = clone(_made())
        reading = Actor("R", made, read)
        while not reading.ended and reading.steps < stop:
            reading.step()
        if reading.ended:
            return
        join(made)
        assert reading.finish() == wanted, stop


@pytest.mark.sampled(4)
@pytest.mark.no_cover
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_at_every_stop_of_a_join(verb, monkeypatch):
    one_thread(monkeypatch)
    for stop in count():
        tally("stops")
        made = history() if verb == "copy" else clone(_made())
        actor = Actor("join", made, join)
        while not actor.ended and actor.steps < stop:
            actor.step()
        is_over = actor.ended
        ends(started(verb, made))
        ends(actor)
        clean(made, f"{verb} while a join stands at {stop}")
        if is_over:
            return


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", [*CRASHES, *FAILURES, "torn", "late"])
def test_a_join_that_fails_at_every_operation(mode, monkeypatch):
    one_thread(monkeypatch)
    for at in count():
        tally("faults")
        made = clone(_made())
        faulty = FaultStore(made, at, mode)
        with suppress(Crash, SnapstoreError):
            join(faulty)
        faulty.heal()
        if mode == "torn":  # half of a page is damage
            with opened(made) as repository:
                repository.repair(apply=True)
        check_whole(made, f"{mode} at {at} of {len(faulty.log)}: {faulty.log[at : at + 1]}")
        join(made)
        assert len(loose(made)) == 1, (mode, at)
        clean(made, f"{mode} at {at}, joined again")
        if not faulty.fired:
            return


class Forgetful(MemoryStore):
    """Does not store the k-th object that is put."""

    def __init__(self, made, at):
        super().__init__()
        self._objects, self.left = made._objects, at

    def put(self, key, data):
        self.left -= 1
        if self.left != -1:
            super().put(key, data)


@pytest.mark.parametrize("at", range(3))
def test_a_put_that_is_not_stored(store, at):
    before = states(store)
    lying = Forgetful(store, at)
    with pytest.raises(StorageError, match="stay as they are") if at < 2 else nullcontext():
        join(lying)
    assert states(store) == before
    join(store)
    assert states(store) == before
    clean(store)
