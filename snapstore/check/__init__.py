"""Check a repository: find every problem, name the snapshots that it damages, and the command that fixes it.

Read check.py first: the levels, and the order of the work. scan_records.py reads records and small objects, and
scan_objects.py reads manifests and packs; repair/ starts from the same two scans.
"""
