"""Catalog: read what a repository holds: its config, its records and manifest headers, its policies.

The objects in the store are the truth; the index caches them in LMDB in the user's own cache folder, and `refresh`
returns a View of one listing. Read index.py first, then history.py.

config.py           read and check the config of a repository, or reconstruct it from its manifests
record_listing.py   list records: what an index knows of each, the ruling ones, and those under the id of another
read_twice.py       distinguish a bad sector from an outage by a second read
index.py            cache records and manifest headers; `refresh` lists the store and returns a View
gathering.py        gather what a verb caches, for one write
joined.py           what the pages of a run say about its snapshots, as rows of numbers
page_cache.py       keep pages as files beside the index
pages.py            read pages and volumes
damage_marks.py     which snapshots are known to be damaged
lmdb_file.py        where an index lies, its one LMDB environment in this process, and the seal on its file
history.py          View: answers every question about snapshots from one listing
needed_keys.py      the manifests of a snapshot, and the packs and manifests that snapshots need
policy_store.py     the retention policies of a run, as objects of the repository
"""
