"""A decision that loses a race for a revision is made again, but only a limited number of times."""

from types import SimpleNamespace

import pytest

from snapstore import Repository
from snapstore.catalog.index import Index
from snapstore.errors import ConflictError, InvalidInputError, StorageError
from snapstore.protocol.revisions import CONFLICT_ATTEMPTS, forget, retry_conflicts
from snapstore.storage.memory import MemoryStore


def losing(times, attempts):
    """Return an attempt that loses its first `times` races."""

    def attempt():
        attempts.append(len(attempts))
        if len(attempts) <= times:
            raise ConflictError(f"lost race {len(attempts)}")
        return "done"

    return attempt


@pytest.mark.parametrize("times", [0, 1, CONFLICT_ATTEMPTS - 1])
def test_an_attempt_is_repeated_until_it_wins(times):
    attempts = []
    assert retry_conflicts(losing(times, attempts), lambda _: pytest.fail("gave in")) == "done"
    assert len(attempts) == times + 1


def test_the_last_conflict_is_the_cause_of_the_error():
    attempts = []
    with pytest.raises(StorageError, match="hidden") as caught:
        retry_conflicts(losing(CONFLICT_ATTEMPTS, attempts), lambda error: StorageError(f"hidden: {error}"))
    assert len(attempts) == CONFLICT_ATTEMPTS
    assert str(caught.value.__cause__) == f"lost race {CONFLICT_ATTEMPTS}"


def test_other_errors_end_it_at_once():
    attempts = []

    def attempt():
        attempts.append(1)
        raise InvalidInputError("is forgotten")

    with pytest.raises(InvalidInputError):
        retry_conflicts(attempt, lambda _: pytest.fail("repeated"))
    assert len(attempts) == 1


def test_a_revision_that_no_listing_shows_ends_a_forget_with_an_error(monkeypatch):
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024) as repository:
        snapshot = repository.save({"a": 1}, run="a", step=0)
        repository.tag("a@0", "good")
        stale = SimpleNamespace(get=lambda _: snapshot)  # as if the tag's revision were not listed
        monkeypatch.setattr(Index, "refresh", lambda *_: stale)
        with pytest.raises(StorageError, match=r"a@0 \(id:.*the listing does not show its revision; nothing was chang"):
            forget(repository.context, [snapshot], policy="", reason="")
