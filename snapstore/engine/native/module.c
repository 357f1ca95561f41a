// The extension `snapstore.engine._native`. Each function handles a span of chunks in one call, and releases
// Python's lock meanwhile. _native.pyi has the arguments.
#include "arguments.h"

bool use_avx2 = false;

// -- what a call holds

typedef struct {
    Columns columns;
    Spans chunks, bases;
} Call;

static PyObject *end_call(Call *call, PyObject *result) {
    release_columns(&call->columns);
    release_spans(&call->chunks);
    release_spans(&call->bases);
    return result;
}

static PyObject *succeed(Call *call) {
    Py_IncRef(Py_None);
    return end_call(call, Py_None);
}

static PyObject *refuse(Call *call, const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return end_call(call, NULL);
}

static bool is_size(int size) { return size == 1 || size == 2 || size == 4 || size == 8; }

// Return whether each chunk of `others`, which may be missing, has the length of the one of `chunks`.
static bool are_as_long(const Spans *chunks, const Spans *others) {
    for (Py_ssize_t i = 0; i < others->count; i++)
        if (others->spans[i].data && others->spans[i].bytes != chunks->spans[i].bytes) return false;
    return true;
}

// Return whether chunks have whole elements and known layouts, and each base has the length of its chunk.
static bool are_elements(const Spans *chunks, const Spans *bases, const u8 *sizes, const u8 *layouts) {
    for (Py_ssize_t i = 0; i < chunks->count; i++) {
        if (!is_size(sizes[i]) || layouts[i] > LAYOUT_ROTATED || chunks->spans[i].bytes % sizes[i])
            return false;
    }
    return are_as_long(chunks, bases);
}

// Return the most bytes of a chunk.
static size_t largest(const Spans *chunks) {
    size_t most = 0;
    for (Py_ssize_t i = 0; i < chunks->count; i++)
        if (chunks->spans[i].bytes > most) most = chunks->spans[i].bytes;
    return most;
}

// -- spans

static void digest_span(const Call *call, u64 seed, u8 *digests) {
    for (Py_ssize_t i = 0; i < call->chunks.count; i++) {
        const Span chunk = call->chunks.spans[i];
        xxh3_digest(chunk.data, chunk.bytes, seed, digests + 16 * i);
        if (call->bases.count && call->bases.spans[i].data && chunk.bytes)
            memmove(call->bases.spans[i].data, chunk.data, chunk.bytes);
    }
}

static PyObject *py_digests(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *chunks, *copies, *out;
    unsigned long long seed;
    Call call = {0};
    if (!PyArg_ParseTuple(args, "OOKO", &chunks, &copies, &seed, &out)) return NULL;
    if (!take_spans(&call.chunks, chunks, -1, false)) return end_call(&call, NULL);
    if (copies != Py_None && !take_spans(&call.bases, copies, call.chunks.count, true))
        return end_call(&call, NULL);
    if (!are_as_long(&call.chunks, &call.bases)) return refuse(&call, "lengths differ");
    u8 *digests = take_column(&call.columns, out, 16 * call.chunks.count, true);
    if (!digests) return end_call(&call, NULL);
    Py_BEGIN_ALLOW_THREADS
    digest_span(&call, seed, digests);
    Py_END_ALLOW_THREADS
    return succeed(&call);
}

// Take the chunks, the bases, the element sizes and the layouts of a span to encode.
static bool take_batch(Call *call, PyObject *chunks, PyObject *bases, PyObject *const given[2],
                       const u8 *taken[2]) {
    if (!take_spans(&call->chunks, chunks, -1, false)) return false;
    if (!take_spans(&call->bases, bases, call->chunks.count, false)) return false;
    for (int i = 0; i < 2; i++)
        if (!(taken[i] = take_column(&call->columns, given[i], call->chunks.count, false))) return false;
    if (are_elements(&call->chunks, &call->bases, taken[0], taken[1])) return true;
    PyErr_SetString(PyExc_ValueError, "wrong element sizes, layouts or bases");
    return false;
}

