"""Convert between snapshots and the checkpoints of other programs: import into a repository, export out of it.

A checkpoint from elsewhere is not trusted: its code does not run, and no file outside it is read. Both directions work
tensor by tensor, so states may be larger than memory. Read importing.py and exporting.py first.

importing.py         import checkpoints: a series becomes a run with steps
sources.py           the checkpoints that paths are or hold, their formats and steps
logged_metrics.py    the metrics that checkpoints and their names state
checkpoint.py        a checkpoint that was opened, and the rule for names of files in its folder
verifying.py         compare snapshots with the checkpoints that they were imported from
watching.py          import the checkpoints of a trainer while it writes them
torch_checks.py      checks of a file of torch before torch reads it
pickled_values.py    plain values in place of objects that files of torch often hold
files.py             states in `.pt` and `.safetensors` files
safetensors_file.py  `.safetensors` files tensor by tensor
hf_folder.py         a folder of Hugging Face: a model, or a checkpoint of the Trainer
dcp_folder.py        a folder of torch.distributed.checkpoint (DCP), without running its code
orbax_folder.py      a folder of Orbax (JAX)
lazy_state.py        a state whose tensors lie in files, as the input of a save
exporting.py         export a snapshot in one of the formats
hf_export.py         write a folder that `from_pretrained` loads
hf_adapter.py        find the adapter of PEFT in a state
dcp_export.py        write a folder that DCP loads
"""

from .exporting import ExportOptions, export_snapshot
from .files import Exported
from .importing import Imported, import_checkpoints

__all__ = ["ExportOptions", "Exported", "Imported", "export_snapshot", "import_checkpoints"]
