"""Copy snapshots from one repository into another, and keep a second repository as the mirror of a run.

A copy writes stored blobs unchanged into new packs of the destination, under a session there, as a save does; it
rebuilds chunks only to compare their digests. Read copy.py first: it orders the work and commits. moving.py copies and
verifies the blobs of one snapshot. mirror.py copies each save of a run in the background, mirror_order.py compares what
the two stores have, mirror_failures.py says when a failed copy is tried again, and mirror_retention.py deletes in the
mirror.
"""