// What a call that samples takes beside chunks and bases.
typedef struct {
    const u8 *sizes, *layouts;
    int mode;          // of deltas
    const i64 *terms;  // NULL: nothing is sampled
    Sampled *sampled;
} SampleColumns;

static bool take_sample_columns(Call *call, PyObject *const spans[2], PyObject *const given[4], int mode,
                                SampleColumns *columns) {
    const u8 *taken[2];
    if (mode != DIFFERENCE && mode != XOR) {
        PyErr_SetString(PyExc_ValueError, "wrong mode");
        return false;
    }
    if (!take_batch(call, spans[0], spans[1], given, taken)) return false;
    *columns = (SampleColumns){.sizes = taken[0], .layouts = taken[1], .mode = mode};
    if (given[2] != Py_None && !(columns->terms = take_column(&call->columns, given[2], 8 * MOST_SAMPLED, false)))
        return false;
    columns->sampled =
        take_column(&call->columns, given[3], (Py_ssize_t)sizeof(Sampled) * call->chunks.count, true);
    return columns->sampled != NULL;
}

// Sample a chunk and its delta.
static void sample_row(const SampleColumns *columns, Py_ssize_t i, const u8 *chunk, const u8 *base, size_t bytes) {
    const int size = columns->sizes[i], layout = columns->layouts[i], mode = columns->mode;
    const size_t elements = bytes / (size_t)size;
    Sampled *sampled = &columns->sampled[i];
    memset(sampled, 0, sizeof *sampled);
    sampled->is_valid = 1;
    sampled->changed = (i64)elements;
    if (base) {  // first the one that reads whole chunks, so that the others find them in the cache
        sampled->changed = (i64)count_changed(chunk, base, size, elements, elements / 2);
        const Elements delta = {size, mode == XOR ? layout : LAYOUT_BYTES, mode};
        sample_planes(chunk, base, delta, elements, columns->terms, sampled->planes[1]);
    }
    sample_planes(chunk, NULL, (Elements){size, layout, NONE}, elements, columns->terms, sampled->planes[0]);
}

static PyObject *py_sample(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *spans[2], *given[4];
    int mode;
    Call call = {0};
    SampleColumns columns;
    if (!PyArg_ParseTuple(args, "OOOOiOO", &spans[0], &spans[1], &given[0], &given[1], &mode, &given[2],
                          &given[3]))
        return NULL;
    if (!take_sample_columns(&call, spans, given, mode, &columns)) return end_call(&call, NULL);
    if (!columns.terms) return refuse(&call, "no terms");
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < call.chunks.count; i++)
        if (!columns.sampled[i].is_valid)
            sample_row(&columns, i, call.chunks.spans[i].data, call.bases.spans[i].data,
                       call.chunks.spans[i].bytes);
    Py_END_ALLOW_THREADS
    return succeed(&call);
}

// What became of the copy of a chunk: none was made; made, and equal; the chunk was changed meanwhile.
enum { NOT_COPIED, COPIED, CHANGED };

// Hash a chunk and its base; if they differ, copy the chunk, hash the copy, and sample it. All of this reads the
// chunk from memory once, and from the cache after that. Return what became of the copy.
static int examine_row(const SampleColumns *columns, Py_ssize_t i, Span chunk, const u8 *base, u8 *copy, u64 seed,
                       u8 *digest, u8 *base_digest) {
    u8 again[16];
    if (base) xxh3_digest(base, chunk.bytes, seed, base_digest);
    xxh3_digest(chunk.data, chunk.bytes, seed, digest);
    if (base && !memcmp(digest, base_digest, 16)) return NOT_COPIED;
    const u8 *source = chunk.data;
    if (copy) {
        memcpy(copy, chunk.data, chunk.bytes);
        xxh3_digest(source = copy, chunk.bytes, seed, again);
        if (memcmp(again, digest, 16)) return CHANGED;
    }
    if (columns->terms) sample_row(columns, i, source, base, chunk.bytes);
    return copy ? COPIED : NOT_COPIED;
}

