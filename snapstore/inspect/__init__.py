"""Inspect a repository: what it holds, how two snapshots differ, slices of tensors, the cost of a run.

None of them writes. Read stats.py first: it shows how a manifest leads to blobs and codecs.

stats.py             count snapshots, bytes by group and codec, chunks and chains
usage.py             what each run, snapshot, part or tensor needs, and what would be freed without it
plain_values.py      the leaves of a snapshot that are no tensors
stored_tensors.py    where the bytes of each tensor lie, and its bytes piece by piece
changed_elements.py  the share of each layer that a save changed, from its stored deltas
diff.py              compare two snapshots, tensor by tensor and value by value
divergence.py        the first step, tensor and element at which two runs differ
layer_values.py      how far each layer moved between two snapshots
tensor_history.py    the tensors of a run: which of their pieces changed when, and their values
frozen.py            frozen tensors that changed, and tensors that stopped changing
jumps.py             the snapshots between which a tensor changed far more than before
blame.py             the step at which a tensor of a run began to move away
lazy.py              the tensors of a snapshot by name, read in slices
tables.py            lists of snapshots and results, as data frames and as HTML
estimate.py          the cost of the snapshots of a run, before it starts
report.py            what a page about some runs shows, and how much is read for it
report_figures.py    the figures of this page
report_page.py       the page, in HTML
"""
