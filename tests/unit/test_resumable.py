"""A resumed loader yields the rest of the epoch, and the next ones, to the bit: batches and random numbers.

The oracle is the same loop that was never interrupted, over the bare DataLoader where that is the question.
"""

import contextlib
import io
import pickle
import random
import re
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from snapstore import InvalidInputError, Repository, RngState, resumable
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:This DataLoader will create")


class Augmented(torch.utils.data.Dataset):
    """Samples with random numbers of each global generator."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def run(loader, steps, *, save=None, between=False, leave=None, epochs=False):
    """Return what each step gets, and the states after step `save`, or at the end of the epoch in which it is.

    Args:
        leave: the loop breaks after so many batches of an epoch.
        epochs: call `set_epoch` before each.
    """
    seen, saved, epoch = [], None, loader.sampler.epoch if epochs else 0
    while len(seen) < steps:
        if epochs:
            loader.sampler.set_epoch(epoch)
        epoch += 1
        for inside, batch in enumerate(loader, 1):
            seen.append([batch.clone(), torch.rand(()), random.random()])
            if len(seen) == save and not between:
                saved = loader.state_dict(), RngState().state_dict()
            if len(seen) == steps or inside == leave:
                break
        if len(seen) == save and between:
            saved = loader.state_dict(), RngState().state_dict()
    return seen, saved


def equal(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) and u == v and r == s for (x, u, r), (y, v, s) in zip(a, b, strict=True)
    )


def check(make, steps, save, *, plain=True, wrap=resumable, **options):
    """Run without and with an interruption, and compare; with `plain` also the bare loader."""
    if plain:
        seed(0)
        bare, _ = run(make(), steps, **options)
    seed(0)
    whole, saved = run(wrap(make()), steps, save=save, **options)
    assert not plain or equal(bare, whole)
    seed(1)
    torch.rand(5)
    loader = wrap(make())
    file = io.BytesIO()  # torch.save keeps every value
    torch.save(saved, file)
    file.seek(0)
    position, rng = torch.load(file, weights_only=False)
    loader.load_state_dict(position)
    RngState().load_state_dict(rng)
    options.pop("between", None)
    rest, _ = run(loader, steps - save, **options)
    assert equal(whole[save:], rest)


OPTIONS = {
    "shuffled": {"shuffle": True, "batch_size": 2},
    "in order": {"batch_size": 2},
    "drop last": {"shuffle": True, "batch_size": 3, "drop_last": True},
    "samples": {"shuffle": True, "batch_size": None},
    "generator": {"shuffle": True, "batch_size": 2, "generator": 7},
}


def made(workers, data=11, **options):
    if (number := options.pop("generator", None)) is not None:
        options["generator"] = torch.Generator().manual_seed(number)
    return DataLoader(Augmented(data), num_workers=workers, **options)


@given(st.sampled_from(sorted(OPTIONS)), st.integers(1, 30), st.integers(1, 12))
def test_any_step_without_workers(name, save, data):
    check(lambda: made(0, data, **OPTIONS[name] | ({"drop_last": False} if data < 3 else {})), 31, save)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_end_of_an_epoch(name):
    count = len(made(0, **OPTIONS[name]))
    for between in (False, True):
        check(lambda: made(0, **OPTIONS[name]), 2 * count + 1, count, between=between)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_draw_the_same_numbers(workers, persistent):
    """Batches that workers have read ahead do not count; their generators are those of the last batch of the loop."""
    for save in (1, 2, 3, 5, 6, 8, 12, 15):
        for between in (False, True) if save % 6 == 0 else (False,):
            check(
                lambda: made(workers, shuffle=True, batch_size=2, persistent_workers=persistent),
                20,
                save,
                between=between,
            )


def test_a_spawned_worker_gets_all_it_needs():
    """A loader pickles these functions for workers that are spawned."""
    loader = resumable(made(1, collate_fn=torch.stack, worker_init_fn=np.random.seed))
    rng = RngState(cuda=False).state_dict()
    loader._copy.worker_init_fn.states = [rng]
    collate, init = pickle.loads(pickle.dumps((loader._copy.collate_fn, loader._copy.worker_init_fn)))
    seed(1)
    init(0)
    assert torch.equal(torch.get_rng_state(), rng["torch"])
    data, after = collate([torch.ones(2)])
    assert data.shape == (1, 2)
    assert np.array_equal(after["torch"], rng["torch"])
    assert collate([torch.ones(2)])[1] is None  # as they were


class Batches(torch.utils.data.Sampler):
    """Batches of two that draw from generators of their own as they go."""

    def __init__(self, count):
        self.count, self.numpy, self.python = count, np.random.default_rng(3), random.Random(4)
        self.legacy = np.random.RandomState(5)

    def __iter__(self):
        for _ in range(self.count):
            yield [int(self.numpy.integers(11)), self.python.randrange(11), int(self.legacy.randint(11))]

    def __len__(self):
        return self.count


class Uneven:
    """A sampler with a state of its own, and no class of torch."""

    def __init__(self):
        self.turn = 0

    def __iter__(self):
        self.turn += 1
        return iter([(self.turn * i) % 11 for i in range(8)])

    def __len__(self):
        return 8

    def state_dict(self):
        return {"turn": self.turn}

    def load_state_dict(self, state):
        self.turn = state["turn"]


@pytest.mark.parametrize("save", [1, 3, 4, 5, 9])
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"batch_sampler": Batches(4)},
        lambda: {"sampler": Uneven(), "batch_size": 2},
        lambda: {"batch_sampler": [[0, 1], [2], [5, 4]]},
        lambda: {"sampler": torch.utils.data.WeightedRandomSampler([0.1] * 5 + [0.4] * 6, 9), "batch_size": 2},
        lambda: {"sampler": torch.utils.data.RandomSampler(range(11), True, 40, torch.Generator()), "batch_size": 8},
    ],
    ids=["batches", "own state", "list", "weighted", "replacement"],
)
def test_samplers(options, save):
    check(lambda: DataLoader(Augmented(11), **options()), 11, save)


@pytest.mark.parametrize("save", [2, 3, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_distributed_sampler(rank, save, caplog):
    def make():
        return DataLoader(Augmented(11), 2, sampler=DistributedSampler(range(11), 2, rank, seed=5))

    check(make, 3 * len(make()), save, epochs=True)
    assert not caplog.records


def test_an_epoch_that_the_loop_sets_wrongly_is_named(caplog):
    loader = resumable(DataLoader(Augmented(8), 2, sampler=DistributedSampler(range(8), 2, 0)))
    loader.sampler.set_epoch(3)
    batches = iter(loader)
    next(batches)
    position, rest = loader.state_dict(), next(batches)[:, 0]
    loader.load_state_dict(position)
    assert loader.sampler.epoch == 3
    loader.sampler.set_epoch(0)
    assert torch.equal(next(iter(loader))[:, 0], rest)
    assert "set_epoch(0) was called, but the snapshot was taken in epoch 3" in caplog.text


@pytest.mark.parametrize("save", [4, 8])
def test_after_a_break_a_new_epoch_begins(save):
    """As with any DataLoader, and also if the snapshot was taken after the break."""
    check(lambda: made(0, shuffle=True, batch_size=2), 14, save, between=True, leave=4)


def test_a_break_after_a_resume():
    seed(0)
    whole, saved = run(resumable(made(0, shuffle=True, batch_size=2)), 14, save=3, leave=4)
    loader = resumable(made(0, shuffle=True, batch_size=2))
    loader.load_state_dict(saved[0])
    RngState().load_state_dict(saved[1])
    first, _ = run(loader, 1)  # the fourth batch, and a break
    rest, _ = run(loader, 10, leave=4)
    assert equal(whole[3:], first + rest)


def test_another_look_at_a_batch_does_not_move_the_position():
    loader = resumable(made(0, shuffle=True, batch_size=2))
    batches = iter(loader)
    next(batches), next(batches)
    next(iter(loader))
    assert loader.state_dict()["batches"] == 2
    rest = [batch[:, 0] for batch in batches]
    assert len(rest) == len(loader) - 2
    assert loader.state_dict()["batches"] is None


def test_an_iterator_that_is_kept_is_named(caplog):
    """Nothing tells whether a loop around the last one goes on with it."""
    loader = resumable(made(0, batch_size=2))
    kept = iter(loader)
    next(kept)
    for _ in loader:
        loader.state_dict()
    assert not caplog.records
    for _ in range(2):
        assert loader.state_dict()["batches"] == 1
    assert len(caplog.records) == 1
    assert "the position is that of an earlier iterator, after 1 batches" in caplog.text
    del kept
    assert loader.state_dict()["batches"] is None


def test_a_running_loop_continues_at_the_loaded_position():
    """So an iterator may be made before `restore_into`."""
    loader = resumable(made(0, shuffle=True, batch_size=2))
    seed(0)
    batches = iter(loader)
    next(batches)
    saved = loader.state_dict(), RngState().state_dict()
    rest = [next(batches) for _ in range(3)]
    loader.load_state_dict(saved[0])
    RngState().load_state_dict(saved[1])
    assert all(map(torch.equal, rest, batches))
    assert len(list(batches)) == 2


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_repository_keeps_the_position(workers):
    with Repository.create(MemoryStore()) as repository:
        seed(0)
        loader = resumable(made(workers, shuffle=True, batch_size=2))
        state = {"loader": loader, "rng": RngState()}
        seen = []
        for step, batch in enumerate(loader):
            seen.append(batch)
            if step in (1, 3):
                repository.save(state, run="a", step=step)
        seed(1)
        new = resumable(made(workers, shuffle=True, batch_size=2))
        target = {"loader": new, "rng": RngState()}
        for step in (3, 1):
            repository.restore_into(f"a@{step}", target)
            rest = list(new)
            assert len(rest) == len(seen) - step - 1
            assert all(map(torch.equal, seen[step + 1 :], rest))
        assert list(repository.diff("a@1", "a@3").tensors) != []


def test_an_error_of_the_dataset_counts_its_batch():
    class Failing(Augmented):
        def __getitem__(self, index):
            if index == 2:
                raise OSError("gone")
            return super().__getitem__(index)

    loader = resumable(DataLoader(Failing(6)))
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(OSError, match="gone"):
        next(batches)
    position = loader.state_dict()
    assert position["batches"] == 3
    loader.load_state_dict(position)
    assert [batch[0, 0].item() for batch in loader] == [3, 4, 5]


class Slow(Augmented):
    def __getitem__(self, index):
        time.sleep(1.5 if index == 1 else 0)
        return index


@pytest.mark.slow
def test_a_batch_that_is_late_counts_once():
    """torch raises an error after `timeout`, and returns the batch later."""
    batches = iter(loader := resumable(DataLoader(Slow(4), num_workers=1, timeout=1)))
    seen, errors = [], []
    while len(seen) < 3:
        try:
            seen.append(int(next(batches)))
        except RuntimeError as error:
            errors.append(str(error))
        assert loader.state_dict()["batches"] == len(seen)
    assert seen == [0, 1, 2]
    assert "timed out" in errors[0]


def test_another_number_of_workers_gets_the_same_batches(caplog):
    loader = resumable(made(0, shuffle=True, batch_size=2))
    batches = iter(loader)
    next(batches)
    position, rest = loader.state_dict(), [batch[:, 0] for batch in batches]
    new = resumable(made(1, shuffle=True, batch_size=2))
    new.load_state_dict(position)
    assert "num_workers: 0 in the snapshot, 1 here: the batches are the same" in caplog.text
    assert all(map(torch.equal, rest, (batch[:, 0] for batch in new)))


def test_a_loader_that_is_another_one_is_refused():
    loader = resumable(made(0, shuffle=True, batch_size=2))
    batches = iter(loader)
    next(batches)
    position = loader.state_dict()
    for other, text in [
        ({"batch_size": 4}, "1 batches of an epoch of 6 batches of 2, but here it has 3 batches of 4"),
        ({"batch_size": 2, "generator": 1}, r"the samplers of the snapshot have .*, those of the loader"),
    ]:
        with pytest.raises(InvalidInputError, match=text):
            resumable(made(0, shuffle=True, **other)).load_state_dict(position)
    with pytest.raises(InvalidInputError, match=r"the position of a resumable loader.* got \['_snapshot'\]"):
        resumable(made(0)).load_state_dict({"_snapshot": 3})
    other = resumable(made(0, batch_size=2))
    other.load_state_dict(position)
    for _ in range(2):  # the position stays
        with pytest.raises(InvalidInputError, match="the first 1 batches of the epoch differ"):
            iter(other)


def test_a_sampler_with_hidden_state_is_found_out():
    class Hidden(torch.utils.data.Sampler):
        turn = 0

        def __iter__(self):
            self.turn += 1
            return iter([(self.turn + i) % 11 for i in range(8)])

        def __len__(self):
            return 8

    loader = resumable(DataLoader(Augmented(11), sampler=Hidden()))
    list(loader)
    batches = iter(loader)
    next(batches)
    new = resumable(DataLoader(Augmented(11), sampler=Hidden()))
    new.load_state_dict(loader.state_dict())
    with pytest.raises(InvalidInputError, match="give it state_dict and load_state_dict"):
        iter(new)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class OwnLoop(DataLoader):
    def __iter__(self):
        return iter(())


class OwnBatches(DataLoader):
    """As the loaders of neighbors in torch_geometric."""

    def _get_iterator(self):
        return map(float, super()._get_iterator())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: OwnBatches([1], num_workers=1), "OwnBatches changes the batches of its workers.*pass num_workers=0"),
        (lambda: DataLoader(Stream()), r"an IterableDataset \(Stream\), and only the dataset knows its position: give"),
        (lambda: [1, 2], "expected a DataLoader of torch, got list"),
        (lambda: OwnLoop([1]), "OwnLoop has an __iter__ of its own"),
        (lambda: DataLoader([1], num_workers=1, in_order=False), "pass in_order=True"),
    ],
)
def test_what_cannot_be_exact_is_refused(make, text):
    with pytest.raises(InvalidInputError, match=text):
        resumable(make())


def test_a_loader_may_change_its_batches_without_workers():
    assert list(resumable(OwnBatches([1, 2]))) == [1.0, 2.0]


def test_it_stands_for_the_loader():
    bare = made(0, shuffle=True, batch_size=2)
    loader = resumable(bare)
    assert resumable(loader) is loader
    assert (len(loader), loader.batch_size, loader.dataset, loader.sampler) == (6, 2, bare.dataset, bare.sampler)
    assert re.match(r"resumable\(<.*DataLoader", repr(loader))
    with pytest.raises(AttributeError, match="nothing"):
        loader.nothing
    with pytest.raises(AttributeError):
        loader.num_workers = 4  # it would have no effect


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_of_torchdata_keeps_its_state(workers):
    """Here a resumed epoch also leaves the generators as they are."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make():
        return stateful(torch.arange(11.0), batch_size=2, shuffle=True, num_workers=workers)

    for save in (1, 4, 6, 7, 12):
        for between in (False, True) if save % 6 == 0 else (False,):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(make, 14, save, plain=False, between=between)


