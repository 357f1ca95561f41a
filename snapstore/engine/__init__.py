"""Engines: hash, encode and decode chunks in batches, on the CPU or on a CUDA device.

Read base.py first: the calls that every engine answers; batches.py has their arguments, as columns. registry.py chooses
the engine by the memory that holds the bytes. cpu.py works on threads, cuda/ on one device. rates.py measures a store
and the CPU engine.
"""
