"""State: nested containers, tensors and objects on one side; trees, specs and bytes on the other.

Read walk/flatten.py first (a state becomes parts), then fill/plan.py (parts become a state again, new or in place). The
rooms import downwards only: fill, walk, tree, values. No module imports torch before a state needs it.

values/    what a leaf is: containers, tensors, arrays, values of classes
tree/      the stored tree: its form, encoded and decoded
walk/      a state to parts, fast for a state that is known
fill/      parts to a state
folder.py  any folder of files as a state of bytes, and back
"""
