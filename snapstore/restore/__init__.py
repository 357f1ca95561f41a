"""The read path: a snapshot's record and manifests to a state, bit for bit.

Read pipeline.py first. A restore needs only the record, no index. chunks/ rebuilds the chunks, and state/ puts the
tensors together.

pipeline.py   record -> manifests -> wanted chunks -> state
manifests.py  read and check the manifests of a record and their trees
sources.py    the manifests that one process or several ranks saved, and the tensors in each
overlaps.py   the chunks of a stored box that a wanted box needs, and where their bytes go
streaming.py  the tensors of a snapshot one by one, for a state larger than memory
"""
