"""Engines: hash, encode and decode chunks in batches, on the CPU or on a CUDA device.

Read base.py first: the calls that every engine answers. registry.py chooses the engine by the memory that holds the
bytes.

base.py       Engine: the protocol that all engines answer
batches.py    their arguments, as columns with one row per chunk
registry.py   the engines of one repository, each found by the memory that it works in
cpu.py        CpuEngine: threads over all cores
spans.py      jobs of the extension in C for many chunks; its sources are in native/ (native.h is their map)
reference.py  the same work for one chunk after the other, in NumPy
cuda/         CudaEngine: one CUDA device
rates.py      measure a store and the CPU engine, and choose a codec by the rates
"""