class AsItGoes(torch.utils.data.Sampler):
    """A sampler that draws each index from Python's global generator as it goes."""

    def __iter__(self):
        return (random.randrange(11) for _ in range(8))

    def __len__(self):
        return 8


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("save", [1, 2, 3, 7])
def test_a_sampler_that_draws_from_global_generators_as_it_goes(save, workers):
    """The order is the same if only the sampler draws from the generator; else it is, or the resume raises."""

    def resumed(*, draws):
        def end(loader, seen=()):
            for batch in loader:
                seen = [*seen, int(batch)]
                if draws:
                    random.random()
                if len(seen) == save:
                    yield loader.state_dict(), RngState().state_dict()
            yield seen

        def make():
            return resumable(DataLoader(range(11), sampler=AsItGoes(), num_workers=workers))

        seed(0)
        (position, rng), whole = end(make())
        seed(1)
        loader = make()
        loader.load_state_dict(position)
        RngState().load_state_dict(rng)
        (*_, rest) = end(loader)
        return rest == whole[save:]

    assert resumed(draws=False)
    with contextlib.suppress(InvalidInputError):
        assert resumed(draws=True)


@pytest.mark.slow
def test_persistent_workers_that_were_in_use_before():
    """The workers of the loader itself do not send their generators."""
    loader = made(1, batch_size=2, persistent_workers=True)
    assert len(list(loader)) == len(list(resumable(loader))) == 6
