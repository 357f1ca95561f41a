// The extension `snapstore.engine._native`: jobs (jobs.c), and parts of them alone. _native.pyi has the arguments.
#include "jobs.h"

bool use_avx2 = false;

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

bool is_size(int size) { return size == 1 || size == 2 || size == 4 || size == 8; }

// -- the parts of jobs alone, for tests

// Return how a chunk is stored: (sparse, delta, declined, the most bytes of a sparse delta, kinds of 8 planes).
static PyObject *py_choose(PyObject *self, PyObject *args) {
    (void)self;
    Call call = {0};
    PyObject *chunk, *base, *terms;
    Elements e;
    long long limit;
    if (!PyArg_ParseTuple(args, "OOiiiLO", &chunk, &base, &e.size, &e.layout, &e.mode, &limit, &terms)) return NULL;
    const u8 *bytes = take_column(&call.columns, chunk, -1, false), *before = NULL;
    if (!bytes) return end_call(&call, NULL);
    const size_t length = last_bytes(&call.columns);
    if (base != Py_None && !(before = take_column(&call.columns, base, (Py_ssize_t)length, false)))
        return end_call(&call, NULL);
    const i64 *table = take_column(&call.columns, terms, 8 * MOST_SAMPLED, false);
    if (!table) return end_call(&call, NULL);
    if (!is_size(e.size) || length % (size_t)e.size) return refuse(&call, "wrong element size");
    const Choice choice = choose(bytes, before, e, length / (size_t)e.size, limit, table);
    return end_call(&call, Py_BuildValue("iiiLy#", choice.is_sparse, choice.is_delta, choice.is_declined,
                                         (long long)choice.most, (const char *)choice.kinds,
                                         (Py_ssize_t)sizeof choice.kinds));
}

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
    {"copy_job", py_copy_job, METH_VARARGS, NULL},
    {"encode_job", py_encode_job, METH_VARARGS, NULL},
    {"decode_job", py_decode_job, METH_VARARGS, NULL},
    {"run", py_run, METH_VARARGS, NULL},
    {"done", py_done, METH_O, NULL},
    {"spans_left", py_spans_left, METH_O, NULL},
    {"spans_undone", py_spans_undone, METH_O, NULL},
    {"queue", py_queue, METH_NOARGS, NULL},
    {"push", py_push, METH_VARARGS, NULL},
    {"withdraw", py_withdraw, METH_O, NULL},
    {"queued", py_queued, METH_O, NULL},
    {"serve", py_serve, METH_VARARGS, NULL},
    {"choose", py_choose, METH_VARARGS, NULL},
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
    if (PyModule_AddIntConstant(module, "FRAME_SLACK", FRAME_SLACK) < 0 ||
        PyModule_AddIntConstant(module, "ENDED", ENDED) < 0) {
        Py_DecRef(module);
        return NULL;
    }
    return module;
}
