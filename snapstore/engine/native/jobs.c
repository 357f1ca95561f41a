// A job holds what Python passed, checked once, until it is dropped. Any number of threads may run it at the same
// time: each takes the next span until none is left, or the owner of the memory has closed its gate. Threads that serve
// a queue go from job to job, so that they need Python's lock only when a job ends, or Python must look at a span.
#include "jobs.h"

#include <sched.h>

#define JOB "snapstore job"
#define QUEUE "snapstore queue"
#define MOST_QUEUED 64
#define SPINS 1000  // of a lock that is held for some instructions, before the thread lets others run
#define COPY_ALIGNMENT 64

typedef struct Job Job;

// Copies, and digests of what was copied.
typedef struct {
    u64 seed;
    u8 *digests;  // or NULL
} CopyColumns;

typedef struct {
    const u8 *sizes, *layouts;
    u8 *wanted;  // NULL: every chunk is encoded
    const i64 *terms, *limits;           // limits: of deltas, -1: no delta is wanted
    u8 *digests, *base_digests, *copied;  // copied: NULL: the digests are known, and nothing is examined
    u8 *entries, *out;
    i64 *starts;        // of each blob in `out`
    const i64 *places;  // where the blobs of each span begin, and where the last ones must end
    int mode;           // of deltas
    u64 seed;
    size_t planes_bytes;  // of the scratch memory; the copy of a chunk follows
} EncodeColumns;

typedef struct {
    const i64 *counts;
    const u8 *digests, *each;  // each: of the chunk of each blob; or NULL
    u8 *done;
    Stored *blobs;
    i64 *firsts;  // the first blob of each span
    u64 seed;
    bool reports_all;
} DecodeColumns;

typedef struct {
    int lock;
    Py_ssize_t count;
    Job *jobs[MOST_QUEUED];  // that have spans left, the first one first; Python keeps them alive
} Queue;

struct Job {
    unsigned long long number;  // no other job of this process has it
    Columns columns;
    Spans chunks, bases, copies;
    Queue *queue;        // the one that it was pushed to, whose lock guards `next`; or NULL
    bool is_queued;
    Py_ssize_t spans;
    const i64 *firsts;   // (spans + 1,) the first chunk of each span
    i64 next, left;      // the span that nobody has taken yet; how many are not done
    bool is_urgent;      // it goes before the jobs that are not
    i64 *gate;           // not 0: the memory may not be used any more; and how many threads use it; or NULL
    size_t scratch_bytes;
    bool (*act)(const Job *, Py_ssize_t span, Scratch *);  // returns whether Python must look at the span
    CopyColumns copy;
    EncodeColumns encode;
    DecodeColumns decode;
};

// -- the life of a job

static void drop(Job *job) {
    if (!job) return;
    release_columns(&job->columns);
    release_spans(&job->chunks);
    release_spans(&job->bases);
    release_spans(&job->copies);
    PyMem_Free(job->decode.blobs);
    PyMem_Free(job->decode.firsts);
    PyMem_Free(job);
}

static void drop_capsule(PyObject *capsule) { drop(PyCapsule_GetPointer(capsule, JOB)); }

// Return the job to Python; NULL with an exception if it is not complete.
static PyObject *finish(Job *job, bool complete) {
    PyObject *capsule = complete ? PyCapsule_New(job, JOB, drop_capsule) : NULL;
    if (!capsule) {
        drop(job);
        return NULL;
    }
    PyObject *made = Py_BuildValue("OnK", capsule, (Py_ssize_t)job->scratch_bytes, job->number);
    Py_DecRef(capsule);
    return made;
}

static bool refuse(const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return false;
}

static Job *new_job(void) {
    static unsigned long long made = 0;
    Job *job = PyMem_Calloc(1, sizeof *job);
    if (job)
        job->number = ++made;  // under Python's lock
    else
        PyErr_NoMemory();
    return job;
}

