// Jobs: spans of chunks that the threads of the engine take one after the other, without Python's lock.
#pragma once

#include "arguments.h"

// What `serve` returns in place of a span that Python must look at: the job has ended.
#define ENDED (-2)

// Return what Python calls a job: (the job, the bytes of scratch memory that it needs, its number). _native.pyi has
// the arguments.
PyObject *py_copy_job(PyObject *self, PyObject *args);
PyObject *py_encode_job(PyObject *self, PyObject *args);
PyObject *py_decode_job(PyObject *self, PyObject *args);
PyObject *py_spans_left(PyObject *self, PyObject *job);
PyObject *py_spans_undone(PyObject *self, PyObject *job);
PyObject *py_run(PyObject *self, PyObject *args);
PyObject *py_done(PyObject *self, PyObject *job);
PyObject *py_queue(PyObject *self, PyObject *nothing);
PyObject *py_push(PyObject *self, PyObject *args);
PyObject *py_withdraw(PyObject *self, PyObject *job);
PyObject *py_queued(PyObject *self, PyObject *queue);
PyObject *py_serve(PyObject *self, PyObject *args);

bool is_size(int size);
