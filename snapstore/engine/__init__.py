"""Engines: hash, encode and decode chunks in batches, on the CPU or on a CUDA device.

Read base.py first: the calls that every engine answers; batches.py has the columns that go in. registry.py chooses the
engine by where the bytes lie; cpu.py works on threads, cuda/ on one device.
"""