// Take the spans of a job whose chunks are there, and the gate.
static bool take_rows(Job *job, PyObject *firsts, PyObject *gate) {
    if (!(job->firsts = take_column(&job->columns, firsts, -1, false))) return false;
    const size_t bytes = last_bytes(&job->columns);
    job->spans = (Py_ssize_t)(bytes / 8) - 1;
    bool ascending = bytes % 8 == 0 && job->spans >= 0;
    for (Py_ssize_t i = 0; i < job->spans && ascending; i++) ascending = job->firsts[i] <= job->firsts[i + 1];
    if (!ascending || job->firsts[0] || job->firsts[job->spans] != job->chunks.count)
        return refuse("spans do not have all chunks, in order");
    job->left = job->spans;
    return gate == Py_None || (job->gate = take_column(&job->columns, gate, 2 * sizeof(i64), true));
}

static size_t largest(const Spans *chunks) {
    size_t most = 0;
    for (Py_ssize_t i = 0; i < chunks->count; i++)
        if (chunks->spans[i].bytes > most) most = chunks->spans[i].bytes;
    return most;
}

// Return whether each chunk of `others`, which may be missing, has the length of the one of `chunks`.
static bool are_as_long(const Spans *chunks, const Spans *others) {
    for (Py_ssize_t i = 0; i < others->count; i++)
        if (others->spans[i].data && others->spans[i].bytes != chunks->spans[i].bytes) return false;
    return true;
}

// -- spans of jobs

static void lock(Queue *queue) {
    for (int spins = 0; __atomic_exchange_n(&queue->lock, 1, __ATOMIC_ACQUIRE); spins++)
        if (spins > SPINS) sched_yield();
}

static void unlock(Queue *queue) { __atomic_store_n(&queue->lock, 0, __ATOMIC_RELEASE); }

// Take a job out of its locked queue.
static void leave(Job *job) {
    Queue *queue = job->queue;
    Py_ssize_t kept = 0;
    for (Py_ssize_t i = 0; i < queue->count; i++)
        if (queue->jobs[i] != job) queue->jobs[kept++] = queue->jobs[i];
    queue->count = kept;
    job->is_queued = false;
}

// Take the next span of a job, -1: none is left. The job stays alive until the span is done.
static i64 take_span(Job *job) {
    const i64 span = job->next < job->spans ? job->next++ : -1;
    if (job->is_queued && job->next == job->spans) leave(job);
    return span;
}

// Go through the gate of a job; return whether its memory may be used. Either way, `go_out` follows.
static bool go_in(Job *job) {
    if (!job->gate) return true;
    __atomic_fetch_add(&job->gate[1], 1, __ATOMIC_SEQ_CST);
    return !__atomic_load_n(&job->gate[0], __ATOMIC_SEQ_CST);
}

static void go_out(Job *job) {
    if (job->gate) __atomic_fetch_sub(&job->gate[1], 1, __ATOMIC_SEQ_CST);
}

// Do a span, unless its memory may not be used any more. Return whether Python must look at it; if not, it is done.
static bool act_on(Job *job, i64 span, u8 *scratch) {
    const bool looks = go_in(job) && job->act(job, (Py_ssize_t)span, (Scratch *)scratch);
    go_out(job);
    return looks;
}

// Note that a span is done; return whether it was the last one.
static bool is_last(Job *job) { return __atomic_sub_fetch(&job->left, 1, __ATOMIC_ACQ_REL) == 0; }

// Return scratch memory, and its bytes; NULL with an exception.
static u8 *take_scratch(Columns *columns, PyObject *given, size_t *bytes) {
    u8 *scratch = take_column(columns, given, -1, true);
    if (!scratch) return NULL;
    *bytes = last_bytes(columns);
    if ((uintptr_t)scratch % _Alignof(Scratch) == 0) return scratch;
    release_columns(columns);
    refuse("scratch memory that is not aligned");
    return NULL;
}

PyObject *py_spans_left(PyObject *self, PyObject *capsule) {
    (void)self;
    const Job *job = PyCapsule_GetPointer(capsule, JOB);
    return job ? PyLong_FromLongLong(job->spans - __atomic_load_n(&job->next, __ATOMIC_RELAXED)) : NULL;
}