static PyObject *py_examine(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *spans[3], *given[4], *out[3];
    unsigned long long seed;
    int mode;
    Call call = {0};
    SampleColumns columns;
    Spans copies = {0};
    u8 *found[3];
    if (!PyArg_ParseTuple(args, "OOOOOiOOKOOO", &spans[0], &spans[1], &spans[2], &given[0], &given[1], &mode,
                          &given[2], &given[3], &seed, &out[0], &out[1], &out[2]))
        return NULL;
    if (!take_sample_columns(&call, spans, given, mode, &columns)) return end_call(&call, NULL);
    const Py_ssize_t n = call.chunks.count;
    for (int k = 0; k < 3; k++)
        if (!(found[k] = take_column(&call.columns, out[k], k < 2 ? 16 * n : n, true)))
            return end_call(&call, NULL);
    if (spans[2] != Py_None && !take_spans(&copies, spans[2], n, true)) return end_call(&call, NULL);
    if (!are_as_long(&call.chunks, &copies)) {
        release_spans(&copies);
        return refuse(&call, "lengths differ");
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++)
        found[2][i] = (u8)examine_row(&columns, i, call.chunks.spans[i], call.bases.spans[i].data,
                                      copies.count ? copies.spans[i].data : NULL, seed, found[0] + 16 * i,
                                      found[1] + 16 * i);
    Py_END_ALLOW_THREADS
    release_spans(&copies);
    return succeed(&call);
}

// How to store a chunk: by the reference, full, as a delta in planes, or as a sparse delta; if that would be too
// large, full or in planes.
enum { BY_REFERENCE, STORE_FULL, STORE_DELTA, SPARSE_OR_FULL, SPARSE_OR_DELTA };

typedef struct {
    const u8 *sizes, *layouts, *digests, *base_digests, *kinds, *how;
    const i64 *most;  // bytes of sparse deltas
    u8 *out, *entries;
    size_t room;
    int mode;  // of deltas
    Scratch *scratch;
} EncodeColumns;

// Encode one chunk; return the length of its blob, or 0 if it is declined.
static size_t encode_row(const EncodeColumns *columns, Py_ssize_t i, Span chunk, const u8 *base, u8 *out, size_t room,
                         u8 *entry) {
    const int how = columns->how[i];
    const bool may_be_sparse = how >= SPARSE_OR_FULL, is_delta = how == STORE_DELTA || how == SPARSE_OR_DELTA;
    EncodeRow row = {
        .source = chunk.data,
        .base = is_delta || may_be_sparse ? base : NULL,
        .bytes = chunk.bytes,
        .element_size = columns->sizes[i],
        .layout = columns->layouts[i],
        .mode = is_delta || may_be_sparse ? columns->mode : NONE,
        .kinds = columns->kinds + MAX_PLANES * i,
        .digest = columns->digests + 16 * i,
        .base_digest = columns->base_digests + 16 * i,
    };
    if (how == BY_REFERENCE) return 0;
    if (may_be_sparse) {
        const size_t length = encode_sparse_blob(&row, (size_t)columns->most[i], out, room, entry, columns->scratch);
        if (length != SIZE_MAX) return length;
        if (!is_delta) row.base = NULL, row.mode = NONE;
    }
    return encode_blob(&row, out, room, entry, columns->scratch);
}

static void encode_span(const Call *call, const EncodeColumns *columns) {
    size_t at = 0;
    for (Py_ssize_t i = 0; i < call->chunks.count; i++) {
        u8 *entry = columns->entries + ENTRY_BYTES * i;
        memset(entry, 0, ENTRY_BYTES);
        const size_t length = encode_row(columns, i, call->chunks.spans[i], call->bases.spans[i].data,
                                         columns->out + at, columns->room - at, entry);
        if (!length) continue;
        put_le(entry, at, 8);
        at += length;
        for (; at % 8; at++) columns->out[at] = 0;  // as in a pack; every blob leaves room for it
    }
}

