"""A View answers every question as before, whichever of the records are in pages."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.objects import flip
from snapstore.catalog.history import View
from snapstore.catalog.index import Index
from snapstore.errors import SnapstoreError
from snapstore.format import pages, records
from snapstore.format.keys import page_key
from snapstore.format.records import ABORTED, COMMITTED, FORGOTTEN, SWEPT, Snapshot
from snapstore.storage.memory import MemoryStore

RUNS = ["a", "b"]
STATES = (None, (COMMITTED,), (COMMITTED, FORGOTTEN), (SWEPT,), (FORGOTTEN,))
#: run, step, seq, states of the revisions, tag, place of the parent.
ONE = st.tuples(
    st.sampled_from(RUNS), st.integers(0, 3), st.integers(1, 5),
    st.sampled_from([(COMMITTED,), (COMMITTED, FORGOTTEN), (COMMITTED, FORGOTTEN, SWEPT), (ABORTED,)]),
    st.sampled_from(["", "good", "best", "2"]), st.integers(0, 9),
)  # fmt: skip


def snapshots_of(drawn):
    """Return the revisions of each snapshot, in order."""
    made = []
    for number, (run, step, seq, states, tag, parent) in enumerate(drawn):
        name = f"{number * 7 + 1:02x}" * 16
        made.append([
            Snapshot(
                id=name, run=run, step=step, seq=0 if state == ABORTED else seq, state=state, revision=revision,
                write_id=f"{number:016x}{revision:016x}", created=float(number), tags=[tag] if tag else [],
                parent=made[parent][0].id if parent < number else None,
                metrics={"loss": [0.5, math.inf, 2.0][number % 3]},
            )
            for revision, state in enumerate(states)
        ])  # fmt: skip
    return made


def store_of(made, of_pages):
    """Return a store; the records of a snapshot whose entry is a number are in that page, those of None are loose."""
    store, chosen = MemoryStore(), {}
    store.put("config", b"")
    for revisions, page in zip(made, of_pages, strict=True):
        if page is None or len(revisions) < page[1]:
            for record in revisions:
                store.put(record.key, records.encode(record))
            continue
        number, joined, left = page[0], revisions[page[1] - 1], page[1] if page[2] else 0
        for record in revisions[left:]:  # a void one may be left
            store.put(record.key, records.encode(record))
        chosen.setdefault((joined.run, number), []).append((joined, records.encode(joined)))
    for run in RUNS:
        for number, of in enumerate(sorted(key for key in chosen if key[0] == run)):
            store.put(page_key(run, number), pages.make_page(run, number, chosen[of]))
    return store


def answer(view, ask):
    """Return what a question gives, without what no grave keeps; or its error."""
    try:
        return plain(ask(view))
    except SnapstoreError as error:
        return type(error).__name__, str(error)


def plain(found):
    if isinstance(found, Snapshot):
        whole = found.state in (COMMITTED, FORGOTTEN)
        return (found.id, found.key, found.seq, found.state, found.parent, found.created, found.metrics) + (
            (tuple(found.tags), found.write_id) if whole else ()
        )
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    return [plain(one) for one in found] if isinstance(found, list) else found


def questions(made):
    """Yield each question with its name."""
    for run in RUNS:
        for states in STATES:
            yield f"snapshots {run} {states}", lambda v, r=run, s=states: v.snapshots(r, s)
            yield f"has {run} {states}", lambda v, r=run, s=states: v.has(r, s)
            yield f"require {run} {states}", lambda v, r=run, s=states: v.require_run(r, s)
            yield f"runs {states}", lambda v, s=states: v.runs(s)
            yield f"all {states}", lambda v, s=states: v.snapshots(None, s)
        for count in (1, 2, 9):
            yield f"last {run} {count}", lambda v, r=run, n=count: v.last(r, n)
        for ask in ("newest", "latest", "tagged", "superseded", "next_seq", "unknown_ids"):
            yield f"{ask} {run}", lambda v, r=run, a=ask: getattr(v, a)(r)
        for name in ("latest", "highest", "best", "best:loss", "good", "0", "1", "2", "7"):
            for states in ((COMMITTED,), (COMMITTED, FORGOTTEN), (COMMITTED, FORGOTTEN, SWEPT, ABORTED)):
                yield f"{run}@{name} {states}", lambda v, r=f"{run}@{name}", s=states: v.resolve(r, s)
    yield "superseded", lambda v: v.superseded()
    for name in sorted({revisions[0].id for revisions in made} | {"0" * 32}):
        yield f"get {name}", lambda v, n=name: v.get(n)
        yield f"children {name}", lambda v, n=name: v.children(n)
        for ref in (f"id:{name[:1]}", f"id:{name}", name[:9]):
            for states in ((COMMITTED,), (COMMITTED, FORGOTTEN, SWEPT)):
                yield f"{ref} {states}", lambda v, r=ref, s=states: v.resolve(r, s)


PLACES = st.none() | st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.lists(ONE, max_size=8), st.data())
def test_pages_change_no_answer(drawn, data):
    made = snapshots_of(drawn)
    loose = Index(store_of(made, [None] * len(made)), "0" * 32, None).refresh()
    of_pages = [data.draw(PLACES) for _ in made]
    view = Index(store_of(made, of_pages), "0" * 32, None, has_pages=True).refresh()
    assert not view.damaged
    for name, ask in questions(made):
        assert answer(view, ask) == answer(loose, ask), name
    again = [revisions[-1].revised() for revisions in made[::2]]
    for name, ask in questions(made):
        assert answer(view.with_revisions(again), ask) == answer(loose.with_revisions(again), ask), name


def test_answers_are_copies():
    made = snapshots_of([("a", 0, 1, (COMMITTED,), "good", 9), ("a", 1, 2, (COMMITTED,), "", 9)])
    view = Index(store_of(made, [(0, 1, False)] * 2), "0" * 32, None, has_pages=True).refresh()
    for ask in (View.snapshots, lambda v: v.last("a", 2), lambda v: [v.get(made[0][0].id)], View.with_records):
        ask(view)[0].tags.append("bad")
        assert ask(view)[0].tags in (["good"], [])
    assert [s.tags for s in view.snapshots("a")] == [["good"], []]


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_page_that_is_lost_after_the_view_was_made_is_no_wrong_answer(how):
    """What is cached in memory answers; else the error names the page."""
    made = snapshots_of([("a", step, step + 1, (COMMITTED,), "", 9) for step in range(3)])
    store = store_of(made, [(0, 1, False)] * 3)
    index = Index(store, "0" * 32, None, has_pages=True)
    view = index.refresh()
    index.pages._cache.wipe()
    index.pages._bodies.clear()
    flip(store, page_key("a", 0), -1) if how == "damaged" else store.delete([page_key("a", 0)])
    with pytest.raises(SnapstoreError, match="pages/a/0000000/00"):
        view.snapshots("a")
    assert view.has("a")
    assert view.next_seq("a") > 3