PyObject *py_spans_undone(PyObject *self, PyObject *capsule) {
    (void)self;
    const Job *job = PyCapsule_GetPointer(capsule, JOB);
    return job ? PyLong_FromLongLong(__atomic_load_n(&job->left, __ATOMIC_ACQUIRE)) : NULL;
}

PyObject *py_run(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *given, *look;
    Columns columns = {.count = 0};
    size_t bytes;
    if (!PyArg_ParseTuple(args, "OOO", &capsule, &given, &look)) return NULL;
    Job *job = PyCapsule_GetPointer(capsule, JOB);
    u8 *scratch = job ? take_scratch(&columns, given, &bytes) : NULL;
    if (!scratch) return NULL;
    if (bytes < job->scratch_bytes) {
        release_columns(&columns);
        refuse("too little scratch memory");
        return NULL;
    }
    Queue *queue = job->queue;
    bool looks = false, ends = false;
    i64 span = 0;
    Py_BEGIN_ALLOW_THREADS
    while (!looks && !ends) {
        if (queue) lock(queue);
        span = take_span(job);
        if (queue) unlock(queue);
        if (span < 0) break;
        looks = act_on(job, span, scratch);
        ends = !looks && is_last(job);
    }
    Py_END_ALLOW_THREADS
    release_columns(&columns);
    if (looks) {  // all of this is done here, so that the exception of a signal handler cannot come between
        PyObject *found = go_in(job) ? PyObject_CallFunction(look, "L", (long long)span) : PyBool_FromLong(false);
        go_out(job);
        ends = is_last(job);
        if (!found) return NULL;
        Py_DecRef(found);
    }
    return PyBool_FromLong(ends);
}

PyObject *py_done(PyObject *self, PyObject *capsule) {
    (void)self;
    Job *job = PyCapsule_GetPointer(capsule, JOB);
    return job ? PyBool_FromLong(is_last(job)) : NULL;
}

// -- the queue

static void drop_queue(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, QUEUE)); }

PyObject *py_queue(PyObject *self, PyObject *nothing) {
    (void)self, (void)nothing;
    Queue *queue = PyMem_Calloc(1, sizeof *queue);
    if (!queue) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(queue, QUEUE, drop_queue);
    if (!capsule) PyMem_Free(queue);
    return capsule;
}

PyObject *py_push(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsules[2];
    int is_urgent;
    if (!PyArg_ParseTuple(args, "OOp", &capsules[0], &capsules[1], &is_urgent)) return NULL;
    Queue *queue = PyCapsule_GetPointer(capsules[0], QUEUE);
    Job *job = queue ? PyCapsule_GetPointer(capsules[1], JOB) : NULL;
    if (!job) return NULL;
    lock(queue);
    const bool fits = queue->count < MOST_QUEUED && job->spans && !job->next && !job->queue;
    if (fits) {
        Py_ssize_t at = queue->count;
        if (is_urgent)
            for (at = 0; at < queue->count && queue->jobs[at]->is_urgent;) at++;
        job->is_urgent = is_urgent;
        memmove(queue->jobs + at + 1, queue->jobs + at, sizeof(Job *) * (size_t)(queue->count - at));
        queue->jobs[at] = job, job->queue = queue, job->is_queued = true;
        queue->count++;
    }
    unlock(queue);
    return PyBool_FromLong(fits);
}

PyObject *py_withdraw(PyObject *self, PyObject *capsule) {
    (void)self;
    Job *job = PyCapsule_GetPointer(capsule, JOB);
    if (!job) return NULL;
    if (job->queue) {
        lock(job->queue);
        if (job->is_queued) leave(job);
        unlock(job->queue);
    }
    return PyBool_FromLong(__atomic_load_n(&job->left, __ATOMIC_ACQUIRE) == job->spans - job->next);
}