// Check scratch memory, which was taken last.
static bool is_scratch(const Call *call, const void *scratch, size_t per_byte) {
    if (last_bytes(&call->columns) >= sizeof(Scratch) + per_byte * largest(&call->chunks) &&
        (uintptr_t)scratch % _Alignof(Scratch) == 0)
        return true;
    PyErr_SetString(PyExc_ValueError, "too little scratch memory, or not aligned");
    return false;
}

static bool take_encode_columns(Call *call, PyObject *const given[8], EncodeColumns *columns) {
    const Py_ssize_t n = call->chunks.count;
    if (!(columns->digests = take_column(&call->columns, given[0], 16 * n, false))) return false;
    if (!(columns->base_digests = take_column(&call->columns, given[1], 16 * n, false))) return false;
    if (!(columns->kinds = take_column(&call->columns, given[2], MAX_PLANES * n, false))) return false;
    if (!(columns->how = take_column(&call->columns, given[3], n, false))) return false;
    if (!(columns->most = take_column(&call->columns, given[4], 8 * n, false))) return false;
    if (!(columns->entries = take_column(&call->columns, given[5], ENTRY_BYTES * n, true))) return false;
    if (!(columns->out = take_column(&call->columns, given[6], -1, true))) return false;
    columns->room = last_bytes(&call->columns);
    if (!(columns->scratch = take_column(&call->columns, given[7], -1, true))) return false;
    bool is_sparse = false;
    for (Py_ssize_t i = 0; i < n; i++) {
        const int how = columns->how[i];
        if (how > SPARSE_OR_DELTA || (how >= STORE_DELTA && !call->bases.spans[i].data)) {
            PyErr_SetString(PyExc_ValueError, "a delta without a base");
            return false;
        }
        if (how >= SPARSE_OR_FULL && (columns->mode != DIFFERENCE || columns->most[i] < 0)) {
            PyErr_SetString(PyExc_ValueError, "a sparse delta of an XOR, or of less than no bytes");
            return false;
        }
        is_sparse = is_sparse || how >= SPARSE_OR_FULL;
    }
    return is_scratch(call, columns->scratch, is_sparse ? SPARSE_SCRATCH_PER_BYTE : SCRATCH_PER_BYTE);
}

static PyObject *py_encode(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *chunks, *bases, *batch[2], *given[8];
    const u8 *taken[2];
    Call call = {0};
    EncodeColumns columns = {0};
    if (!PyArg_ParseTuple(args, "OOOOiOOOOOOOO", &chunks, &bases, &batch[0], &batch[1], &columns.mode, &given[0],
                          &given[1], &given[2], &given[3], &given[4], &given[5], &given[6], &given[7]))
        return NULL;
    if (columns.mode != DIFFERENCE && columns.mode != XOR) return refuse(&call, "wrong mode");
    if (!take_batch(&call, chunks, bases, batch, taken)) return end_call(&call, NULL);
    columns.sizes = taken[0], columns.layouts = taken[1];
    if (!take_encode_columns(&call, given, &columns)) return end_call(&call, NULL);
    Py_BEGIN_ALLOW_THREADS
    encode_span(&call, &columns);
    Py_END_ALLOW_THREADS
    return succeed(&call);
}

typedef struct {
    const i64 *counts;
    const u8 *digests, *each;  // each: of the chunk of each blob; or NULL
    u8 *done;
    Scratch *scratch;
    Stored *blobs;
    u64 seed;
} DecodeColumns;

