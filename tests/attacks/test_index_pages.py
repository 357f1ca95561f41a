"""The index rejects records and headers that belong to another repository or another key, also under a valid seal."""

import pytest

from kit.repositories import OPTIONS, check_restores, index_of, opened, same, save, values, version_of
from snapstore import KeepLast, Repository
from snapstore.catalog.index import MAP_BYTES
from snapstore.catalog.lmdb_file import Environment


def planted(root, other, how):
    """Copy the entries of `other`'s index into that of `root`: beside its own, or under its keys."""
    found = []
    for place in (other, root):
        with Repository.open(place) as repository:
            found.append(Environment.open(index_of(place), repository.config.uuid, MAP_BYTES))
    theirs, ours = found
    for database in (b"records", b"manifests"):
        with theirs._env.begin() as transaction:
            values = list(transaction.cursor(db=theirs._databases[database]))
        with ours._env.begin(write=True) as transaction:
            keys = [key for key, _ in transaction.cursor(db=ours._databases[database])]
            for i, key in enumerate([key for key, _ in values] if how == "beside" else keys):
                transaction.put(key, values[i % len(values)][1], db=ours._databases[database])
    ours._seal()
    for environment in found:
        environment.release()


def restores(repository):
    for snapshot in repository.snapshots():
        assert same(repository.restore(snapshot.ref), values(*version_of(snapshot)))


@pytest.mark.parametrize("how", ["beside", "instead"])
def test_foreign_records_and_headers(tmp_path, how):
    """Mitigation: each value has a checksum over its key and the repository; if it is wrong, the objects are read."""
    root, other = tmp_path / "ours", tmp_path / "other"
    for place, run, steps in ((root, "a", (0, 1, 2)), (other, "z", (0, 1, 2, 3))):
        with Repository.create(place, chunk_bytes=1024, options=OPTIONS) as repository:
            for step in steps:
                save(repository, run, step, step)
            repository.forget([KeepLast(2)], run=run)
    planted(root, other, how)
    with opened(root) as repository:
        assert [s.ref for s in repository.snapshots()] == ["a@1", "a@2"]
        assert repository.view().vanished == []
        restores(repository)
        assert repository.gc().deleted_objects
        save(repository, "a", 3, 3)
        repository.gc()
        check_restores(repository)


def test_a_header_under_the_key_of_another_manifest(tmp_path):
    """Mitigation: as above. A gc that trusted such a header would delete packs that are needed."""
    with Repository.create(tmp_path / "r", chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "a", step, step)
    with Repository.open(tmp_path / "r") as repository:
        environment = Environment.open(index_of(tmp_path / "r"), repository.config.uuid, MAP_BYTES)
        with environment._env.begin(write=True) as transaction:
            database = environment._databases[b"manifests"]
            values = list(transaction.cursor(db=database))
            for key, _ in values:
                transaction.put(key, values[0][1], db=database)
        environment._seal()
        environment.release()
    with opened(tmp_path / "r") as repository:
        assert repository.gc().deleted_objects == 0
        check_restores(repository)
