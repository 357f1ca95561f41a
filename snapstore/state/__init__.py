"""State: nested containers, tensors and objects on one side; trees, specs and bytes on the other.

Read flatten.py first (a state becomes parts), then plan.py (parts become a state again, new or in place).
tree.py describes the stored form of a tree; encode.py and decode.py convert it. tensors.py describes a stored
array; composite.py and torch_layouts.py take tensors apart that are made of others; classes.py, objects.py and
configs.py give values of classes a plain form; arrays.py reads and writes its bytes, and held_array.py reads them
during a save. No module imports torch before a state needs it. weights_only.py turns a restored state into types that
`torch.load(weights_only=True)` reads.
"""