static void decode_span(const Call *call, const DecodeColumns *columns) {
    const Stored *blobs = columns->blobs;
    const u8 *each = columns->each;
    for (Py_ssize_t i = 0; i < call->chunks.count; i++) {
        const Span out = call->chunks.spans[i];
        const size_t count = (size_t)columns->counts[i];
        const u8 *base = call->bases.spans[i].data, *digest = columns->digests + 16 * i;
        // a chunk in the place of its base is left to the reference: it would find the base overwritten
        const bool apart = !base || base + out.bytes <= out.data || out.data + out.bytes <= base;
        columns->done[i] = out.data && apart &&
                           decode_chain(blobs, count, base, digest, each, columns->seed, out.data, out.bytes,
                                        columns->scratch);
        blobs += count;
        if (each) each += 16 * count;
    }
}

// Set where each blob lies in `stored`. Return false with an exception if one lies outside, or their number
// is wrong.
static bool place_blobs(Call *call, PyObject *const given[3], const i64 *counts, Stored *blobs,
                        Py_ssize_t m) {
    const u8 *stored = take_column(&call->columns, given[0], -1, false);
    if (!stored) return false;
    const i64 size = (i64)last_bytes(&call->columns);
    const i64 *offsets = take_column(&call->columns, given[1], 8 * m, false);
    const i64 *lengths = offsets ? take_column(&call->columns, given[2], 8 * m, false) : NULL;
    if (!lengths) return false;
    i64 left = m;
    for (Py_ssize_t i = 0; i < call->chunks.count; i++) {
        if (counts[i] < 0 || counts[i] > left) left = -1;
        if (left < 0) break;
        left -= counts[i];
    }
    bool inside = left == 0;
    for (Py_ssize_t i = 0; i < m && inside; i++) {
        inside = offsets[i] >= 0 && lengths[i] >= 0 && offsets[i] <= size && lengths[i] <= size - offsets[i];
        blobs[i] = (Stored){stored + offsets[i], (size_t)lengths[i]};
    }
    if (!inside) PyErr_SetString(PyExc_ValueError, "a blob outside of the stored bytes, or wrong counts");
    return inside;
}

static bool take_decode_columns(Call *call, PyObject *const given[7], DecodeColumns *columns) {
    const Py_ssize_t n = call->chunks.count;
    if (!(columns->counts = take_column(&call->columns, given[3], 8 * n, false))) return false;
    if (!(columns->digests = take_column(&call->columns, given[4], 16 * n, false))) return false;
    if (!(columns->done = take_column(&call->columns, given[5], n, true))) return false;
    if (!(columns->scratch = take_column(&call->columns, given[6], -1, true))) return false;
    if (!is_scratch(call, columns->scratch, SCRATCH_PER_BYTE)) return false;
    for (Py_ssize_t i = 0; i < n; i++)
        if (call->bases.spans[i].data && call->bases.spans[i].bytes != call->chunks.spans[i].bytes) {
            PyErr_SetString(PyExc_ValueError, "a base of another length than its chunk");
            return false;
        }
    return true;
}

