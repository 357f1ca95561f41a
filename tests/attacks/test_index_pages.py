"""Records of another repository among the pages of ours, under a seal that holds: nothing of them is ever shown."""

import pytest
from faults import OPTIONS, check_restores, keys_of, same, save, values, version_of

from snapstore import KeepLast, Repository
from snapstore.environment import Environment
from snapstore.errors import SnapstoreError
from snapstore.index import MAP_BYTES


def planted(root, other, *, over):
    """All cached records of `other` in the index of `root`; `over`: in place of the records of ours as well."""
    with Repository.open(other) as repository:
        folder, uuid = other / "index", repository.config.uuid
    theirs = Environment.open(folder, uuid, MAP_BYTES)
    items = {key.decode(): data for key, data in theirs.items(b"records")}
    headers = {key.decode(): data for key, data in theirs.items(b"manifests")}
    theirs.release()
    with Repository.open(root) as repository:
        uuid = repository.config.uuid
    ours = Environment.open(root / "index", uuid, MAP_BYTES)
    if over:
        wrong = list(items.values())
        items |= {key.decode(): wrong[i % len(wrong)] for i, (key, _) in enumerate(ours.items(b"records"))}
        headers |= {key.decode(): next(iter(headers.values())) for key, _ in ours.items(b"manifests")}
    ours.put(b"records", items)
    ours.put(b"manifests", headers)
    ours.release()


def restores(repository):
    for snapshot in repository.snapshots():
        assert same(repository.restore(snapshot.ref), values(*version_of(snapshot)))


@pytest.mark.parametrize("over", [False, True])
def test_foreign_records_and_headers(tmp_path, over):
    """Mitigation: only what the store lists is shown, as the cache has it if that is the same; gc stops at the rest."""
    root, other = tmp_path / "ours", tmp_path / "other"
    for place, run, steps in ((root, "a", (0, 1, 2)), (other, "z", (0, 1, 2, 3))):
        with Repository.create(place, chunk_bytes=1024, options=OPTIONS) as repository:
            for step in steps:
                save(repository, run, step, step)
            repository.forget([KeepLast(2)], run=run)
    planted(root, other, over=over)
    with Repository.open(root, options=OPTIONS) as repository:
        assert [s.ref for s in repository.snapshots()] == ["a@1", "a@2"]
        restores(repository)
        packs = keys_of(repository.store, "packs/")
        with pytest.raises(SnapstoreError, match="listing"):  # it lacks what the index knows
            repository.gc()
        assert keys_of(repository.store, "packs/") == packs
        save(repository, "a", 3, 3)
        restores(repository)
        repository.rebuild_index()
        repository.gc()
        check_restores(repository)
