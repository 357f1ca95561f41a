"""Spans of the extension equal the reference chunk by chunk: choices, blobs, rebuilt chunks, errors."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.samples import examples
from kit.waits import until
from snapstore.engine import reference as reference_code
from snapstore.engine import spans
from snapstore.engine.batches import Chunks, DecodeBatch, EncodeBatch, Examination
from snapstore.engine.cpu import CpuEngine
from snapstore.errors import CapabilityError, FormatError, IntegrityError, InvalidInputError
from snapstore.format.blobs import blob, chain_decode, codecs, plane_kinds, planes
from snapstore.format.blobs.codecs import sparse
from snapstore.format.hashing import digest
from snapstore.format.manifests import delta_choice
from snapstore.threads import Gate, Threads

native = spans.extension()
pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")

SEED = 0xD1A5ED5EED
DTYPES = {1: np.int8, 2: np.float16, 4: np.float32, 8: np.float64}
UNLIMITED = 2**40


@pytest.fixture(scope="module")
def engine():
    made = CpuEngine(SEED, 2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPSTORE_ENGINE", "numpy")
        made = CpuEngine(SEED, 2)
    yield made
    made.close()


def digests_of(chunks):
    return np.frombuffer(b"".join(digest(c, SEED) for c in chunks), np.uint8).reshape(-1, 16)


def content(kind, size, count, seed):
    """Return `count` elements of `size` bytes, as bytes."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[size]
    if kind == "noise":
        return rng.integers(0, 256, count * size, np.uint8)
    if kind == "constant":
        return np.full(count * size, seed % 256, np.uint8)
    if kind == "rare":  # planes of mostly one value, by any share
        return (
            (np.where(rng.random(count) < rng.random() * 0.4, rng.integers(1, 9, count), 0))
            .astype(dtype)
            .view(np.uint8)
        )
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3)).astype(dtype).view(np.uint8)


def moved(chunk, size, seed):
    """Return a chunk whose elements differ a little from another one's: all of them, or a share."""
    rng = np.random.default_rng(seed)
    elements = chunk.view(f"u{size}").copy()
    change = rng.integers(-3, 4, elements.size) * 4 ** int(rng.integers(0, 5))
    changes = rng.random(elements.size) < rng.choice([0.3, 0.6, 1.0])
    elements[changes] += change[changes].astype(elements.dtype)
    return elements.view(np.uint8)


def drawn_row(kind, size, count, seed, has_base):
    chunk = content(kind, size, count, seed)
    return chunk, size, (moved(chunk, size, seed) if has_base else None)


