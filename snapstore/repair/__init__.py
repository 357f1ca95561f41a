"""Repair: quarantine damaged packs, heal the snapshots that need them, and name what is lost.

Read repair.py first. It makes nothing worse: what cannot be saved stays as it was.

repair.py  records first, then quarantine, then each snapshot
heal.py    publish new manifests of a snapshot, which refer to intact blobs
report.py  the result of a repair
"""
