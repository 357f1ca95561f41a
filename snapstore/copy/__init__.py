"""Copy snapshots from one repository into another, and keep a second repository as the mirror of a run.

A copy moves stored blobs as they are into new packs of the destination, under a session there, as a save does; nothing
is decoded. Read copy.py first: it orders the work and commits; moving.py moves the blobs of one snapshot.
"""
