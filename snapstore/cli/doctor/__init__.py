"""Test whether snapstore works on this machine and in a place, for `snapstore doctor`.

Read doctor.py first: it looks at the machine and the place, and collects the findings. probes.py tests every promise
of a store that the protocol needs, in a hidden store that is removed at the end.
"""
