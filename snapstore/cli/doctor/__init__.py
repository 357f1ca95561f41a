"""Test whether snapstore works on this machine and in a place, for `snapstore doctor`.

Read doctor.py first. The probes run in a hidden store that is removed at the end.

doctor.py  look at the machine and the place, and collect the findings
probes.py  test each promise of a store that the protocol needs
"""
