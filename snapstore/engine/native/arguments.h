// What Python passes: columns, one row per chunk, and chunks as positions in memories (engine/batches.py).
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "native.h"

#define MOST_COLUMNS 16

// The columns of a call; their memory stays where it is until `release_columns`.
typedef struct {
    Py_buffer views[MOST_COLUMNS];
    int count;
} Columns;

typedef struct {
    u8 *data;  // NULL: no chunk
    size_t bytes;
} Span;

// Chunks of a call, as the tuple (memories, which, starts, lengths); see batches.Chunks.
typedef struct {
    Span *spans;
    Py_ssize_t count;
    Py_buffer *views;
    Py_ssize_t held;
} Spans;

// Return the memory of a column; NULL with an exception if it has not `bytes` bytes. `bytes` -1: any number.
void *take_column(Columns *columns, PyObject *column, Py_ssize_t bytes, bool writable);
// Return the bytes of the column that was taken last.
size_t last_bytes(const Columns *columns);
void release_columns(Columns *columns);

// Take chunks, `count` of them; -1: any number. Return false with an exception if one lies outside of its
// memory.
bool take_spans(Spans *spans, PyObject *chunks, Py_ssize_t count, bool writable);
void release_spans(Spans *spans);
