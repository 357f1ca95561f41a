"""State: nested containers, tensors and objects on one side; trees, specs and bytes on the other.

Read flatten.py first (a state becomes parts), then restore_plan.py (parts become a state again, new or in place).
tree.py describes the stored form of a tree, tree_encode.py and tree_decode.py convert it, tensors.py describes a stored
array, arrays.py and held_array.py read and write its bytes, and no module imports torch before it meets a tensor.
weights_only.py turns a restored state into types that `torch.load(weights_only=True)` reads.
"""