PyObject *py_queued(PyObject *self, PyObject *capsule) {
    (void)self;
    Queue *queue = PyCapsule_GetPointer(capsule, QUEUE);
    if (!queue) return NULL;
    lock(queue);
    const Py_ssize_t count = queue->count;
    unlock(queue);
    return PyLong_FromSsize_t(count);
}

PyObject *py_serve(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *given;
    Columns columns = {.count = 0};
    size_t bytes, needed = 0;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &given)) return NULL;
    Queue *queue = PyCapsule_GetPointer(capsule, QUEUE);
    u8 *scratch = queue ? take_scratch(&columns, given, &bytes) : NULL;
    if (!scratch) return NULL;
    Job *job = NULL;
    unsigned long long number = 0;
    bool looks = false, ends = false;
    i64 span = 0;
    Py_BEGIN_ALLOW_THREADS
    while (!looks && !ends && !needed) {
        lock(queue);
        job = queue->count ? queue->jobs[0] : NULL;
        if (job && job->scratch_bytes > bytes) needed = job->scratch_bytes;
        if (job && !needed) number = job->number, span = take_span(job);
        unlock(queue);
        if (!job || needed) break;
        looks = act_on(job, span, scratch);
        ends = !looks && is_last(job);  // then another thread may free the job
    }
    Py_END_ALLOW_THREADS
    release_columns(&columns);
    if (looks || ends) return Py_BuildValue("KL", number, (long long)(looks ? span : ENDED));
    return Py_BuildValue("Kn", 0ULL, needed ? (Py_ssize_t)needed : -1);
}

// -- copies and digests

static bool copy_span(const Job *job, Py_ssize_t span, Scratch *scratch) {
    (void)scratch;
    for (i64 i = job->firsts[span]; i < job->firsts[span + 1]; i++) {
        const Span chunk = job->chunks.spans[i];
        if (job->copy.digests) xxh3_digest(chunk.data, chunk.bytes, job->copy.seed, job->copy.digests + 16 * i);
        if (!job->copies.count || !job->copies.spans[i].data) continue;
        const Span copy = job->copies.spans[i];
        if (job->copy.digests) {  // the next base, which nobody reads before the next save
            copy_past_cache(copy.data, chunk.data, chunk.bytes);
        } else if (chunk.bytes) {
            memcpy(copy.data, chunk.data, chunk.bytes);
        }
        if (copy.bytes > chunk.bytes) memset(copy.data + chunk.bytes, 0, copy.bytes - chunk.bytes);
    }
    return false;
}

PyObject *py_copy_job(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *chunks, *copies, *out, *firsts, *gate;
    unsigned long long seed;
    Job *job = new_job();
    if (!job) return NULL;
    if (!PyArg_ParseTuple(args, "OOKOOO", &chunks, &copies, &seed, &out, &firsts, &gate) ||
        !take_spans(&job->chunks, chunks, -1, false) || !take_rows(job, firsts, gate))
        return finish(job, false);
    const Py_ssize_t n = job->chunks.count;
    job->act = copy_span, job->copy.seed = seed;
    if (copies != Py_None && !take_spans(&job->copies, copies, n, true)) return finish(job, false);
    for (Py_ssize_t i = 0; i < job->copies.count; i++)
        if (job->copies.spans[i].data && job->copies.spans[i].bytes < job->chunks.spans[i].bytes)
            return finish(job, refuse("too little memory for a copy"));
    if (out != Py_None && !(job->copy.digests = take_column(&job->columns, out, 16 * n, true)))
        return finish(job, false);
    return finish(job, true);
}

// -- encode

