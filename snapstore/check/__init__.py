"""Check a repository: find every problem, name the snapshots that it damages, and the command that fixes it.

Read check.py first: it has the levels and the order of the work. repair/ starts from the same two scans.

check.py          the levels of a check, from the records down to the last bit
scan_records.py   records and small objects: the first half of a check and of a repair
scan_pages.py     pages of records, and their copies in volumes
scan_objects.py   manifests and packs: the second half
verify_chunks.py  rebuild every chunk: level "restore"
damaged_packs.py  the blobs of damaged packs that are intact, and the chunks that are lost
recoverable.py    recover the content of a damaged record
report.py         the result: problems, damaged snapshots, commands
verify_wanted.py  rebuild the chunks that a restore is about to read
fallback.py       restore the newest snapshot that every rank can read whole
mark_damage.py    tell later choices, saves and gcs of the damage that a restore has found
newest_whole.py   the snapshot to resume from if the newest one cannot be restored
"""
