"""An error of a restore says so if it may have left its target partly filled."""

import pytest
import torch

from kit import damage
from kit.objects import flip
from kit.repositories import created, opened
from snapstore.errors import IntegrityError, NotFoundError, StorageError
from snapstore.restore import pipeline
from snapstore.state.fill.plan import PARTLY_FILLED


def fails_into(repository, ref="a@2"):
    """Return the lines of the error of a restore into a target, and the target."""
    target = {"t": torch.zeros(5000), "n": 0}
    with pytest.raises(Exception) as caught:
        repository.restore_into(ref, target)
    return [*str(caught.value).splitlines(), *getattr(caught.value, "__notes__", ())], target


@pytest.fixture
def two():
    store = created()
    with opened(store) as repository:
        for step in (1, 2):
            repository.save({"t": torch.full((5000,), float(step)), "n": step}, run="a", step=step)
        yield store, repository


@pytest.mark.parametrize("newest", [True, False])
def test_the_error_of_a_damaged_snapshot_says_that_a_target_may_be_partly_filled(two, newest):
    store, repository = two
    ref = "a@2" if newest else "a@1"
    (key,) = damage.packs_of(store, repository.snapshot(ref))
    for at in range(100, store.stat(key).size_bytes - 100, 50):
        flip(store, key, at)
    (first, last), target = fails_into(repository, ref)
    assert first.startswith(f"{ref} (id:")
    assert ("the newest whole snapshot of run 'a' is a@1" in first) == newest
    assert (last, target["n"]) == (PARTLY_FILLED, 0)
    with pytest.raises(IntegrityError) as caught:
        repository.restore(ref)
    assert "partly" not in str(caught.value)


def test_an_error_before_the_first_byte_says_nothing_of_a_filled_target(two):
    store, repository = two
    (key,) = {ref.key for ref in repository.snapshot("a@2").manifests}
    store.delete([key])
    lines, target = fails_into(repository)
    assert "partly" not in str(lines)
    assert not target["t"].any()


@pytest.mark.parametrize(
    "error", [StorageError("broken"), OSError("of a store"), MemoryError("full"), IntegrityError("damaged")]
)
def test_any_error_of_a_read_says_that_a_target_may_be_partly_filled(two, monkeypatch, error):
    def load(*_):
        raise error

    monkeypatch.setattr(pipeline, "load", load)
    assert fails_into(two[1])[0][-1] == PARTLY_FILLED


@pytest.mark.parametrize("deleted", [True, False])
def test_an_error_of_a_later_try_says_what_the_first_one_has_filled(two, monkeypatch, deleted):
    def load(*_):
        raise IntegrityError("rewritten meanwhile")

    def ruling(_, snapshot, error):
        monkeypatch.setattr(pipeline, "PartSources", gone)
        return gone() if deleted else snapshot

    def gone(*_, **__):
        raise NotFoundError("gone")

    monkeypatch.setattr(pipeline, "load", load)
    monkeypatch.setattr(pipeline, "ruling_now", ruling)
    assert fails_into(two[1])[0] == ["gone", PARTLY_FILLED]


def test_an_error_of_another_library_in_the_last_step_has_a_note(two):
    class Odd(dict):
        def __setitem__(self, key, value):
            raise KeyError(key)

    with pytest.raises(KeyError) as caught:
        two[1].restore_into("a@2", Odd(t=torch.zeros(5000), n=0))
    assert caught.value.__notes__ == [PARTLY_FILLED]