// Encode one chunk as it was chosen; return the length of its blob, or 0 if it is declined.
static size_t encode_chunk(const EncodeColumns *e, i64 i, Span chunk, const u8 *base, u8 *out, size_t room,
                           Scratch *scratch) {
    const int size = e->sizes[i];
    if (e->limits[i] < 0) base = NULL;
    const Elements elements = {size, e->layouts[i], e->mode};
    const Choice choice = choose(chunk.data, base, elements, chunk.bytes / (size_t)size, e->limits[i], e->terms);
    u8 *entry = e->entries + ENTRY_BYTES * i;
    EncodeRow row = {
        .source = chunk.data,
        .base = base,
        .bytes = chunk.bytes,
        .element_size = size,
        .layout = e->layouts[i],
        .mode = e->mode,
        .kinds = choice.kinds,
        .digest = e->digests + 16 * i,
        .base_digest = e->base_digests + 16 * i,
    };
    size_t length = SIZE_MAX;
    if (choice.is_declined) return 0;
    if (choice.is_sparse) length = encode_sparse_blob(&row, (size_t)choice.most, out, room, entry, scratch);
    if (length == SIZE_MAX) {
        if (!choice.is_delta) row.base = NULL, row.mode = NONE;
        length = encode_blob(&row, out, room, entry, scratch);
    }
    if (row.base && (i64)length > e->limits[i]) length = 0;  // it was underestimated
    if (!length) memset(entry, 0, ENTRY_BYTES);
    return length;
}

// Hash a chunk and its base. Return the bytes that were hashed: the chunk, or a private copy of it if its memory may
// change; data NULL: it equals its base.
static Span examine(const Job *job, i64 i, Span chunk, const u8 *base, Scratch *scratch) {
    const EncodeColumns *e = &job->encode;
    u8 *digest = e->digests + 16 * i, *base_digest = e->base_digests + 16 * i;
    if (job->copies.count && job->copies.spans[i].data) {
        u8 *copy = scratch->planes + e->planes_bytes;
        memcpy(copy, chunk.data, chunk.bytes);
        chunk.data = copy;
    }
    xxh3_digest(chunk.data, chunk.bytes, e->seed, digest);
    if (base) xxh3_digest(base, chunk.bytes, e->seed, base_digest);
    if (base && !memcmp(digest, base_digest, 16)) chunk.data = NULL;
    return chunk;
}

static bool encode_span(const Job *job, Py_ssize_t span, Scratch *scratch) {
    const EncodeColumns *e = &job->encode;
    bool is_declined = false;
    i64 at = e->places[span];
    for (i64 i = job->firsts[span]; i < job->firsts[span + 1]; i++) {
        const u8 *base = job->bases.spans[i].data;
        const Span given = job->chunks.spans[i];
        Span chunk = given;
        if (e->copied) {
            e->copied[i] = 0;
            chunk = examine(job, i, given, base, scratch);
            if (!chunk.data) {
                if (e->wanted) e->wanted[i] = 0;
                continue;
            }
        }
        if (!e->wanted || e->wanted[i]) {
            const i64 room = e->places[span + 1] - at;
            const size_t length = encode_chunk(e, i, chunk, base, e->out + at, (size_t)room, scratch);
            if (length) {
                e->starts[i] = at;
                for (at += (i64)length; at % 8; at++) e->out[at] = 0;  // as in a pack; every blob leaves room for it
                continue;
            }
            is_declined = true;
        }
        if (chunk.data != given.data) {
            memcpy(job->copies.spans[i].data, chunk.data, chunk.bytes);
            e->copied[i] = 1;
        }
    }
    return is_declined && !e->copied;
}

// Return whether chunks have whole elements and known layouts.
static bool are_elements(const Spans *chunks, const u8 *sizes, const u8 *layouts) {
    for (Py_ssize_t i = 0; i < chunks->count; i++) {
        if (!is_size(sizes[i]) || layouts[i] > LAYOUT_ROTATED || chunks->spans[i].bytes % sizes[i])
            return false;
    }
    return true;
}

