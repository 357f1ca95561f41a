"""A page is damaged or lost while the run goes on, in a store alone and in one of two stores."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kit.objects import flip, keys_of
from kit.repositories import check_whole, created, opened, same, save, values
from snapstore import KeepEvery, KeepLast, Repository, SnapshotManager, SnapstoreError
from snapstore.protocol import joining
from snapstore.storage.local import LocalStore


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


# --- two stores ------------------------------------------------------------------------------------------------------


def manager(folder):
    """Return a manager of `folder/fast` with the mirror `folder/mirror`."""
    keep = [KeepLast(3), KeepEvery(4)]
    return SnapshotManager(folder / "fast", run="a", keep=keep, mirror=folder / "mirror", async_save=False)


def mirrored(folder, first, count):
    """Save some steps, and wait for the mirror."""
    with manager(folder) as snapshots:
        for step in range(first, first + count):
            snapshots.save(step, values("a", step))
            assert snapshots.wait_until_mirrored() == []


def restored(url):
    """Return the steps that restore; each is compared with what was saved."""
    found = set()
    with Repository.open(url) as repository:
        for snapshot in repository.snapshots("a"):
            with suppress(SnapstoreError):
                assert same(repository.restore(f"id:{snapshot.id}"), values("a", snapshot.step))
                found.add(snapshot.step)
    return found


KEPT = {0, 4, 8, 12, 16, 17, 18, 19}


@pytest.mark.parametrize("joins", ["fast", "mirror"])
def test_records_are_joined_in_one_store_only(tmp_path, monkeypatch, joins):
    monkeypatch.setattr(joining, "AT_LEAST", 1 << 30)
    mirrored(tmp_path, 0, 20)
    with Repository.open(tmp_path / joins) as repository:
        assert joining.join(repository.context, "a", at_least=1).pages == 1
    assert [keys_of(LocalStore(tmp_path / name), "pages/") != [] for name in ("fast", "mirror")] == [
        joins == "fast",
        joins == "mirror",
    ]
    mirrored(tmp_path, 20, 9)
    expected = {0, 4, 8, 12, 16, 20, 24, 26, 27, 28}
    assert restored(tmp_path / "fast") == restored(tmp_path / "mirror") == expected
    with Repository.open(tmp_path / "fast") as fast, Repository.open(tmp_path / "mirror") as mirror:
        assert fast.check("restore").ok
        assert mirror.check("restore").ok
        found = [(s.step, s.id, s.seq) for s in fast.snapshots()]
        assert [(s.step, s.id, s.seq) for s in mirror.snapshots()] == found


@pytest.mark.parametrize("has_volume", [True, False])
@pytest.mark.parametrize("how", ["flip", "gone"])
@pytest.mark.parametrize("name", ["fast", "mirror"])
def test_a_page_of_one_store(tmp_path, monkeypatch, name, how, has_volume):
    """A repair mends the page; what no volume has, the other store gives back. Training goes on meanwhile."""
    monkeypatch.setattr(joining, "AT_LEAST", 3)
    mirrored(tmp_path, 0, 20)
    url, other = tmp_path / name, tmp_path / ("mirror" if name == "fast" else "fast")
    store = LocalStore(url)
    page = keys_of(store, "pages/")[1]
    if how == "flip":
        flip(store, page, 40)
    else:
        store.delete([page])
    if not has_volume:
        store.delete(keys_of(store, "volumes/"))
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cold"))
    with suppress(SnapstoreError), manager(tmp_path) as snapshots:
        newest = snapshots.restore(19)
        snapshots.save(20, values("a", 20))
        snapshots.wait_until_finished()
    assert same(newest, values("a", 19))
    assert restored(other) >= KEPT - {17, 18}
    with Repository.open(url) as repository:
        assert page in {problem.key for problem in repository.check().problems}
        repository.repair(apply=True)
        repository.repair(apply=True, drop=True)  # records of which the page had the last revision
    with Repository.open(other) as repository:
        repository.copy(to=url, run="a")
    with Repository.open(url) as repository:
        repository.gc()
        assert repository.check("restore").ok
    assert restored(url) >= KEPT - {17, 18}
    mirrored(tmp_path, 21, 12)
    assert restored(url) == restored(other) >= {0, 4, 8, 12, 16, 20, 24, 28, 30, 31, 32}
