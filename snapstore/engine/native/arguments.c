// Every offset and every length is checked here against the memory that Python passes, before anything reads
// or writes.
#include "arguments.h"

void *take_column(Columns *columns, PyObject *column, Py_ssize_t bytes, bool writable) {
    if (columns->count == MOST_COLUMNS) {
        PyErr_SetString(PyExc_SystemError, "too many columns");
        return NULL;
    }
    Py_buffer *view = &columns->views[columns->count];
    if (PyObject_GetBuffer(column, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) return NULL;
    columns->count++;
    if (bytes >= 0 && view->len != bytes) {
        PyErr_Format(PyExc_ValueError, "a column of %zd bytes, expected %zd", view->len, bytes);
        return NULL;
    }
    return view->buf ? view->buf : view;  // an empty column may have no memory; nothing reads it
}

size_t last_bytes(const Columns *columns) { return (size_t)columns->views[columns->count - 1].len; }

void release_columns(Columns *columns) {
    while (columns->count) PyBuffer_Release(&columns->views[--columns->count]);
}

// Take the memory of a row, unless it is the one of the row before. Return NULL with an exception if there is
// none.
static Py_buffer *view_of(Spans *spans, PyObject *memories, i64 which, i64 before, bool writable) {
    if (spans->held && which == before) return &spans->views[spans->held - 1];
    PyObject *memory = PySequence_GetItem(memories, (Py_ssize_t)which);
    if (!memory) return NULL;
    Py_buffer *view = &spans->views[spans->held];
    const int failed = PyObject_GetBuffer(memory, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    Py_DecRef(memory);
    if (failed < 0) return NULL;
    spans->held++;
    return view;
}

static bool fill_spans(Spans *spans, PyObject *memories, const i64 *const columns[3], bool writable) {
    i64 before = -1;
    for (Py_ssize_t i = 0; i < spans->count; i++) {
        const i64 which = columns[0][i], start = columns[1][i], bytes = columns[2][i];
        if (which < 0) continue;
        const Py_buffer *view = view_of(spans, memories, which, before, writable);
        if (!view) return false;
        before = which;
        if (start < 0 || bytes < 0 || start > view->len || bytes > view->len - start) {
            PyErr_Format(PyExc_ValueError, "chunk %zd: bytes %lld to %lld of a memory of %zd bytes", i,
                         (long long)start, (long long)start + (long long)bytes, view->len);
            return false;
        }
        spans->spans[i] = (Span){bytes ? (u8 *)view->buf + start : (u8 *)spans, (size_t)bytes};
    }
    return true;
}

bool take_spans(Spans *spans, PyObject *chunks, Py_ssize_t count, bool writable) {
    PyObject *memories, *which, *starts, *lengths;
    Columns columns = {.count = 0};
    const i64 *taken[3];
    bool done = false;
    memset(spans, 0, sizeof *spans);
    if (!PyArg_ParseTuple(chunks, "OOOO", &memories, &which, &starts, &lengths)) return false;
    taken[0] = take_column(&columns, which, count < 0 ? -1 : 8 * count, false);
    if (taken[0]) {
        spans->count = (Py_ssize_t)last_bytes(&columns) / 8;
        taken[1] = take_column(&columns, starts, 8 * spans->count, false);
        taken[2] = taken[1] ? take_column(&columns, lengths, 8 * spans->count, false) : NULL;
        spans->spans = PyMem_Calloc((size_t)spans->count + 1, sizeof(Span));
        spans->views = PyMem_Calloc((size_t)spans->count + 1, sizeof(Py_buffer));
        if (!spans->spans || !spans->views)
            PyErr_NoMemory();
        else
            done = taken[2] && fill_spans(spans, memories, taken, writable);
    }
    release_columns(&columns);
    if (!done) release_spans(spans);
    return done;
}

void release_spans(Spans *spans) {
    while (spans->held) PyBuffer_Release(&spans->views[--spans->held]);
    PyMem_Free(spans->spans);
    PyMem_Free(spans->views);
    memset(spans, 0, sizeof *spans);
}