static bool take_encode_columns(Job *job, PyObject *const given[11], PyObject *terms) {
    EncodeColumns *e = &job->encode;
    Columns *columns = &job->columns;
    const Py_ssize_t n = job->chunks.count;
    if (!(e->sizes = take_column(columns, given[0], n, false))) return false;
    if (!(e->layouts = take_column(columns, given[1], n, false))) return false;
    if (!(e->limits = take_column(columns, given[2], 8 * n, false))) return false;
    if (!(e->digests = take_column(columns, given[3], 16 * n, given[5] != Py_None))) return false;
    if (!(e->base_digests = take_column(columns, given[4], 16 * n, given[5] != Py_None))) return false;
    if (given[5] != Py_None && !(e->copied = take_column(columns, given[5], n, true))) return false;
    if (given[6] != Py_None && !(e->wanted = take_column(columns, given[6], n, true))) return false;
    if (!(e->entries = take_column(columns, given[7], ENTRY_BYTES * n, true))) return false;
    if (!(e->starts = take_column(columns, given[8], 8 * n, true))) return false;
    if (!(e->places = take_column(columns, given[9], 8 * (job->spans + 1), false))) return false;
    if (!(e->out = take_column(columns, given[10], -1, true))) return false;
    bool inside = e->places[0] >= 0 && e->places[job->spans] <= (i64)last_bytes(columns);
    for (Py_ssize_t i = 0; i < job->spans && inside; i++)
        inside = e->places[i] <= e->places[i + 1] && e->places[i] % 8 == 0;
    if (!inside) return refuse("spans of blobs that are not in their memory, in order");
    if (!(e->terms = take_column(columns, terms, 8 * MOST_SAMPLED, false))) return false;
    if (e->mode != DIFFERENCE && e->mode != XOR) return refuse("wrong mode");
    return are_elements(&job->chunks, e->sizes, e->layouts) || refuse("wrong element sizes or layouts");
}

PyObject *py_encode_job(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *chunks, *bases, *copies, *given[11], *terms, *firsts, *gate;
    unsigned long long seed;
    Job *job = new_job();
    if (!job) return NULL;
    job->act = encode_span;
    EncodeColumns *e = &job->encode;
    if (!PyArg_ParseTuple(args, "OOOOOiOOOOOOOOOOKOO", &chunks, &bases, &copies, &given[0], &given[1], &e->mode,
                          &terms, &given[2], &given[3], &given[4], &given[5], &given[6], &given[7], &given[8],
                          &given[9], &given[10], &seed, &firsts, &gate) ||
        !take_spans(&job->chunks, chunks, -1, false) ||
        !take_spans(&job->bases, bases, job->chunks.count, false) ||
        (copies != Py_None && !take_spans(&job->copies, copies, job->chunks.count, true)) ||
        !take_rows(job, firsts, gate) || !take_encode_columns(job, given, terms))
        return finish(job, false);
    e->seed = seed;
    if (!are_as_long(&job->chunks, &job->bases) || !are_as_long(&job->chunks, &job->copies))
        return finish(job, refuse("lengths differ"));
    if (job->copies.count && !e->copied) return finish(job, refuse("copies of chunks that are not examined"));
    const size_t most = largest(&job->chunks);
    size_t per_byte = SCRATCH_PER_BYTE;
    for (Py_ssize_t i = 0; i < job->bases.count; i++)
        if (job->bases.spans[i].data && e->mode == DIFFERENCE && SPARSE_SCRATCH_PER_BYTE(e->sizes[i]) > per_byte)
            per_byte = SPARSE_SCRATCH_PER_BYTE(e->sizes[i]);
    e->planes_bytes = per_byte * most + FRAME_SLACK;
    e->planes_bytes += (COPY_ALIGNMENT - e->planes_bytes % COPY_ALIGNMENT) % COPY_ALIGNMENT;
    job->scratch_bytes = sizeof(Scratch) + e->planes_bytes + (job->copies.count ? most : 0);
    return finish(job, true);
}

// -- decode

