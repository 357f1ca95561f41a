"""Several ranks save one snapshot, whole or not at all, and no rank reports a commit that the record does not show."""

from __future__ import annotations

import threading

import pytest

from kit.local_ranks import MessageFaults
from kit.objects import keys_of
from kit.ranks import LocalJob, of_all, save_shared, together
from kit.repositories import check_clean, created, opened
from snapstore import InvalidInputError, NotFoundError, RanksError, StorageError
from snapstore.format.records import ManifestRef
from snapstore.save.ranks.roots import READS_AT_ONCE, ChildHeaders

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_ranks_commit_one_snapshot(count):
    store = created()
    with LocalJob(store, count) as job:
        for step in range(4):
            found = job.save("a", step, step)
            assert all(snapshot == found[0] for snapshot in found), found
            assert found[0].step == step
        assert found[0].depth > 0, "no rank builds on the snapshot before"
        assert found[0].bases == [job.members[0].repository.snapshots("a")[2].id]
        left = [key for key in job.ranks.keys if not key.startswith(("2/", "3/"))]
        assert left == [], "messages of old saves stay"
    check_clean(store, expected=of_all(count))
    with opened(store) as repository:
        assert repository.gc().deleted_objects == 0


def test_messages_are_small():
    store = created()
    with LocalJob(store, 3) as job:
        job.save("a", 0, 0)
        before = dict(job.ranks.sent_bytes)
        job.save("a", 1, 1)
        assert all(job.ranks.sent_bytes[rank] - before[rank] < 2048 for rank in range(3))


class StoreOfRank:
    """The view that one rank has of a store that all ranks share; it calls `before` at each put and read."""

    def __init__(self, store, before):
        self._store, self._before = store, before

    def __getattr__(self, name):
        call = getattr(self._store, name)
        if name not in ("put", "get", "get_range"):
            return call

        def instead(key, *args, **options):
            self._before(name, key)
            return call(key, *args, **options)

        return instead


def test_rank_0_reads_headers_while_another_rank_still_writes(monkeypatch):
    """Rank 2 puts its manifests only after rank 0 has read one of rank 1."""
    monkeypatch.setattr("snapstore.save.ranks.together.LOOK_S", 0.02)
    store, names, was_read, in_time = created(), set(), threading.Event(), []

    def of_0(verb, key):
        if verb == "get_range" and key in names:
            was_read.set()

    def of_1(verb, key):
        if verb == "put" and key.startswith("manifests/"):
            names.add(key)

    def of_2(verb, key):
        if verb == "put" and key.startswith("manifests/"):
            in_time.append(was_read.wait(10))

    found = save_shared([StoreOfRank(store, before) for before in (of_0, of_1, of_2)], "a", 0, 0)
    assert len({snapshot.id for snapshot in found}) == 1, found
    assert in_time
    assert all(in_time)
    check_clean(store)


def test_a_save_that_is_given_up_reads_no_more_headers():
    running, go_on, reads = threading.Event(), threading.Event(), []

    def before(verb, key):
        if verb == "get_range":
            reads.append(key)
            running.set()
            go_on.wait(10)

    with opened(StoreOfRank(created(), before)) as repository:
        reads.clear()
        ref = ManifestRef(part="", rank=1, sha256="0" * 64, header_sha256="0" * 64, size_bytes=100, logical_bytes=0)
        headers = ChildHeaders(repository.context)
        headers.start([ref] * 500)
        assert running.wait(10)
        headers.give_up()
        go_on.set()
        with pytest.raises(NotFoundError):
            headers.result()
        assert len(reads) <= READS_AT_ONCE


def test_a_base_that_only_rank_0_cannot_read_counts_in_the_generation():
    """The record names the bases of all ranks, so its generation is one more than that of the first of them."""
    store = created()
    first = save_shared([store] * 3, "a", 0, 0)[0]
    children = set(keys_of(store, "manifests/")) - {ref.key for ref in first.manifests}

    def of_0(verb, key):
        if key in children:
            raise StorageError(f"get {key}: not from here")

    found = save_shared([StoreOfRank(store, of_0), store, store], "a", 1, 1)
    assert found[0].bases == [first.id], found
    assert (first.generation, found[0].generation) == (0, 1)
    check_clean(store)


