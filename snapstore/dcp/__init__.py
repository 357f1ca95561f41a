"""Save and load through torch.distributed.checkpoint (DCP).

    writer = SnapstoreWriter("/data/snaps", run="exp1")           # one for the whole job, on every rank
    dcp.save(state, storage_writer=writer, checkpoint_id=step)    # dcp: torch.distributed.checkpoint
    dcp.async_save(state, storage_writer=writer, checkpoint_id=step, process_group=gloo_group)
    dcp.load(state, storage_reader=SnapstoreReader("/data/snaps", run="exp1"), checkpoint_id=step, no_dist=True)

`save`, `async_save` and `load` of this package call DCP's functions with the right arguments. DCP and SnapshotManager
save the same snapshots, and each restores those of the other. Read `writer.py` first: it lists DCP's calls in their
order, and the effect of each. Importing this package imports torch.distributed.
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