static bool decode_span(const Job *job, Py_ssize_t span, Scratch *scratch) {
    const DecodeColumns *d = &job->decode;
    const Stored *blobs = d->blobs + d->firsts[span];
    const u8 *each = d->each ? d->each + 16 * d->firsts[span] : NULL;
    bool is_declined = false;
    for (i64 i = job->firsts[span]; i < job->firsts[span + 1]; i++) {
        const Span out = job->chunks.spans[i];
        const size_t count = (size_t)d->counts[i];
        const u8 *base = job->bases.spans[i].data;
        // a chunk in the place of its base is left to the reference: it would find the base overwritten
        const bool apart = !base || base + out.bytes <= out.data || out.data + out.bytes <= base;
        d->done[i] = out.data && apart &&
                     decode_chain(blobs, count, base, d->digests + 16 * i, each, d->seed, out.data, out.bytes, scratch);
        is_declined = is_declined || !d->done[i];
        blobs += count;
        if (each) each += 16 * count;
    }
    return is_declined || d->reports_all;
}

// Take the blobs in `stored`, and their numbers. Return false with an exception if one lies outside, or their
// number is wrong.
static bool take_blobs(Job *job, PyObject *const given[4]) {
    DecodeColumns *d = &job->decode;
    const u8 *stored = take_column(&job->columns, given[0], -1, false);
    if (!stored) return false;
    const i64 size = (i64)last_bytes(&job->columns);
    const i64 *offsets = take_column(&job->columns, given[1], -1, false);
    if (!offsets) return false;
    const i64 m = (i64)last_bytes(&job->columns) / 8;
    const i64 *lengths = take_column(&job->columns, given[2], 8 * m, false);
    if (!lengths || !(d->counts = take_column(&job->columns, given[3], 8 * job->chunks.count, false))) return false;
    d->blobs = PyMem_Calloc((size_t)m + 1, sizeof(Stored));
    d->firsts = PyMem_Calloc((size_t)job->spans + 1, sizeof(i64));
    if (!d->blobs || !d->firsts) {
        PyErr_NoMemory();
        return false;
    }
    i64 at = 0;
    for (Py_ssize_t span = 0; span < job->spans; span++) {
        d->firsts[span] = at;
        for (i64 i = job->firsts[span]; i < job->firsts[span + 1]; i++) {
            if (d->counts[i] < 0 || d->counts[i] > m - at) return refuse("wrong numbers of blobs");
            at += d->counts[i];
        }
    }
    if (at != m) return refuse("wrong numbers of blobs");
    for (i64 i = 0; i < m; i++) {
        if (offsets[i] < 0 || lengths[i] < 0 || offsets[i] > size || lengths[i] > size - offsets[i])
            return refuse("a blob outside of the stored bytes");
        d->blobs[i] = (Stored){stored + offsets[i], (size_t)lengths[i]};
    }
    return true;
}

PyObject *py_decode_job(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *given[4], *digests, *each, *outs, *bases, *done, *firsts, *gate;
    unsigned long long seed;
    int reports_all;
    Job *job = new_job();
    if (!job) return NULL;
    job->act = decode_span;
    DecodeColumns *d = &job->decode;
    if (!PyArg_ParseTuple(args, "OOOOOOOOKOpOO", &given[0], &given[1], &given[2], &given[3], &digests, &each, &outs,
                          &bases, &seed, &done, &reports_all, &firsts, &gate) ||
        !take_spans(&job->chunks, outs, -1, true) || !take_spans(&job->bases, bases, job->chunks.count, false) ||
        !take_rows(job, firsts, gate) || !take_blobs(job, given))
        return finish(job, false);
    const Py_ssize_t n = job->chunks.count;
    d->seed = seed, d->reports_all = reports_all;
    if (!(d->digests = take_column(&job->columns, digests, 16 * n, false)) ||
        !(d->done = take_column(&job->columns, done, n, true)))
        return finish(job, false);
    if (each != Py_None) {
        const Py_ssize_t m = PyObject_Size(given[1]);
        if (m < 0 || !(d->each = take_column(&job->columns, each, 16 * m, false))) return finish(job, false);
    }
    if (!are_as_long(&job->chunks, &job->bases)) return finish(job, refuse("lengths differ"));
    job->scratch_bytes = sizeof(Scratch) + SCRATCH_PER_BYTE * largest(&job->chunks);
    return finish(job, true);
}
