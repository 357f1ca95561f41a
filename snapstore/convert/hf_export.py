"""Write a folder of Hugging Face that `from_pretrained` loads: weights in safetensors, an index, config and tokenizer.

In: the tensors of a snapshot in their stored order, and the other files of the folder. Out: shards of a limited size;
memory holds one tensor, and the other files if they were imported. Tied tensors are written under each of their names,
since transformers ties only names that the class of a model declares. Only the output embedding is left out, as
`save_pretrained` does, if the config ties it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import InvalidInputError
from ..format.records import Snapshot
from ..repository import Repository
from ..restore.streaming import TensorReader
from ..state.values.tensors import TensorSpec
from ..text import quoted
from . import safetensors_file
from .checkpoint import file_inside, noted
from .hf_adapter import ADAPTER_CONFIG, WRITE
from .hf_folder import (
    ADAPTER,
    ADAPTER_COPY,
    DIFFUSION,
    INDEXES,
    MODEL,
    STATES,
    TOTAL_SIZE,
    TRAINER_STATE,
    index_metadata,
    index_of,
    one_file,
)

CONFIG = "config.json"
#: The output embedding; transformers ties it to the input embedding if the config says so.
OUTPUT_EMBEDDING = "lm_head.weight"
#: Endings of files in the folder of --config that hold weights or a state.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".ot"),
    *(".onnx", ".onnx_data", ".gguf", ".tflite", ".mlmodel"),
)
#: Control characters and surrogates: a terminal obeys some, and some have no form in UTF-8.
_ODD = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: Files in the folder of --config that belong to a training run, not to the model.
_OF_TRAINING = {*STATES, TRAINER_STATE, *INDEXES}


#: The other files, by name: the bytes of an imported one, or the path of one in the folder of --config.
Beside = Mapping[str, bytes | Path]


@dataclass(frozen=True, slots=True)
class HfPlan:
    """The files of an export.

    Attributes:
        index: the name of the index, if there are several shards.
        shards: file -> (name, spec) of each of its tensors, in the order of reading.
        dropped: dotted paths of the values that are left out.
        tied: names that are left out because `from_pretrained` ties them to one in the export.
    """

    index: str
    shards: dict[str, list[tuple[str, TensorSpec]]]
    dropped: list[str]
    tied: list[str]

    def files(self, beside: Beside) -> list[str]:
        """Return the names of all files of the export, sorted."""
        return sorted([*self.shards, *beside, *([self.index] if len(self.shards) > 1 else [])])


def other_files(repository: Repository, snapshot: Snapshot, config: str | Path | None) -> Beside:
    """Return the files beside the weights, by name: those of a folder, else the imported ones.

    Raises:
        InvalidInputError: the folder has no config, or a name leads out of the export or is not printable.
    """
    if config is not None:
        return _of_folder(Path(config))
    imported = _imported(snapshot)
    top = repository.restore(f"id:{snapshot.id}", keys="files") if imported.get("files") else {}
    files = top.get("files", {}).items()
    found = {name: data for name, data in files if isinstance(data, bytes) and name not in INDEXES}
    for name in found:
        slashed = name.replace("\\", "/")
        path = PurePosixPath(slashed)
        leaves, odd = path.is_absolute() or ".." in path.parts or slashed != str(path), _ODD.search(name)
        if leaves or odd or slashed != name:
            why = "leads out of the export" if leaves else "names a folder on Windows"
            why = "has a control character, or a surrogate, which is no character" if odd else why
            raise InvalidInputError(
                f"{snapshot.ref}: holds a file named {name!r}, which {why}; restore it with --keys instead, and "
                "export with --config, a folder of the other files"
            )
    return found


def of_adapter(beside: Beside, saved: bytes | None) -> tuple[Beside, bytes | None]:
    """Return the files beside an adapter, and the content of its config; None: there is none.

    Args:
        beside: the other files. A config of a model is left out: from_pretrained would take the adapter for a model.
        saved: the config that the snapshot has.
    """
    config: bytes | Path | None = beside.get(ADAPTER_CONFIG, saved)
    content = config.read_bytes() if isinstance(config, Path) else config
    others = {name: data for name, data in beside.items() if name not in (CONFIG, "generation_config.json")}
    return others | ({} if content is None else {ADAPTER_CONFIG: content}), content


def _imported(snapshot: Snapshot) -> dict[str, Any]:
    """Return what the import of a folder of Hugging Face has noted about a snapshot; {} if it was none."""
    imported = noted(snapshot, "imported")
    return imported if imported.get("format") == "hf" else {}


def _of_folder(folder: Path) -> Beside:
    if not folder.is_dir():
        raise InvalidInputError(f"{folder}: is not a folder; name one with {CONFIG}, such as that of the base model")
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    names = [name for name in names if not name.endswith(_WEIGHTS) and name not in _OF_TRAINING]
    if not {CONFIG, ADAPTER_CONFIG}.intersection(names):
        raise InvalidInputError(
            f"{folder}: has no {CONFIG}, without which from_pretrained cannot make the model; an adapter of PEFT needs "
            f"{ADAPTER_CONFIG}: {WRITE}"
        )
    return {name: file_inside(folder, name, folder) for name in names}


def plan(path: Path, reader: TensorReader, beside: Beside, max_shard_bytes: int, *, tensors_only: bool) -> HfPlan:
    """Return which tensor goes into which file; the weights of an adapter of PEFT go into one.

    Raises:
        InvalidInputError: safetensors cannot hold the state, or a file beside the weights has a name of theirs.
    """
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise InvalidInputError(f"max_shard_bytes {quoted(max_shard_bytes)}: expected an int of 1 or more")
    tied = _tied(reader.specs, beside)
    specs = [(name, spec) for name, spec in reader.specs if name not in tied]
    dropped = safetensors_file.check(path, reader, specs, tensors_only=tensors_only)
    groups: list[list[tuple[str, TensorSpec]]] = []
    size = 0
    for name, spec in specs:
        if not groups or size + spec.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append((name, spec))
        size += spec.nbytes
    if not groups:
        raise InvalidInputError(f"{path}: the state has no tensors; choose another part of it with --part")
    model = DIFFUSION if "_diffusers_version" in _config(beside) else MODEL
    if is_adapter(beside):
        shards = {ADAPTER: specs}
    elif len(groups) == 1:
        shards = {one_file(model): groups[0]}
    else:
        shards = {f"{model}-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}
    if taken := sorted(set(shards).intersection(beside)):
        raise InvalidInputError(
            f"{path}: {taken[0]} names both weights and another file; export with another max_shard_bytes"
        )
    return HfPlan(index_of(model), shards, dropped, sorted(tied))


def is_adapter(beside: Beside) -> bool:
    """Return whether the weights are those of an adapter of PEFT: its config is there, and no config of a model."""
    return ADAPTER_CONFIG in beside and not {CONFIG, ADAPTER, ADAPTER_COPY}.intersection(beside)


def _tied(every: list[tuple[str, TensorSpec]], beside: Beside) -> set[str]:
    """Return the names that `from_pretrained` ties to an earlier one: the output embedding, if it is tied here too.

    The paths of tied tensors follow each other, with one spec.
    """
    again = {name for (_, before), (name, spec) in pairwise(every) if spec is before and name == OUTPUT_EMBEDDING}
    is_tied = _config(beside).get("tie_word_embeddings") is True  # without a word, it depends on the model
    return again if is_tied else set()


def _config(beside: Beside) -> dict[str, Any]:
    """Return the config of a model; {} if there is none that can be read."""
    try:
        data = beside.get(CONFIG, b"{}")
        config = json.JSONDecoder().decode((data if isinstance(data, bytes) else data.read_bytes()).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def write(temp: Path, reader: TensorReader, plan: HfPlan, beside: Beside, metadata: dict[str, str]) -> None:
    """Write all files into a folder.

    Raises:
        InvalidInputError: the library safetensors refuses a header, or a file of --config cannot be read.
    """
    for name, data in beside.items():
        (temp / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, bytes):
            (temp / name).write_bytes(data)
        else:
            _copy(data, temp / name)
    tensors = ((name, tensor) for name, tensor in reader if name not in plan.tied)
    for file, specs in plan.shards.items():
        (temp / file).touch()
        safetensors_file.write(temp / file, specs, tensors, metadata)
    if len(plan.shards) > 1:
        total = sum(spec.nbytes for specs in plan.shards.values() for _, spec in specs)
        index = {
            "metadata": {**index_metadata(_imported(reader.snapshot).get("index")), TOTAL_SIZE: total},
            "weight_map": {name: file for file, specs in plan.shards.items() for name, _ in specs},
        }
        (temp / plan.index).write_text(json.dumps(index, indent=2) + os.linesep)


def _copy(source: Path, target: Path) -> None:
    """Copy a file in pieces.

    Raises:
        InvalidInputError: it cannot be read.
    """
    try:
        file = source.open("rb")
    except OSError as error:
        raise InvalidInputError(f"{source}: cannot be read: {error.strerror}") from error
    with file, target.open("wb") as new:
        shutil.copyfileobj(file, new)
