"""Save and load through torch.distributed.checkpoint (DCP).

    writer = SnapstoreWriter("/data/snaps", run="exp1")           # one for the whole job, on every rank
    dcp.save(state, storage_writer=writer, checkpoint_id=step)    # dcp: torch.distributed.checkpoint
    dcp.async_save(state, storage_writer=writer, checkpoint_id=step, process_group=gloo_group)
    dcp.load(state, storage_reader=SnapstoreReader("/data/snaps", run="exp1"), checkpoint_id=step, no_dist=True)

`save`, `async_save` and `load` of this package call DCP's functions with the right arguments. DCP and SnapshotManager
save the same snapshots, and each restores those of the other. Read writer.py first: it lists DCP's calls in their
order, and the effect of each. Importing this package imports torch.distributed.

functions.py  save, async_save and load
target.py     the run of a repository that a writer or a reader uses
names.py      checkpoint ids and steps; flat keys of DCP and places in a stored tree
planner.py    planners that keep the state as it was given, beside DCP's flat view of it
writer.py     SnapstoreWriter: DCP's StorageWriter and AsyncStager
exchange.py   the messages in the gathers and the scatter that DCP makes anyway
saving.py     this process's share of a save, from copies to durable manifests
reader.py     SnapstoreReader: DCP's StorageReader
stored.py     a snapshot as DCP loads it: leaves by key, and boxes of tensors
"""

from .functions import async_save, load, save
from .planner import SnapstoreLoadPlanner, SnapstorePlanner
from .reader import SnapstoreReader
from .writer import SnapstoreWriter

__all__ = [
    "SnapstoreLoadPlanner",
    "SnapstorePlanner",
    "SnapstoreReader",
    "SnapstoreWriter",
    "async_save",
    "load",
    "save",
]
