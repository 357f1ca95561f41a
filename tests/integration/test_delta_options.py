"""`SaveOptions(delta=...)`: which deltas a save stores; saves of all kinds continue each other's chains."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from snapstore import InvalidInputError, Repository, SaveOptions
from snapstore.format.chunking import DIFFERENCE, FULL, XOR
from snapstore.format.manifests import manifest
from snapstore.storage.memory import MemoryStore

DTYPES = ("bool", "uint8", "int16", "bfloat16", "int32", "float32", "int64", "float64", "complex64")


def state(step):
    """Return tensors of which each step changes a third of the elements, and some no element."""
    found = {}
    for number, name in enumerate(DTYPES):
        generator = np.random.default_rng(number)
        dtype = getattr(torch, name)
        values = torch.from_numpy(generator.normal(0, 30, 6000)).to(dtype)
        raw = values.view(torch.uint8).numpy()
        for _ in range(step):
            raw[int(generator.integers(3 * dtype.itemsize)) :: 3 * dtype.itemsize] ^= 1
        found[name] = values
    return found | {"frozen": torch.arange(6000)}


def kinds_of(repository, step):
    """Return the kind of each chunk's own reference: the newest of its chain."""
    found = set()
    for ref in repository.snapshot(f"r@{step}").manifests:
        table = manifest.read(repository.context.store, ref, None).table
        found |= set(table.ref_kinds[table.starts[:-1]].tolist())
    return found


def require_equal(repository, step):
    restored = repository.restore(f"r@{step}")
    for name, expected in state(step).items():
        assert torch.equal(restored[name].view(torch.uint8), expected.view(torch.uint8)), (step, name)


@pytest.mark.parametrize("codec", ["portable", "auto"])
@pytest.mark.parametrize(
    ("delta", "kinds"), [("auto", DIFFERENCE), ("difference", DIFFERENCE), ("xor", XOR), ("none", FULL)]
)
def test_a_save_stores_deltas_of_one_kind(delta, kinds, codec):
    options = SaveOptions(delta=delta, codec=codec, restore_cost=100.0, threads=2)
    with Repository.create(MemoryStore(), chunk_bytes=4096, options=options) as repository:
        for step in range(3):
            repository.save(state(step), run="r", step=step)
        found = set().union(*(kinds_of(repository, step) for step in (1, 2)))
        assert found - {FULL} == {kinds} - {FULL} or codec == "auto"
        for step in range(3):
            require_equal(repository, step)
        frozen = repository.save(state(2), run="r", step=3)
        assert frozen.new_chunks == 0, "chunks that do not change are stored once, whatever the option"
        assert repository.check("restore").ok


@pytest.mark.sampled(4)
@pytest.mark.parametrize("order", list(itertools.product(["difference", "xor", "none"], repeat=3)))
def test_saves_of_all_kinds_continue_chains(order):
    store = MemoryStore()
    Repository.create(store, chunk_bytes=4096).close()
    for step, delta in enumerate(("auto", *order, "xor", "difference")):
        with Repository.open(store, options=SaveOptions(delta=delta, restore_cost=100.0, threads=2)) as repository:
            repository.save(state(step), run="r", step=step)
            for earlier in range(step + 1):
                require_equal(repository, earlier)
    with Repository.open(store) as repository:
        assert repository.check("restore").ok


@pytest.mark.parametrize("given", ["XOR", "", None, 1, ["xor"]])
def test_no_other_value_is_taken(given):
    with pytest.raises(InvalidInputError, match=r"delta .*: expected one of auto, difference, xor, none"):
        SaveOptions(delta=given)
