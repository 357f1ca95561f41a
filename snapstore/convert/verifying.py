"""Compare a snapshot with the checkpoint that it was imported from, to the bit: then its files may be deleted.

In: a snapshot, and a source. Out: the names of what differs. Both are read whole, tensor by tensor: the checkpoint as
an import reads it, and the snapshot from its chunks, each verified against its digest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from functools import partial

import numpy as np

from ..arrays import Bytes
from ..errors import InvalidInputError
from ..format.records import Snapshot
from ..inspect.diff import plain_changes
from ..inspect.plain_values import decode_tree
from ..inspect.stored_tensors import bytes_of_each, read_tensors
from ..repository import Repository
from ..restore.manifests import require_decoding
from ..restore.pipeline import read_as_ruled
from ..state.tree.decode import decode, unpack_nodes
from ..state.tree.encode import pack
from ..state.values.containers import Path as StatePath
from ..state.values.containers import display
from ..state.values.tensors import StoredPart, TensorSpec
from .importing import Imported
from .lazy_state import inputs_of_lazy
from .sources import NumberedSource, open_source

#: At most so many differences are returned.
MOST_DIFFERENCES = 20


def compare(repository: Repository, one: Imported) -> tuple[list[str], list[str]]:
    """Compare a snapshot with the checkpoint that it was imported from.

    A source with the step of another one, such as `last.ckpt`, is compared by its tensors only: its callbacks have its
    own name.

    Returns:
        What differs, nothing if they are equal; and names of files that an import leaves out.

    Raises:
        InvalidInputError, CapabilityError: the checkpoint cannot be read any more.
        IntegrityError, FormatError: the snapshot is damaged.
    """
    if one.origin is None:
        raise InvalidInputError(f"{one.source}: expected what import_checkpoints yields")
    return read_as_ruled(repository.context, (one.snapshot,), partial(_compare, repository, one.origin))


def _compare(repository: Repository, origin: NumberedSource, snapshot: Snapshot) -> tuple[list[str], list[str]]:
    context, path = repository.context, origin.path
    opened = open_source(path, origin.format)
    source = inputs_of_lazy(opened.state, context.engines, opened.let_go, opened.bytes_read, str(path))
    opened.state = None
    manifests, stored = read_tensors(context, snapshot)
    pieces = [piece for tensor in stored.values() for piece in tensor.pieces]
    require_decoding(context.store, pieces, f"verifying {snapshot.ref}:")
    content = bytes_of_each(context, stored.values())  # in the order of the save, which is that of the source
    found: list[str] = []
    specs: list[TensorSpec] = []
    seen: Counter[StatePath] = Counter()
    there = iter(stored)
    for tensor in source.tensors:
        spec = tensor.spec
        specs.append(spec)
        key = spec.path, seen[spec.path]
        seen[spec.path] += 1
        if next(there, None) != key:
            in_file = [spec.path, *(other.spec.path for other in source.tensors)]
            found += _unmatched(in_file, [path for path, _ in stored][len(specs) - 1 :])
            return found[:MOST_DIFFERENCES], opened.left_out
        data = tensor.data(context.engines.memory_of)
        if (form := _form(stored[key].spec)) != _form(spec):
            deque(next(content), 0)
            found.append(f"{display(spec.path)}: is {form}, in the file {_form(spec)}")
        elif not _is_equal(np.asarray(data), next(content)):
            found.append(f"{display(spec.path)}: has other values")
    found += [f"{display(path)}: is not in the file" for path, _ in there]
    if not origin.is_alias:
        tree = decode([StoredPart("", unpack_nodes(pack(source.tree)), specs)])
        changes = plain_changes(decode_tree(context, manifests, snapshot.ref), tree)
        found += [f"{name}: {was}, in the file {now}" for name, was, now in changes]
    return found[:MOST_DIFFERENCES], opened.left_out


def _unmatched(in_file: list[StatePath], stored: list[StatePath]) -> list[str]:
    """Return the differences between the names of tensors, from the first that is not the same on."""
    here, there = set(in_file), set(stored)
    found = [f"{display(path)}: is not in the snapshot" for path in in_file if path not in there]
    found += [f"{display(path)}: is not in the file" for path in stored if path not in here]
    return found or [f"{display(in_file[0])}: its tensors are in another order"]


def _form(spec: TensorSpec) -> str:
    return f"{spec.kind} {spec.dtype}{list(spec.shape)}"


def _is_equal(data: Bytes, pieces: Iterator[Bytes]) -> bool:
    """Return whether pieces are these bytes; all pieces are read."""
    at, is_equal = 0, True
    for piece in pieces:
        is_equal = is_equal and np.array_equal(data[at : at + piece.size], piece)
        at += piece.size
    return is_equal and at == data.size
