"""Convert between snapshots and the checkpoints of other programs: import into a repository, export out of it.

A checkpoint from elsewhere is not trusted: its code does not run, and no file outside it is read. Both directions work
tensor by tensor, so states may be larger than memory. Read importing.py and exporting.py first; a module for each
format opens or writes it, and lazy_state.py hands a state over to the save.
"""

from .exporting import ExportOptions, export_snapshot
from .files import Exported
from .importing import Imported, import_checkpoints

__all__ = ["ExportOptions", "Exported", "Imported", "export_snapshot", "import_checkpoints"]