@pytest.mark.parametrize("seed", range(6))
def test_messages_that_are_late_or_doubled_do_no_harm(seed):
    store = created()
    faults = MessageFaults(delay=0.5, double=0.5, delay_s=0.1, seed=seed)
    with LocalJob(store, 3, faults=faults) as job:
        for step in range(4):
            found = job.save("a", step, step)
            assert all(snapshot == found[0] for snapshot in found), found
    check_clean(store, expected=of_all(3))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_lost_messages_end_a_save_on_all_ranks(seed):
    """A rank that misses a message ends in time, and reports a commit only if the record shows it."""
    store = created()
    with LocalJob(store, 3, faults=MessageFaults(drop=0.2, seed=seed), silent_s=0.3, total_s=0.6) as job:
        for step in range(4):
            found = job.save("a", step, step)
            committed = job.members[0].repository.snapshots("a")
            for snapshot in found:
                if not isinstance(snapshot, Exception):
                    assert snapshot in committed
                elif any(s.step == step for s in committed):
                    assert "begin" in str(snapshot), "a rank that has reported does not know that it is committed"
    check_clean_after_gc(store, 3)


def check_clean_after_gc(store, count):
    with opened(store) as repository:
        assert repository.gc(fence_after_s=0).waiting_for == []
    check_clean(store, expected=of_all(count))


def test_trees_that_rank_0_lacks_are_asked_for():
    store = created()
    with LocalJob(store, 3) as job:

        def unlike(side):
            side.unlike_trees = True

        for step in range(3):
            found = job.save("a", step, step, edit=unlike)
            assert all(snapshot == found[0] for snapshot in found), found
            asked = "ask" in {key.partition("/")[2] for key in job.ranks.keys if key.startswith(f"{step}/")}
            assert asked == (step == 0), "the same trees are asked for twice"
    check_clean(store, expected=of_all(3))


@pytest.mark.parametrize("rank", range(3))
def test_the_first_error_is_raised_on_all_ranks_and_names_the_rank(rank):
    store = created()
    with LocalJob(store, 3) as job:
        job.save("a", 0, 0)

        def broken(side):
            if side._ranks.rank == rank:
                side._parts = lambda *_: (_ for _ in ()).throw(InvalidInputError("model.w: changed meanwhile"))

        found = job.save("a", 1, 1, edit=broken)
        assert all(type(error) is InvalidInputError for error in found), found
        for other, error in enumerate(found):
            assert str(error) == ("" if other == rank else f"rank {rank}: ") + "model.w: changed meanwhile"
        again = job.save("a", 1, 2)
        assert all(snapshot == again[0] for snapshot in again), again
    check_clean_after_gc(store, 3)


@pytest.mark.parametrize("field", ["metrics", "tags"])
def test_unlike_arguments_are_an_error_that_names_rank_and_field(field):
    store = created()
    with LocalJob(store, 3) as job:
        for error in job.save("a", 0, 0, edit=unlike_metrics if field == "metrics" else unlike_tags):
            assert isinstance(error, InvalidInputError), error
            assert f"rank 2: {field} differ from rank 0's" in str(error)
        assert job.members[0].repository.snapshots() == []


class _Unlike:
    """A request whose metrics differ on rank 2."""

    def __init__(self, request, rank):
        self._request, self._rank = request, rank

    def __getattr__(self, name):
        return getattr(self._request, name)

    def read_metrics(self):
        return {"loss": float(self._rank == 2)}


def unlike_metrics(side):
    side._request = _Unlike(side._request, side._ranks.rank)


def unlike_tags(side):
    side._request.tags = ["other"] * (side._ranks.rank == 2)


def test_another_step_on_one_rank_is_an_error():
    store = created()
    with LocalJob(store, 2) as job:
        calls = [lambda m=m, s=s: m.save(0, "a", s, s) for m, s in zip(job.members, (5, 6), strict=True)]
        for error in together(calls):
            assert isinstance(error, InvalidInputError)
            assert "rank saves step 6, rank 0 step 5" in str(error)


def test_a_rank_that_does_not_call_save_is_named():
    store = created()
    with LocalJob(store, 3, total_s=0.5) as job:
        for error in together([lambda m=m: m.save(0, "a", 0, 0) for m in job.members[:2]]):
            assert isinstance(error, RanksError)
            assert "rank 2 of 3: alive" in str(error)
        late = together([lambda: job.members[2].save(0, "a", 0, 0)])[0]
        assert "rank 2 of 3: alive" in str(late), late
        job.number = 1
        assert len({s.id for s in job.save("a", 1, 1)}) == 1
    assert keys_of(store, "sessions/") == []
    check_clean_after_gc(store, 3)
