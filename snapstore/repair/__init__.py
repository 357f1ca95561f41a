"""repair: quarantine damaged packs, heal the snapshots that need them, and name what is lost.

repair.py decides and reports: records first, then quarantine, then each snapshot. heal.py heals one snapshot, as a
rewrite of its manifests. Read repair.py first.
"""
