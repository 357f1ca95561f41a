"""The leaves of a state: the container and path of each, its form, its bytes, and its plain form if it has a class.

Read tensors.py first: it describes a stored array. Then arrays.py: its bytes. Nothing here walks over a state.

containers.py     nested containers and the paths in them
tensors.py        descriptions of stored arrays: kind, dtype, shape, dimension order, ties
arrays.py         the form of one array, the place of its memory, copies into it and out of it
held_array.py     an array while a save reads it, and the check that nothing changed it
sharded.py        which boxes of a whole tensor this rank holds
wrapped.py        parameters that FSDP2 gathers in another form
composite.py      tensors whose values lie in other tensors
torch_layouts.py  sparse, jagged and quantized tensors of torch
classes.py        values of common classes: paths, times, enums, dataclasses, named tuples
configs.py        configs of OmegaConf
objects.py        objects that are stored by their attributes: an allow-list
metrics.py        the numbers of metrics, read at once or copied from a GPU
"""
