"""What a process or its cache knows of pages is not believed when other pages have taken their place."""

import resource
import sys
import textwrap

import pytest

from kit.processes import run_python
from snapstore.catalog.index import Index
from snapstore.catalog.pages import PageReader
from snapstore.errors import UnknownFormatError
from snapstore.format import pages, records
from snapstore.format.keys import page_key
from snapstore.format.records import COMMITTED, Snapshot
from snapstore.protocol import joining
from snapstore.storage.memory import MemoryStore

UUID = "0" * 32


def snapshot(n, revision=0, seq=None, **fields):
    return Snapshot(
        id=f"{n * 2654435761 % 2**32:08x}{n:024x}", run="r", step=n, seq=10**6 + n if seq is None else seq,
        state=COMMITTED, revision=revision, write_id=f"{n:016x}{revision:016x}", created=float(n), **fields,
    )  # fmt: skip


def page(number, snapshots):
    return pages.make_page("r", number, [(s, records.encode(s)) for s in snapshots])


def store_with(loose, *of_pages):
    store = MemoryStore()
    store.put("config", b"")
    for s in loose:
        store.put(s.key, records.encode(s))
    for number, snapshots in enumerate(of_pages):
        store.put(page_key("r", number), page(number, snapshots))
    return store


class Joiner:
    """What a join needs of a context."""

    def __init__(self, store, folder=None):
        self.store, self.index = store, Index(store, UUID, folder, has_pages=True)

    def join(self):
        try:
            return joining.join(self, "r", at_least=1)
        finally:
            self.index.close()


def ids(view):
    return {s.id for s in view.snapshots("r")}


def test_a_join_after_a_backup_was_put_back_loses_no_record(tmp_path):
    """This machine has read the pages of the later repository by GET alone."""
    backup = store_with([snapshot(n) for n in range(66)])
    store = store_with([snapshot(n) for n in range(70)])
    assert Joiner(store).join().snapshots == 69
    index = Index(store, UUID, tmp_path, has_pages=True)
    assert len(ids(index.refresh("r"))) == 70
    index.close()
    assert Joiner(backup).join().snapshots == 65
    for n in range(90, 93):
        backup.put(snapshot(n).key, records.encode(snapshot(n)))
    Joiner(backup, tmp_path).join()
    found = ids(Index(backup, UUID, None, has_pages=True).refresh("r"))
    assert found == {snapshot(n).id for n in (*range(66), 90, 91, 92)}


@pytest.mark.parametrize("is_cached", [False, True])
def test_another_page_in_place_of_one_that_was_never_listed(tmp_path, is_cached):
    store = store_with([], [snapshot(n) for n in range(69)])
    reader = PageReader(store, tmp_path)
    assert len(reader.read("r")["r"]) == 69
    store.delete([page_key("r", 0)])
    store.put(page_key("r", 0), page(0, [snapshot(n) for n in range(65)]))
    reader = PageReader(store, tmp_path) if is_cached else reader
    assert len(reader.read("r", list_too=True)["r"]) == 65


def test_a_record_of_a_later_release_is_read_after_the_upgrade(tmp_path, monkeypatch):
    store, real = store_with([], [snapshot(1), snapshot(2)]), records.decode

    def decode(data, kind, key):
        if snapshot(1).id in key:
            raise UnknownFormatError("of a later release")
        return real(data, kind, key)

    monkeypatch.setattr(records, "decode", decode)
    older = Index(store, UUID, tmp_path, has_pages=True)
    assert older.refresh("r").damaged
    older.close()
    monkeypatch.setattr(records, "decode", real)
    newer = Index(store, UUID, tmp_path, has_pages=True)
    view = newer.refresh("r")
    newer.close()
    assert (view.damaged, len(view.snapshots("r"))) == ({}, 2)


def test_a_cache_that_is_cut_short_costs_nothing_else(tmp_path):
    """The disk of the cache is full in the middle of a write."""
    code = f"""
        import pathlib, resource, sys
        sys.path[:0] = {sys.path!r}
        from unit.test_pages_of_another_time import *
        store = store_with([], *([snapshot(n) for n in range(200 * k, 200 * k + 200)] for k in range(3)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        reader = PageReader(store, pathlib.Path({str(tmp_path)!r}))
        assert len(reader.read("r")["r"]) == 600
        assert reader.read("r")["r"].record_of(snapshot(450).id) == snapshot(450)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert len(PageReader(store, pathlib.Path({str(tmp_path)!r})).read("r")["r"]) == 600
    """
    assert resource.RLIMIT_FSIZE is not None
    done = run_python("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


def test_a_stray_page_costs_few_requests():
    class Counting(MemoryStore):
        stats = 0

        def stat(self, key):
            self.stats += 1
            return super().stat(key)

    store = Counting()
    store.put("config", b"")
    store.put(page_key("r", 0), page(0, [snapshot(1)]))
    store.put(page_key("r", 999_999_999), page(999_999_999, [snapshot(2)]))
    reader = PageReader(store)
    for _ in range(3):
        reader.read("r", list_too=True)
    assert store.stats < 100


def test_numbers_as_far_apart_as_a_writer_leaves_out():
    step = records.MAX_SEQ_STEP
    made = [snapshot(n, seq=10**6 + n * step) for n in range(3)]
    loose = Index(store_with(made), UUID, None).refresh()
    paged = Index(store_with([], made), UUID, None, has_pages=True).refresh()
    assert (loose.damaged, paged.damaged) == ({}, {})
    assert paged.next_seq("r") == loose.next_seq("r")


def test_a_later_revision_that_vanishes_beside_a_page():
    first, later = snapshot(1), snapshot(1, 1, tags=["x"])
    answers = []
    for in_page in (False, True):
        loose = [later, snapshot(2)] if in_page else [first, later, snapshot(2)]
        store = store_with(loose, *([[first]] if in_page else []))
        index = Index(store, UUID, None, has_pages=True)
        index.refresh()
        store.delete([later.key])
        view = index.refresh()
        resolved = [view.resolve(ref).id for ref in ("r@latest", "r@1")]
        answers.append((resolved, len(view.missing), view.unknown_ids("r"), view.next_seq("r")))
    assert answers[0] == answers[1]
