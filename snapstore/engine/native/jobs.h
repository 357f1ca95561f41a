// Jobs: spans of chunks that the threads of the engine take one after the other, without Python's lock.
#pragma once

#include "arguments.h"

// Return what Python calls a job: (the job, the bytes of scratch memory that `run` needs). _native.pyi has the
// arguments.
PyObject *py_copy_job(PyObject *self, PyObject *args);
PyObject *py_encode_job(PyObject *self, PyObject *args);
PyObject *py_decode_job(PyObject *self, PyObject *args);
// Take spans until none is left; return early with the number of a span that Python must look at, else -1.
PyObject *py_run(PyObject *self, PyObject *args);
PyObject *py_spans_left(PyObject *self, PyObject *job);

bool is_size(int size);