rows = st.builds(
    drawn_row,
    st.sampled_from(["noise", "constant", "rare", "floats", "floats"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 400) | st.sampled_from([8191, 8192, 8200, 65_536, 70_000]),
    st.integers(0, 2**31),
    st.booleans(),
)


def batch_of(drawn, limits=UNLIMITED, *, xor=False, layout=None):
    """Return a batch; `layout`: of all rows, None: that of floats for elements of more than a byte."""
    chunks, sizes, bases = zip(*drawn, strict=True)
    n = len(drawn)
    has_base = np.array([base is not None for base in bases])
    places = [np.empty(0, np.uint8) if base is None else base for base in bases]
    all_bases = Chunks.of(places)
    given = Chunks(places, np.where(has_base, all_bases.which, -1), all_bases.starts, all_bases.lengths)
    layouts = np.array([int(size > 1) if layout is None else layout for size in sizes], np.uint8)
    return EncodeBatch(
        Chunks.of(chunks), digests_of(chunks), np.array(sizes, np.uint8), layouts, given,
        digests_of(places), np.full(n, limits, np.int64), xor=xor,
    )  # fmt: skip


def blobs_of(engine, batch):
    found = []
    made = engine.start_encode(batch)()
    for encoded in made:
        for i, length in enumerate(encoded.entries["length"].tolist()):
            room = np.full(length + -length % 8, 0xEE, np.uint8)
            encoded.copy(i, i + 1, room)()
            assert blob.entry(room[:length].data, int(encoded.entries["offset"][i])) == encoded.entries[i].tobytes()
            found.append(room[:length].data)
    engine.recycle(made)
    return found


def shape(data):
    """Return the choices that a blob shows: everything in its header but the sizes of frames and their codec."""
    header = blob.parse(data, "here")
    kinds = [codec if codec != codecs.DEFLATE else codecs.ZSTD for codec in header.codecs]
    return header.transform, header.element_size, header.layout, header.raw_bytes, kinds, header.digest, header.base


@given(st.lists(rows, min_size=1, max_size=12), st.sampled_from([UNLIMITED, 2000]), st.booleans())
def test_a_batch_is_encoded_as_by_the_reference(engine, reference, drawn, limit, xor):
    batch = batch_of(drawn, limit, xor=xor)
    found, expected = blobs_of(engine, batch), blobs_of(reference, batch)
    for (chunk, _, base), ours, theirs in zip(drawn, found, expected, strict=True):
        is_sparse = [blob.parse(one_, "here").codecs[0] == codecs.SPARSE for one_ in (ours, theirs)]
        is_near = limit * 0.99 <= len(theirs) <= limit * 1.01 or is_sparse[0] != is_sparse[1]  # frames decide
        assert is_near or shape(ours)[:4] == shape(theirs)[:4]
        assert len(ours) <= 1.02 * len(theirs) + (128 if is_near else 64)
        out = np.empty_like(chunk)
        is_delta = ours[16] != blob.FULL
        chain_decode.decode_chain([ours], ["x"], digest(chunk, SEED), out, base if is_delta else None, seed=SEED)
        assert out.tobytes() == chunk.tobytes()


flags = st.lists(st.booleans(), min_size=12, max_size=12)


@given(st.lists(rows, min_size=1, max_size=12), flags, flags, flags, st.booleans())
def test_a_batch_is_examined_as_by_the_reference(engine, reference, drawn, unchanged, wanted, deltas, copied):
    """An examination makes the blobs that an encoding makes, and copies the chunks without a blob."""
    drawn = [
        (chunk, size, base if base is None or not same else chunk.copy())
        for (chunk, size, base), same in zip(drawn, unchanged, strict=False)
    ]
    batch = batch_of(drawn)
    wanted = np.array(wanted[: len(drawn)]) & (batch.layouts == planes.ROTATED)  # as in a save
    deltas = np.array(deltas[: len(drawn)])
    expected = blobs_of(engine, replace(batch, bases=without(batch.bases, ~deltas)))
    for own in (engine, reference):
        copies = own.room_for(batch.chunks.lengths, None) if copied else None
        limits = np.where(deltas, batch.delta_limits, -1)
        given = Examination(batch.chunks, batch.element_sizes, batch.layouts, batch.bases, limits, wanted, copies)
        got = own.start_examine(given)()
        assert (got.digests == batch.digests).all()
        has_base = batch.bases.which >= 0
        assert (got.base_digests == batch.base_digests)[has_base].all()
        is_same = has_base & (batch.digests == batch.base_digests).all(axis=1)
        has_blob = np.zeros(len(drawn), bool)
        if got.made is not None:
            has_blob = got.made.entries["length"] > 0
            assert not (has_blob & (is_same | ~wanted)).any()
            assert got.made.tried.tolist() == (wanted & ~is_same).tolist()
            rest = replace(batch, made=got.made, bases=without(batch.bases, ~deltas))
            assert blobs_of(engine, rest) == expected
        if copied:
            assert (got.copied[~is_same & ~has_blob] == 1).all()
            for i in np.flatnonzero(got.copied):
                assert copies.views()[i].tobytes() == drawn[i][0].tobytes()
        else:
            assert not got.copied.any()


def without(bases, rows):
    return Chunks(bases.memories, np.where(rows, -1, bases.which), bases.starts, bases.lengths)


def sparsely_changed(size, count, seed, share, ones):
    """Return a chunk of numbers, which changed by a share that falls with their size; and its base."""
    rng = np.random.default_rng(seed)
    base = content("floats" if size > 1 else "noise", size, count, seed)
    elements = base.view(f"u{size}").copy()
    by_size = np.abs(base.view(DTYPES[size]).astype(np.float64))
    changes = rng.random(count) < share / (1 + by_size / (by_size.mean() + 1e-9)) ** rng.integers(0, 4)
    step = rng.choice([-1, 1], count) if ones else rng.integers(-(4 ** rng.integers(1, 3 * size)), 1000, count)
    elements[changes] += step[changes].astype(elements.dtype)
    return elements.view(np.uint8), size, base


sparse_rows = st.builds(
    sparsely_changed,
    st.sampled_from([1, 2, 4, 8]),
    st.integers(300, 3000) | st.sampled_from([8192, 70_000, 200_000]),
    st.integers(0, 2**31),
    st.sampled_from([0.001, 0.01, 0.1, 0.3, 0.6, 0.9]),
    st.booleans(),
)


@given(st.lists(sparse_rows, min_size=1, max_size=4), st.sampled_from([UNLIMITED, 2000]), st.sampled_from([None, 0, 1]))
def test_sparse_deltas_equal_the_reference(engine, reference, drawn, limit, layout):
    """Each reads what the other one writes; both take sparse deltas for the same chunks, unless sizes decide."""
    batch = batch_of(drawn, limit, layout=layout)
    ours, theirs = blobs_of(engine, batch), blobs_of(reference, batch)
    for own, other, (chunk, _, base) in zip(ours, theirs, drawn, strict=True):
        assert len(own) <= 1.005 * len(other) + 24
        for one_ in (own, other):
            header = blob.parse(one_, "here")
            if header.transform == blob.FULL:
                continue
            for reader in (engine, reference):
                decode, outs = decode_batch([[one_]], [chunk], Chunks.of([base]))
                reader.start_decode(decode)()
                assert outs[0].tobytes() == chunk.tobytes()


@pytest.mark.parametrize("layout", [planes.BYTES, planes.ROTATED])
def test_sparse_deltas_are_written_and_read_by_the_extension(engine, monkeypatch, layout):
    monkeypatch.setattr(reference_code, "encode_chunk", None)
    monkeypatch.setattr(chain_decode, "decode_chain", None)
    drawn = [sparsely_changed(size, 100_000, seed, 0.05, True) for seed, size in enumerate([1, 2, 4, 8])]
    batch = batch_of(drawn, layout=layout)
    made = blobs_of(engine, batch)
    assert [blob.parse(b, "here").codecs[0] for b in made] == [codecs.SPARSE] * 4
    decode, outs = decode_batch([[b] for b in made], [chunk for chunk, _, _ in drawn], batch.bases)
    engine.start_decode(decode)()
    for found, (chunk, _, _) in zip(outs, drawn, strict=True):
        assert found.tobytes() == chunk.tobytes()


@pytest.mark.no_cover
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_damaged_sparse_deltas_raise_the_errors_of_the_reference(engine, reference, size):
    chunk, _, base = sparsely_changed(size, 3000, 1, 0.1, False)
    (whole,) = blobs_of(engine, batch_of([(chunk, size, base)], layout=planes.ROTATED))
    assert blob.parse(whole, "here").codecs[0] == codecs.SPARSE
    for at in range(16, len(whole), max(1, len(whole) // examples(400))):
        bad = np.array(whole)
        bad[at] ^= 1 << at % 8
        bad[8:16] = np.frombuffer(blob.checksum(bad[16:].data).to_bytes(8, "little"), np.uint8)
        results = [result_of(one, bad.data, chunk, base) for one in (engine, reference)]
        assert results[0] == results[1], at


def result_of(engine, data, chunk, base=None):
    """Return the chunk that an engine rebuilds from a blob; or its error."""
    batch, outs = decode_batch([[data]], [chunk], None if base is None else Chunks.of([base]))
    try:
        engine.start_decode(batch)()
    except (IntegrityError, FormatError) as error:
        return type(error), str(error)
    return outs[0].tobytes()


def test_a_sparse_delta_has_the_longest_gap(engine, monkeypatch):
    monkeypatch.setattr(reference_code, "encode_chunk", None)
    base = content("noise", 1, sparse.MAX_ELEMENTS, 0)
    chunk = base.copy()
    chunk[-1] ^= 255
    (made,) = blobs_of(engine, batch_of([(chunk, 1, base)]))
    assert blob.parse(made, "here").codecs[0] == codecs.SPARSE
    assert result_of(engine, made, chunk, base) == chunk.tobytes()


@pytest.mark.no_cover
@pytest.mark.parametrize("xor", [False, True])
def test_choices_are_equal_bit_for_bit(engine, reference, xor):
    """Entropies near each other would show another order of summation; so would sampled runs at other places."""
    rng = np.random.default_rng(5)
    for round_ in range(examples(60)):
        drawn = []
        for _ in range(30):
            size, count = int(rng.choice([2, 4, 8])), int(rng.integers(100, 20_000))
            chunk = content("floats", size, count, int(rng.integers(0, 2**31)))
            bits = int(rng.integers(8 * size - 9, 8 * size))  # so many low bits change: a delta pays, or just not
            change = rng.integers(0, 1 << max(bits - 4, 1), count, np.uint64).astype(f"u{size}")
            base = (chunk.view(f"u{size}") + change).view(np.uint8)
            drawn.append((chunk, size, base))
        batch = batch_of(drawn, xor=xor)
        for (chunk, size, base), theirs in zip(drawn, blobs_of(reference, batch), strict=True):
            header, limit = blob.parse(theirs, f"{round_}"), int(rng.integers(0, 2 * chunk.size))
            found = [native_choice(chunk, one_, size, xor, limit) for one_ in (base, None)]
            assert found == [expected_choice(chunk, one_, size, xor, limit) for one_ in (base, None)]
            _, is_delta, is_declined, _, _ = native_choice(chunk, base, size, xor, UNLIMITED)
            if not is_declined:
                assert is_delta == (header.transform != blob.FULL)
                assert header.codecs[0] != codecs.SPARSE


def native_choice(chunk, base, size, xor, limit):
    mode = blob.XOR if xor else blob.DIFFERENCE
    *found, kinds = native.choose(chunk, base, size, planes.ROTATED, mode, limit, planes.ENTROPY_TERMS)
    return *found, list(kinds)


def expected_choice(chunk, base, size, xor, limit):
    """Choose as `reference.encode_chunk` does."""
    count, mode = chunk.size // size, planes.ROTATED
    full = delta = planes.statistics(planes.histograms(planes.sample(chunk, size, mode)))
    full_bytes = plane_kinds.estimate_bytes(full.bits.tolist(), count)
    delta_bytes, changed = 0, count
    if base is not None:
        planes.difference(chunk, base, size, out := np.empty_like(chunk))
        sampled = planes.sample(chunk ^ base, size, mode) if xor else planes.sample(out, size)
        delta = planes.statistics(planes.histograms(sampled))
        delta_bytes = plane_kinds.estimate_bytes(delta.bits.tolist(), count)
        changed = int(np.count_nonzero(out.view(f"u{size}")))
    is_sparse = base is not None and not xor and bool(sparse.worth_trying(changed, count))
    is_delta = base is not None and bool(delta_choice.pays(delta_bytes, full_bytes, limit))
    few = changed <= delta_choice.FEW_CHANGED_SHARE * count
    below = min(full_bytes, delta_bytes * (delta_choice.FEW_CHANGED_EXCESS if few else 1)) + blob.HEADER.size
    most = int(max(0, min(np.ceil(below) - 1, delta_choice.most_bytes(full_bytes, limit)))) if base is not None else 0
    chosen = delta if is_delta else full
    kinds = plane_kinds.plane_kinds(chosen.bits, chosen.top_share, mode).tolist()
    return is_sparse, is_delta, False, most, kinds + [0] * (8 - size)


@pytest.mark.parametrize("period", [16, 64, 640, 6400])
def test_runs_are_left_to_the_reference(engine, reference, period):
    """Rows of zeros between other rows, as in the optimizer state of an embedding, in which few rows are ever used."""
    values = content("floats", 4, 128_000, period).view(np.float32)
    values[np.arange(values.size) // period % 2 == 1] = 0
    batch = batch_of([(values.view(np.uint8), 4, None)])
    (ours,), (theirs,) = blobs_of(engine, batch), blobs_of(reference, batch)
    assert len(ours) <= 1.003 * len(theirs)


def chains_of(engine, chunk, size, versions, seed):
    """Return the chain of the last of some versions of a chunk, newest first, and that version."""
    chain, base = [], None
    for number in range(versions):
        (made,) = blobs_of(engine, batch_of([(chunk, size, base)], xor=(seed + number) % 3 == 0))
        chain = [made, *chain] if made[16] != blob.FULL else [made]
        base, chunk = chunk, moved(chunk, size, seed + number)
    return chain, base


def decode_batch(chains, chunks, bases=None):
    flat = [np.frombuffer(b, np.uint8) for chain in chains for b in chain]
    lengths = np.array([b.size for b in flat], np.int64)
    stored = np.concatenate([*flat, np.empty(0, np.uint8)])
    outs = [np.full(c.size, 0xAA, np.uint8) for c in chunks]
    return DecodeBatch(
        stored, np.cumsum(lengths) - lengths, lengths, np.array(list(map(len, chains)), np.int64),
        digests_of(chunks), Chunks.of(outs), lambda i: f"blob {i}", bases,
    ), outs  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["noise", "rare", "floats"])
def test_chains_of_both_engines_are_rebuilt(engine, reference, size, kind):
    made = [
        chains_of(maker, content(kind, size, count, count), size, versions, count)
        for maker in (engine, reference) for count in (1, 77, 9000, 70_000) for versions in (1, 2, 5)
    ]  # fmt: skip
    chains, chunks = zip(*made, strict=True)
    batch, outs = decode_batch(chains, chunks)
    engine.start_decode(batch)()
    for out, chunk in zip(outs, chunks, strict=True):
        assert out.tobytes() == chunk.tobytes()


def test_most_float_chunks_need_no_reference(engine, monkeypatch):
    """The reference is for rare rows: full float chunks and deltas of training steps do not reach it."""
    chunk = content("floats", 4, 70_000, 1)
    base = (chunk.view(np.uint32) + np.random.default_rng(0).integers(0, 4000, 70_000, np.uint32)).view(np.uint8)
    batch = batch_of([(chunk, 4, None), (chunk, 4, base), (content("constant", 4, 999, 0), 4, None)])
    monkeypatch.setattr(reference_code, "encode_chunk", None)
    data = blobs_of(engine, batch)
    assert [d[16] for d in data] == [blob.FULL, blob.DIFFERENCE, blob.FULL]
    bases = Chunks([base], np.array([-1, 0, -1]), np.zeros(3, np.int64), np.array([0, base.size, 0]))
    decode, outs = decode_batch([[d] for d in data], [chunk, chunk, content("constant", 4, 999, 0)], bases)
    monkeypatch.setattr(chain_decode, "decode_chain", None)
    engine.start_decode(decode)()
    assert outs[1].tobytes() == chunk.tobytes()


def test_a_chunk_may_be_rebuilt_in_the_place_of_its_base(engine):
    base = content("floats", 4, 9000, 1)
    chunk = (base.view(np.uint32) + np.random.default_rng(0).integers(1, 4000, 9000, np.uint32)).view(np.uint8)
    (made,) = blobs_of(engine, batch_of([(chunk, 4, base)]))
    assert made[16] == blob.DIFFERENCE
    batch, _ = decode_batch([[made]], [chunk])
    place = Chunks.of([base.copy()])
    engine.start_decode(replace(batch, outs=place, bases=place))()
    assert place.memories[0].tobytes() == chunk.tobytes()


@pytest.mark.no_cover
def test_damaged_blobs_raise_the_errors_of_the_reference(engine, reference):
    """A byte of a blob is changed, and its checksum made right again, so that the damage reaches the decoder."""
    chunk = content("floats", 4, 3000, 3)
    (whole,) = blobs_of(engine, batch_of([(chunk, 4, None)]))
    for at in range(0, len(whole), max(1, len(whole) // 900)):
        bad = np.array(whole)
        bad[at] ^= 1 + at % 255
        if at % 2:
            bad[8:16] = np.frombuffer(blob.checksum(bad[16:].data).to_bytes(8, "little"), np.uint8)
        results = [result_of(one, bad.data, chunk) for one in (engine, reference)]
        assert results[0] == results[1], at


def test_rows_are_cut_into_spans():
    lengths = np.array([10, 0, spans.SPAN_BYTES, spans.SPAN_BYTES, 5, 5, 7 * spans.SPAN_BYTES])
    for threads in (1, 2, 16):
        cut = spans.cut(lengths, threads).tolist()
        assert (cut[0], cut[-1]) == (0, len(lengths))
        assert sorted(set(cut)) == cut
    assert spans.cut(lengths[:0], 2).tolist() == [0]
    assert spans.cut(np.zeros(3, np.int64), 2).tolist() == [0, 3]
    assert len(spans.cut(np.full(1024, 1 << 14), 2)) == 1 + 8


def one(array, start=0, length=None):
    return [array], np.zeros(1, np.int64), np.array([start]), np.array([array.size if length is None else length])


NONE = ([], np.array([-1]), np.array([0]), np.array([0]))
ONE_SPAN = np.array([0, 1])


def copy_job(chunks, copies=None, out=None, firsts=ONE_SPAN, gate=None):
    return native.copy_job(chunks, copies, 0, out, firsts, gate)


def encode_job(data, **changed):
    """Return a job that encodes or examines a chunk of 96 bytes; `changed`: arguments by name."""
    arguments = {
        "chunks": one(data), "bases": NONE, "copies": None, "sizes": np.ones(1, np.uint8),
        "layouts": np.ones(1, np.uint8), "mode": 1, "terms": planes.ENTROPY_TERMS, "limits": np.array([UNLIMITED]),
        "digests": np.zeros(16, np.uint8), "base_digests": np.zeros(16, np.uint8), "copied": None, "wanted": None,
        "entries": np.zeros(blob.ENTRY.itemsize, np.uint8), "starts": np.zeros(1, np.int64),
        "places": np.array([0, 8192]), "out": np.zeros(8192, np.uint8), "seed": 0, "firsts": ONE_SPAN, "gate": None,
    } | changed  # fmt: skip
    return native.encode_job(*arguments.values())


def decode_job(data, offset=0, length=96, count=1, **changed):
    arguments = {
        "stored": data, "offsets": np.array([offset]), "lengths": np.array([length]), "counts": np.array([count]),
        "digests": np.zeros(16, np.uint8), "each": None, "outs": one(data.copy()), "bases": NONE, "seed": 0,
        "done": np.zeros(1, np.uint8), "reports_all": False, "firsts": ONE_SPAN, "gate": None,
    } | changed  # fmt: skip
    return native.decode_job(*arguments.values())


def run(made):
    """Do spans of a job in this thread; return the one that Python looked at, if any, and whether the job has ended."""
    job, scratch_bytes, _ = made
    seen = []
    ends = native.run(job, np.empty(scratch_bytes, np.uint8), seen.append)
    return (seen or [None])[0], ends


@pytest.mark.parametrize(("start", "length"), [(-1, 4), (0, 101), (100, 1), (50, -1), (2**62, 2**62)])
def test_positions_outside_of_a_memory_are_refused(start, length):
    with pytest.raises(ValueError, match=r"chunk 0: bytes .* of a memory of 100 bytes"):
        copy_job(one(np.zeros(100, np.uint8), start, length))


def test_wrong_columns_are_refused():
    data, sixteen = np.zeros(96, np.uint8), np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="expected 16"):
        copy_job(one(data), out=np.empty(15, np.uint8))
    with pytest.raises(BufferError):
        copy_job(one(data), out=bytes(16))
    with pytest.raises(IndexError):
        copy_job(([], np.array([0]), np.array([0]), np.array([0])), out=sixteen)
    with pytest.raises(ValueError, match="too little memory for a copy"):
        copy_job(one(data), one(data.copy(), 0, 95))
    for firsts in ([1, 1], [0, 2], [0, 0], [0, 1, 0, 1], [0], []):
        with pytest.raises(ValueError, match="spans do not have all chunks"):
            copy_job(one(data), firsts=np.array(firsts, np.int64))
    with pytest.raises(ValueError, match="a column of 8 bytes"):
        copy_job(one(data), gate=np.zeros(1, np.int64))
    byte = np.ones(1, np.uint8)
    for changed, match in (
        ({"sizes": byte * 3}, "wrong element sizes"), ({"sizes": byte * 64}, "wrong element sizes"),
        ({"layouts": byte * 2}, "wrong element sizes"), ({"mode": 0}, "wrong mode"), ({"mode": 3}, "wrong mode"),
        ({"bases": one(data, 0, 5)}, "lengths differ"), ({"terms": planes.ENTROPY_TERMS[1:]}, "a column of"),
        ({"limits": np.array([1, 2])}, "a column of"), ({"entries": sixteen}, "a column of"),
        ({"copies": one(data.copy()), "copied": None}, "copies of chunks that are not examined"),
        ({"copies": one(data.copy(), 0, 95), "copied": byte}, "lengths differ"),
        ({"places": np.array([0, 8193])}, "spans of blobs"), ({"places": np.array([8, 0])}, "spans of blobs"),
        ({"places": np.array([-8, 0])}, "spans of blobs"), ({"places": np.array([4, 8])}, "spans of blobs"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            encode_job(data, **changed)
    with pytest.raises(BufferError):
        encode_job(data, copied=byte, digests=bytes(16))
    for offset, length, count in ((-1, 5, 1), (0, 97, 1), (97, 0, 1), (0, 5, 2), (0, 5, 0), (0, 5, -1)):
        with pytest.raises(ValueError, match=r"outside of the stored bytes|wrong numbers of blobs"):
            decode_job(data, offset, length, count)
    with pytest.raises(ValueError, match="lengths differ"):
        decode_job(data, bases=one(data, 0, 95))
    for made in (encode_job(data), decode_job(data)):
        for room in (np.empty(made[1] - 1, np.uint8), np.empty(made[1] + 1, np.uint8)[1:]):
            with pytest.raises(ValueError, match=r"too little scratch memory|not aligned"):
                native.run(made[0], room, print)
    with pytest.raises(ValueError, match="invalid PyCapsule"):
        native.run(object(), sixteen, print)


def test_little_room_declines_a_blob():
    data = np.zeros(4096, np.uint8)
    for room in (0, 80, 4096, 4176):
        entries = np.full(1, 1, np.uint8).repeat(blob.ENTRY.itemsize)
        made = encode_job(data, entries=entries, places=np.array([0, room]), out=np.empty(room, np.uint8))
        assert run(made) == (0, True)
        assert entries.view(blob.ENTRY)["length"].tolist() == [0]
        assert run(made) == (None, False)


def job_of_spans(count, gate=None, **changed):
    """Return a job of spans that Python must look at: damaged blobs of 10 bytes."""
    rows = np.zeros(count, np.int64), np.arange(0, 10 * count, 10), np.full(count, 10)
    return decode_job(
        noise_of(10 * count), outs=([np.zeros(10 * count, np.uint8)], *rows),
        bases=([], np.full(count, -1), *rows[1:]), offsets=rows[1], lengths=rows[2], counts=np.ones(count, np.int64),
        digests=np.zeros((count, 16), np.uint8), done=np.zeros(count, np.uint8), firsts=np.arange(count + 1), gate=gate,
        **changed,
    )  # fmt: skip


def test_a_closed_gate_ends_a_job():
    """The spans that are running are finished, and no other one is begun: the memory may be gone by then."""
    gate = Gate()
    job = job_of_spans(8, gate.flags)
    assert [run(job) for _ in range(3)] == [(0, False), (1, False), (2, False)]
    gate.close()
    assert run(job) == (None, True)  # nothing is done for the other spans
    assert native.spans_undone(job[0]) == 0
    assert gate.flags.tolist() == [1, 0]
    out = np.zeros((8, 16), np.uint8)
    digests = copy_job(([noise_of(80)], np.zeros(8, np.int64), np.arange(0, 80, 10), np.full(8, 10)), None, out,
                       np.arange(9), gate.flags)  # fmt: skip
    assert run(digests) == (None, True)
    assert not out.any()


def test_a_queue_serves_urgent_jobs_first():
    queue, jobs = native.queue(), [job_of_spans(2) for _ in range(4)]
    scratch = np.empty(max(job[1] for job in jobs), np.uint8)
    assert native.serve(queue, scratch) == (0, -1)
    for job, urgent in zip(jobs, (False, True, True, False), strict=True):
        assert native.push(queue, job[0], urgent)
    assert not native.push(queue, jobs[0][0], False)  # it is in the queue already
    assert native.queued(queue) == 4
    assert native.serve(queue, scratch[:-1].view()) == (0, jobs[1][1])
    assert run(jobs[3]) == (0, False)  # a thread that helps
    found = [native.serve(queue, scratch) for _ in range(8)]
    expected = [(1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 1), (3, 1)]
    assert found == [*((jobs[number][2], span) for number, span in expected), (0, -1)]
    assert native.queued(queue) == 0
    assert [native.done(job[0]) for job in jobs[:3] for _ in range(2)] == [False, True] * 3
    assert native.done(jobs[3][0])


def test_a_span_is_done_even_if_a_look_at_it_fails():
    job, scratch_bytes, _ = job_of_spans(2)

    def look(span):
        raise KeyboardInterrupt

    for left in (1, 0):
        with pytest.raises(KeyboardInterrupt):
            native.run(job, np.empty(scratch_bytes, np.uint8), look)
        assert native.spans_undone(job) == left


def test_who_waits_does_the_work_that_the_threads_cannot(monkeypatch):
    """A thread may end for want of memory; an interrupt may strike before anybody notes the end of a job."""
    monkeypatch.setattr(spans, "PATIENCE_S", 0.01)
    threads = Threads(2)
    queue = spans.JobQueue(native, threads)
    looked = []
    with monkeypatch.context() as patch:
        patch.setattr(spans.JobQueue, "_run_jobs", lambda self: 1 / 0)
        job = spans.SharedJob(queue, job_of_spans(8), np.arange(9)).start(lambda first, last: looked.append(first))
        job()
    assert sorted(looked) == list(range(8))
    again = spans.SharedJob(queue, job_of_spans(3), np.arange(4)).start()
    again()
    until(lambda: not queue._serving)  # a thread may still be on its way out of the job
    lost = spans.SharedJob(queue, job_of_spans(2), np.arange(3))
    for _ in range(2):
        native.run(lost.handle, np.empty(lost.scratch_bytes, np.uint8), lost.look_at)
    lost()
    threads.close()


def test_a_full_queue_refuses_a_job():
    queue, jobs = native.queue(), [job_of_spans(1) for _ in range(65)]
    assert [native.push(queue, job[0], False) for job in jobs] == [True] * 64 + [False]
    assert not native.push(native.queue(), job_of_spans(0)[0], False)
    for job in jobs:
        run(job)


def noise_of(count):
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


def test_threads_share_jobs(reference):
    """Each chunk is handled once, whichever thread takes it, from whichever job."""
    threads = Threads(8)
    queue = spans.JobQueue(native, threads)
    chunks = Chunks.of([noise_of(count) for count in range(2000, 2300)])
    starts = np.cumsum(chunks.lengths) - chunks.lengths
    expected = reference.start_digests(chunks)()
    for _ in range(examples(20)):
        jobs, outs = [], []
        for number in range(4):
            out, copies = np.zeros((300, 16), np.uint8), np.zeros(sum(chunks.lengths), np.uint8)
            places = Chunks([copies], np.zeros(300, np.int64), starts, chunks.lengths)
            firsts = np.arange(301)
            made = native.copy_job(spans.place(chunks), spans.place(places), SEED, out, firsts, None)
            jobs.append(spans.SharedJob(queue, made, firsts).start(urgent=number == 2))
            outs.append((out, copies))
        jobs[3].help()
        for job, (out, copies) in zip(jobs, outs, strict=True):
            job()
            assert job.done.is_set()
            assert (out == expected).all()
            assert copies.tobytes() == b"".join(view.tobytes() for view in chunks.views())
    threads.close()


def test_an_error_while_python_looks_is_raised_in_the_end():
    threads = Threads(2)
    firsts, seen = np.arange(9), []
    job = spans.SharedJob(spans.JobQueue(native, threads), job_of_spans(8), firsts)

    def look(first, last):
        seen.append(first)
        if first == 3:
            raise IntegrityError("span 3")

    job.start(look)
    with pytest.raises(IntegrityError, match="span 3"):
        job()
    assert sorted(seen) == list(range(8))
    threads.close()


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("SNAPSTORE_ENGINE", "numpy")
    assert spans.extension() is None
    monkeypatch.setenv("SNAPSTORE_ENGINE", "native")
    assert spans.extension() is native
    monkeypatch.setattr(spans, "_native", None)
    with pytest.raises(CapabilityError, match="the extension is missing"):
        spans.extension()
    monkeypatch.setenv("SNAPSTORE_ENGINE", "fast")
    with pytest.raises(InvalidInputError, match="SNAPSTORE_ENGINE='fast': expected 'native' or 'numpy'"):
        spans.extension()
