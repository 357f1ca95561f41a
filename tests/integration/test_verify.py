"""A save decodes all or a sample of its new chunks before it commits, and commits nothing if one of these is wrong."""

from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
import torch

from kit.reference import use_reference
from kit.samples import some
from snapstore import IntegrityError, InvalidInputError, Repository, SaveOptions, SnapshotManager
from snapstore.engine import cpu, reference
from snapstore.save import chunk_writer
from snapstore.storage.memory import MemoryStore

CHUNK = 4096
CHUNKS = 270


def values(step=0, chunks=CHUNKS):
    """Return floats that change a little at every step."""
    start = np.random.default_rng(0).standard_normal(CHUNK * chunks // 4).astype(np.float32)
    return torch.from_numpy(start * np.float32(1 + 1e-5 * step))


def repository(verify, store=None):
    store = store or MemoryStore()
    options = SaveOptions(threads=2, verify_writes=verify)
    if not any(True for _ in store.list("")):
        return Repository.create(store, chunk_bytes=CHUNK, options=options)
    return Repository.open(store, options=options)


@pytest.fixture
def spoil(monkeypatch):
    """Returns a function that makes the encoder change a byte of a chunk: checksums are right, the bytes are wrong."""
    original = reference.encode_chunk
    use_reference(monkeypatch)

    def of(state, number):
        wanted = state.numpy().view(np.uint8)[number * CHUNK : (number + 1) * CHUNK].tobytes()

        def wrong(job, out):
            if job.chunk.tobytes() == wanted:
                spoiled = np.array(job.chunk)
                spoiled[CHUNK // 2] ^= 1
                job = msgspec.structs.replace(job, chunk=spoiled)
            return original(job, out)

        monkeypatch.setattr(reference, "encode_chunk", wrong)

    yield of
    monkeypatch.undo()


def undo(monkeypatch_of_spoil, state):
    """Make the encoder right again: it now looks for a chunk that no save has."""
    monkeypatch_of_spoil(state * 0 - 1, 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [0, 1, 77, CHUNKS - 1])
@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("batch_chunks", [7, 1024])
def test_full_finds_every_wrong_chunk(spoil, monkeypatch, number, is_delta, batch_chunks):
    """A batch is decoded while the next two are encoded; the last ones have none after them."""
    monkeypatch.setattr(cpu.CpuEngine, "batch_chunks", batch_chunks)
    with repository("full") as repo:
        if is_delta:
            repo.save({"w": values(0)}, run="a", step=0)
        before = [s.ref for s in repo.view().snapshots()]
        spoil(values(1), number)
        with pytest.raises(IntegrityError, match=r"an encoded blob does not decode to what was saved.*save again"):
            repo.save({"w": values(1)}, run="a", step=1)
        assert [s.ref for s in repo.view().snapshots()] == before, "nothing was committed"
        undo(spoil, values(1))
        repo.save({"w": values(1)}, run="a", step=1)
        assert torch.equal(repo.restore("a@1")["w"], values(1))
        assert repo.check("restore").ok


def test_a_sample_holds_the_first_new_chunk(spoil):
    for generation in range(3):
        with repository("sample") as repo:
            for step in range(generation):
                repo.save({"w": values(step)}, run="a", step=step)
            spoil(values(generation), 0)
            with pytest.raises(IntegrityError, match="does not decode"):
                repo.save({"w": values(generation)}, run="a", step=generation)
            assert len(repo.view().snapshots()) == generation
            undo(spoil, values())


def test_a_sample_is_another_one_in_every_generation(spoil):
    """A save verifies one new chunk in 64: 4 neighbours after 256 chunks, 16 after 1,024."""
    assert (chunk_writer.VERIFY_ONE_IN, chunk_writer.VERIFIED_TOGETHER) == (64, (4, 16))
    chunks = 1060
    cases = [
        (0, 64, True),
        (0, 65, False),
        (1, 65, True),
        (1, 64, False),
        (2, 2 + 128, True),
        (0, 256 + 3, True),
        (0, 256 + 4, False),
        (1, 256 + 7, True),
        (1, 256, False),
        (0, 1024 + 15, True),
        (0, 1024 + 16, False),
        (1, 1024 + 31, True),
        (1, 1024, False),
    ]
    for generation, wrong, noticed in some(cases, 2):
        with repository("sample") as repo:
            for step in range(generation):
                repo.save({"w": values(step, chunks)}, run="a", step=step)
            spoil(values(generation, chunks), wrong)
            if noticed:
                with pytest.raises(IntegrityError, match="does not decode"):
                    repo.save({"w": values(generation, chunks)}, run="a", step=generation)
            else:
                repo.save({"w": values(generation, chunks)}, run="a", step=generation)
                with pytest.raises(IntegrityError, match="digest mismatch"):
                    repo.restore(f"a@{generation}")
            undo(spoil, values())


@pytest.mark.parametrize("number", [0, 100])
def test_off_does_not_notice_and_the_restore_does(spoil, number):
    with repository("off") as repo:
        spoil(values(), number)
        repo.save({"w": values()}, run="a", step=0)
        with pytest.raises(IntegrityError, match="digest mismatch"):
            repo.restore("a@0")
        assert not repo.check("restore").ok


@pytest.mark.parametrize("async_save", [True, False])
def test_a_manager_goes_on_after_a_wrong_chunk(spoil, async_save):
    options = SaveOptions(threads=2, verify_writes="full")
    store = MemoryStore()
    Repository.create(store, chunk_bytes=CHUNK, options=options).close()
    with SnapshotManager(store, run="a", async_save=async_save, options=options) as snapshots:
        snapshots.save(0, {"w": values(0)}).result()
        spoil(values(1), 140)
        with pytest.raises(IntegrityError, match="does not decode"):  # noqa: PT012
            handle = snapshots.save(1, {"w": values(1)})
            snapshots.wait_until_finished()
            handle.result()
        undo(spoil, values())
        for step in (2, 3):
            snapshots.save(step, {"w": values(step)}).result()
    with Repository.open(store, options=options) as repo:
        assert [s.step for s in repo.view().snapshots()] == [0, 2, 3]
        assert repo.snapshot("a@3").depth >= 1
        for step in (0, 2, 3):
            assert torch.equal(repo.restore(f"a@{step}")["w"], values(step))
        assert repo.check("restore").ok


@pytest.mark.sampled(1)
@pytest.mark.parametrize("verify", ["off", "sample", "full"])
def test_right_chunks_are_never_refused(verify, monkeypatch):
    monkeypatch.setattr(cpu.CpuEngine, "batch_chunks", 7)
    with repository(verify) as repo:
        for step in range(4):
            state = {"w": values(step), "n": torch.randint(0, 9, (5000,)), "few": torch.arange(step + 1), "e": b""}
            repo.save(state, run="a", step=step)
            assert torch.equal(repo.restore(f"a@{step}")["w"], values(step))
        assert repo.check("restore").ok


def test_bases_are_not_overwritten_before_the_deltas_to_them_are_decoded(monkeypatch):
    """A manager that keeps bases writes each batch over its bases, while verification is two batches behind."""
    monkeypatch.setattr(cpu.CpuEngine, "batch_chunks", 7)
    options = SaveOptions(threads=2, verify_writes="full")
    store = MemoryStore()
    Repository.create(store, chunk_bytes=CHUNK, options=options).close()
    with SnapshotManager(store, run="a", async_save=False, keep_base=True, options=options) as snapshots:
        for step in range(4):
            snapshots.save(step, {"w": values(step)}).result()
    with Repository.open(store, options=options) as repo:
        assert repo.snapshot("a@3").depth >= 1
        assert torch.equal(repo.restore("a@3")["w"], values(3))


@pytest.mark.parametrize("verify", ["sample", "full"])
@pytest.mark.parametrize("fails", [False, True])
def test_verification_gives_every_buffer_back(spoil, monkeypatch, verify, fails):
    """Buffers are pinned memory on a GPU: a save that kept some would lock more memory each time."""
    monkeypatch.setattr(cpu.CpuEngine, "batch_chunks", 7)
    lent, counts, lend = [], [], cpu.CpuEngine.buffer

    def buffer(engine, nbytes):
        found = lend(engine, nbytes)
        lent.extend([found] if nbytes < SaveOptions().pack_bytes else [])  # larger ones are those of packs
        return found

    def give_back(engine, buffer):
        counts.append(len(lent))
        lent[:] = [one for one in lent if one is not buffer]

    monkeypatch.setattr(cpu.CpuEngine, "buffer", buffer)
    monkeypatch.setattr(cpu.CpuEngine, "give_back", give_back)
    with repository(verify) as repo:
        repo.save({"w": values(0)}, run="a", step=0)
        assert not lent
        assert max(counts) == 2, "copies of two batches at most; the next save also borrows buffers to read bases"
        if fails:
            spoil(values(1), 1)
            monkeypatch.setattr(chunk_writer, "VERIFY_ONE_IN", 1)
        with pytest.raises(IntegrityError) if fails else nullcontext():
            repo.save({"w": values(1)}, run="a", step=1)
        assert not lent


# --- options


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("codec", "zstd", "codec 'zstd': expected one of portable, ans"),
        ("codec", None, "codec None: expected one of portable, ans"),
        ("codec", "", "codec '': expected"),
        ("verify_writes", "all", "verify_writes 'all': expected one of off, sample, full"),
        ("verify_writes", True, "verify_writes True: expected"),
    ],
)
def test_options_that_are_none_are_named(name, value, expected):
    with pytest.raises(InvalidInputError, match=expected):
        SaveOptions(**{name: value})


def test_a_codec_of_the_gpu_does_no_harm_without_cuda_tensors():
    with Repository.create(MemoryStore(), options=SaveOptions(threads=2, codec="ans", verify_writes="full")) as repo:
        repo.save({"w": values()}, run="a", step=0)
        assert torch.equal(repo.restore("a@0")["w"], values())
