"""Catalog: read what a repository holds: its config, its records and manifest headers, its policies.

The objects in the store are the truth; the index caches them in LMDB in the user's own cache folder, and `refresh`
returns a View of one listing. Read index.py first, then history.py.

config.py           read and check the config of a repository, or reconstruct it from its manifests
record_listing.py   list the records of a store, and find the ruling one of each snapshot
read_twice.py       distinguish a bad sector from an outage by a second read
index.py            cache records and manifest headers; `refresh` lists the store and returns a View
index_folder.py     where the index of a repository lies
lmdb_file.py        the one LMDB environment of a folder in this process, and the seal on its file
known_records.py    the records that an index knows, by key and by run
history.py          View: answers every question about snapshots from one listing
needed_keys.py      the manifests of a snapshot, and the packs and manifests that snapshots need
repeated_ids.py     the records of a second snapshot under the id of another one
policy_store.py     the retention policies of a run, as objects of the repository
"""
