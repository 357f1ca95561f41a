"""One save by all ranks of a job: each writes its share, and rank 0 commits.

Read together.py first: it has the order of the messages; no call is a collective. docs/design/ranks.md says why a crash
of any rank at any step harms nothing.

job.py           the part of one rank's SnapshotManager in the saves of all ranks
holders.py       which ranks hold the plain tensors that not all ranks hold
together.py      one save: rank 0 leads and commits, the others follow
attempts.py      the messages of further attempts, and of the end of a save
writer.py        the bytes of one rank's save
merged_trees.py  what rank 0 compares between ranks, and the trees of all ranks as one
agreement.py     compare the values that must be equal on all ranks
roots.py         the root manifests of a snapshot of several ranks
outcomes.py      how a rank learns whether a save was committed if rank 0 does not say it
"""
