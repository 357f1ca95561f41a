"""Copy snapshots from one repository into another, and keep a second repository as the mirror of a run.

A copy writes stored blobs unchanged into new packs of the destination, under a session there, as a save does. Before a
chunk is sent, it is rebuilt and compared with its digest. Read copy.py first.

copy.py              put snapshots into another repository, each under a session there
moving.py            write one snapshot into packs and manifests of the destination, blob by blob
mirror.py            copy each save of a run in the background, and bring back what only the mirror has
bring_back.py        copy back from the mirror what is damaged in the first store, for a restore with fallback
mirror_order.py      which snapshots a mirror gets, in which order, and when a failed copy is tried again
mirror_retention.py  delete in a mirror what its policies do not keep
"""
