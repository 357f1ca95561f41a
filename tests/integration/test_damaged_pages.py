"""A page is damaged or lost while the run goes on, in a store alone and in one of two stores."""

from __future__ import annotations

import pytest

from kit.objects import flip, keys_of
from kit.repositories import check_whole, created, opened, save
from snapstore import SnapstoreError
from snapstore.protocol import joining


def joined(store, first, count=2):
    """Save some steps, and join all but the newest."""
    with opened(store) as repository:
        for step in range(first, first + count):
            save(repository, "a", step, step)
        return joining.join(repository.context, "a", at_least=1)


def answers(store):
    with opened(store) as repository:
        return [(s.step, s.state, s.seq) for s in repository.view().snapshots(states=None)]


@pytest.mark.parametrize("number", range(joining.GROWTH - 1))
@pytest.mark.parametrize("how", ["flip", "gone"])
def test_a_larger_volume_keeps_the_copy_of_a_damaged_page(number, how):
    """Each process takes volumes in place of pages, so it does not notice. A larger volume must not replace them.

    It was made of the damaged bytes, and the volumes with whole ones were deleted: the records were lost.
    """
    store = created()
    for first in range(0, 2 * (joining.GROWTH - 1), 2):
        joined(store, first)
    pages = keys_of(store, "pages/")
    assert len(pages) == joining.GROWTH - 1
    with opened(store) as repository:
        repository.forget_snapshots(["a@1"], force=True)
        repository.gc()
    before = answers(store)
    if how == "flip":
        flip(store, pages[number], 40)
    else:
        store.delete([pages[number]])
    with pytest.raises(SnapstoreError):
        joined(store, 20)
    expected = [one for one in answers(store) if one[0] < 20]
    assert expected == before
    with opened(store) as repository:
        assert not repository.check().ok
        repository.repair(apply=True)
        assert repository.check("restore").ok
    assert [one for one in answers(store) if one[0] < 20] == before
    check_whole(store)
    for first in range(22, 40, 2):
        joined(store, first)
    assert [one for one in answers(store) if one[0] < 20] == before


@pytest.mark.parametrize("number", [0, 3, 6])
@pytest.mark.parametrize("how", ["flip", "gone", "gone with its volume"])
def test_joins_go_on_after_a_mend(monkeypatch, how, number):
    """A larger volume leaves out a page that was mended: nobody puts it again, so every later join failed at it."""
    monkeypatch.setattr(joining, "GROWTH", 4)
    store = created()
    for first in range(0, 14, 2):
        joined(store, first)
    before = answers(store)
    page = keys_of(store, "pages/")[number]
    if how == "flip":
        flip(store, page, 40)
    else:
        store.delete([page, *(keys_of(store, "volumes/") if how == "gone with its volume" else [])])
    with opened(store) as repository:
        repository.repair(apply=True)
    lost = len(before) - len(answers(store))
    assert lost == 0 or how == "gone with its volume"
    for first in range(14, 52, 2):
        assert joined(store, first).deleted >= 2
    with opened(store) as repository:
        assert not [one for one in repository.check("restore").problems if one.kind != "unexplained"]
    assert len(keys_of(store, "snapshots/")) == 1
    assert len(answers(store)) == 52 - lost
