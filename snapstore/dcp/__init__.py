"""Save and load through torch.distributed.checkpoint (DCP).

    writer = SnapstoreWriter("/data/snaps", run="exp1")           # one for the whole job, on every rank
    dcp.save(state, storage_writer=writer, checkpoint_id=step)    # dcp: torch.distributed.checkpoint
    dcp.async_save(state, storage_writer=writer, checkpoint_id=step, process_group=gloo_group)
    dcp.load(state, storage_reader=SnapstoreReader("/data/snaps", run="exp1"), checkpoint_id=step, no_dist=True)

`save`, `async_save` and `load` of this package call DCP's with the right arguments. A snapshot is the same whether it
was saved here or by a SnapshotManager, and each loads the other's. Read `writer.py` first: it says what DCP calls, in
which order, and what each call does here. Importing this package imports torch.distributed.
"""

from .functions import async_save, load, save
from .planner import SnapstorePlanner
from .reader import SnapstoreReader
from .writer import SnapstoreWriter

__all__ = ["SnapstorePlanner", "SnapstoreReader", "SnapstoreWriter", "async_save", "load", "save"]