static PyObject *py_decode(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *given[7], *outs, *bases, *each;
    unsigned long long seed;
    Call call = {0};
    DecodeColumns columns = {0};
    if (!PyArg_ParseTuple(args, "OOOOOOOOKOO", &given[0], &given[1], &given[2], &given[3], &given[4], &each,
                          &outs, &bases, &seed, &given[5], &given[6]))
        return NULL;
    const Py_ssize_t m = PyObject_Size(given[1]);
    if (m < 0 || !take_spans(&call.chunks, outs, -1, true)) return end_call(&call, NULL);
    if (!take_spans(&call.bases, bases, call.chunks.count, false)) return end_call(&call, NULL);
    if (!take_decode_columns(&call, given, &columns)) return end_call(&call, NULL);
    if (each != Py_None && !(columns.each = take_column(&call.columns, each, 16 * m, false)))
        return end_call(&call, NULL);
    columns.seed = seed;
    columns.blobs = PyMem_Calloc((size_t)m + 1, sizeof(Stored));
    if (!columns.blobs) return end_call(&call, PyErr_NoMemory());
    const bool placed = place_blobs(&call, given, columns.counts, columns.blobs, m);
    if (placed) {
        Py_BEGIN_ALLOW_THREADS
        decode_span(&call, &columns);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(columns.blobs);
    return placed ? succeed(&call) : end_call(&call, NULL);
}

// -- the parts of spans alone, for tests

static PyObject *py_checksum(PyObject *self, PyObject *data) {
    (void)self;
    Call call = {0};
    const u8 *bytes = take_column(&call.columns, data, -1, false);
    if (!bytes) return end_call(&call, NULL);
    return end_call(&call, PyLong_FromUnsignedLongLong(xxh3_64(bytes, last_bytes(&call.columns))));
}

// Take the arguments of `split` and `merge`: (source, base or None, size, layout, mode, out).
static bool take_elements(Call *call, PyObject *args, u8 *taken[3], Elements *e, size_t *n) {
    PyObject *source, *base, *out;
    if (!PyArg_ParseTuple(args, "OOiiiO", &source, &base, &e->size, &e->layout, &e->mode, &out)) return false;
    if (!(taken[0] = take_column(&call->columns, source, -1, false))) return false;
    const size_t bytes = last_bytes(&call->columns);
    taken[1] = NULL;
    if (base != Py_None && !(taken[1] = take_column(&call->columns, base, (Py_ssize_t)bytes, false)))
        return false;
    if (!(taken[2] = take_column(&call->columns, out, (Py_ssize_t)bytes, true))) return false;
    *n = is_size(e->size) ? bytes / (size_t)e->size : 0;
    if (is_size(e->size) && bytes % (size_t)e->size == 0 && (e->mode != NONE) == (taken[1] != NULL))
        return true;
    PyErr_SetString(PyExc_ValueError, "wrong element size or mode");
    return false;
}

static PyObject *py_split(PyObject *self, PyObject *args) {
    (void)self;
    Call call = {0};
    Elements e;
    size_t n;
    u8 *taken[3], *planes[MAX_PLANES];
    if (!take_elements(&call, args, taken, &e, &n)) return end_call(&call, NULL);
    for (int k = 0; k < e.size; k++) planes[k] = taken[2] + (size_t)k * n;
    split_planes(taken[0], taken[1], e, n, planes);
    return succeed(&call);
}

static PyObject *py_merge(PyObject *self, PyObject *args) {
    (void)self;
    Call call = {0};
    Elements e;
    size_t n;
    u8 *taken[3];
    const u8 *planes[MAX_PLANES];
    if (!take_elements(&call, args, taken, &e, &n)) return end_call(&call, NULL);
    for (int k = 0; k < e.size; k++) planes[k] = taken[0] + (size_t)k * n;
    merge_planes(planes, taken[1], e, n, taken[2]);
    return succeed(&call);
}

// Take the arguments (source, out) of the codecs, and memory for their tables.
static Scratch *take_block(Call *call, PyObject *args, u8 *taken[2], size_t bytes[2]) {
    PyObject *given[2];
    if (!PyArg_ParseTuple(args, "OO", &given[0], &given[1])) return NULL;
    for (int i = 0; i < 2; i++) {
        if (!(taken[i] = take_column(&call->columns, given[i], -1, i == 1))) return NULL;
        bytes[i] = last_bytes(&call->columns);
    }
    Scratch *scratch = PyMem_Calloc(1, sizeof *scratch);
    if (!scratch) PyErr_NoMemory();
    return scratch;
}

static PyObject *encode_by(PyObject *args, bool runs) {
    Call call = {0};
    u8 *taken[2];
    size_t bytes[2], length = 0;
    u64 repeating = 0;
    Scratch *scratch = take_block(&call, args, taken, bytes);
    if (!scratch) return end_call(&call, NULL);
    const bool fits = bytes[0] && bytes[0] <= BLOCK_BYTES && bytes[1] >= bytes[0] + FRAME_SLACK;
    if (fits && runs) length = encode_runs(taken[0], (u32)bytes[0], taken[1], &scratch->runs);
    if (fits && !runs) length = encode_frame(taken[0], (u32)bytes[0], taken[1], &scratch->encode, &repeating);
    PyMem_Free(scratch);
    return fits ? end_call(&call, PyLong_FromSize_t(length)) : refuse(&call, "wrong lengths");
}

static PyObject *decode_by(PyObject *args, bool runs) {
    Call call = {0};
    u8 *taken[2];
    size_t bytes[2];
    Scratch *scratch = take_block(&call, args, taken, bytes);
    if (!scratch) return end_call(&call, NULL);
    const bool done = runs ? decode_runs(taken[0], bytes[0], taken[1], bytes[1], &scratch->decode_runs)
                           : decode_frame(taken[0], bytes[0], taken[1], bytes[1], &scratch->decode);
    PyMem_Free(scratch);
    return end_call(&call, PyBool_FromLong(done));
}

static PyObject *py_encode_frame(PyObject *self, PyObject *args) {
    (void)self;
    return encode_by(args, false);
}

static PyObject *py_encode_runs(PyObject *self, PyObject *args) {
    (void)self;
    return encode_by(args, true);
}

static PyObject *py_decode_frame(PyObject *self, PyObject *args) {
    (void)self;
    return decode_by(args, false);
}

static PyObject *py_decode_runs(PyObject *self, PyObject *args) {
    (void)self;
    return decode_by(args, true);
}

static bool has_avx2(void) {
#if HAS_AVX2_CODE
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#else
    return false;
#endif
}

static PyObject *py_use_avx2(PyObject *self, PyObject *wanted) {
    (void)self;
    use_avx2 = PyObject_IsTrue(wanted) == 1 && has_avx2();
    return PyBool_FromLong(use_avx2);
}

static PyObject *py_uses_avx2(PyObject *self, PyObject *nothing) {
    (void)self, (void)nothing;
    return PyBool_FromLong(use_avx2);
}

static PyMethodDef FUNCTIONS[] = {
    {"digests", py_digests, METH_VARARGS, NULL},
    {"examine", py_examine, METH_VARARGS, NULL},
    {"sample", py_sample, METH_VARARGS, NULL},
    {"encode", py_encode, METH_VARARGS, NULL},
    {"decode", py_decode, METH_VARARGS, NULL},
    {"checksum", py_checksum, METH_O, NULL},
    {"split", py_split, METH_VARARGS, NULL},
    {"merge", py_merge, METH_VARARGS, NULL},
    {"encode_frame", py_encode_frame, METH_VARARGS, NULL},
    {"decode_frame", py_decode_frame, METH_VARARGS, NULL},
    {"encode_runs", py_encode_runs, METH_VARARGS, NULL},
    {"decode_runs", py_decode_runs, METH_VARARGS, NULL},
    {"use_avx2", py_use_avx2, METH_O, NULL},
    {"uses_avx2", py_uses_avx2, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The hot loops of the CPU engine, in C.",
    .m_size = -1,
    .m_methods = FUNCTIONS,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (!module) return NULL;
    use_avx2 = has_avx2();
    if (PyModule_AddIntConstant(module, "SCRATCH_BYTES", (long)sizeof(Scratch)) < 0 ||
        PyModule_AddIntConstant(module, "SCRATCH_PER_BYTE", SCRATCH_PER_BYTE) < 0 ||
        PyModule_AddIntConstant(module, "SPARSE_SCRATCH_PER_BYTE", SPARSE_SCRATCH_PER_BYTE) < 0 ||
        PyModule_AddIntConstant(module, "FRAME_SLACK", FRAME_SLACK) < 0) {
        Py_DecRef(module);
        return NULL;
    }
    return module;
}
