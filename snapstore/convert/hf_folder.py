"""Open a folder of Hugging Face: a model of `save_pretrained`, or a checkpoint of transformers' Trainer.

In: a folder with weights in safetensors, or else in files of torch, whole or in shards with an index. Out: a state

    {"model": {name: tensor}, "optimizer": ..., "scheduler": ..., "files": {name: bytes}}

where `files` has all other files of the folder, unchanged: configs, tokenizers, the Trainer's own state. Left out are
hidden folders, such as `.git`, checkpoints in the folder (`checkpoint-N`), and copies of the weights in other formats.
Copies are known by names that the libraries of Hugging Face give to the weights of one model: another file of weights,
such as `model_1.safetensors` of Accelerate, may belong to another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidInputError
from ..text import some
from . import files, safetensors_file
from .checkpoint import Checkpoint, file_inside, names_below, read_json, step_in
from .lazy_state import Later
from .logged_metrics import metrics_of_trainer

#: The names of the weights of a model, without ending: those of transformers, and those of diffusers.
MODEL, DIFFUSION = "model", "diffusion_pytorch_model"
TORCH_INDEX, TORCH_WEIGHTS = "pytorch_model.bin.index.json", "pytorch_model.bin"
#: The metadata of an index that an export computes.
TOTAL_SIZE = "total_size"
TRAINER_STATE = "trainer_state.json"
#: The names of the checkpoints in the output folder of the Trainer.
IN_SERIES = re.compile(r"checkpoint-\d+")
#: Files of the Trainer with tensors that change from step to step, and their keys in the state.
STATES = {"optimizer.pt": "optimizer", "optimizer.bin": "optimizer", "scheduler.pt": "scheduler"}
#: Names of files that hold the weights of the model in another format, or in other shards.
_COPIES = re.compile(
    r"(?:model|(?:(?:diffusion_)?(?:pytorch|flax)|tf|rust)_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin|h5|msgpack|ot)"
)
ADAPTER, ADAPTER_COPY = "adapter_model.safetensors", "adapter_model.bin"
#: Endings of formats from which no training goes on.
_FOR_INFERENCE = (".onnx", ".onnx_data", ".gguf", ".tflite", ".mlmodel")


def one_file(model: str) -> str:
    """Return the name of the file of weights that are in one file."""
    return f"{model}.safetensors"


def index_of(model: str) -> str:
    """Return the name of the index of weights that are in several files."""
    return f"{model}.safetensors.index.json"


#: The names of all indexes.
INDEXES = (index_of(MODEL), index_of(DIFFUSION), TORCH_INDEX)


def is_hf(folder: Path) -> bool:
    """Return whether a folder holds weights under names of Hugging Face."""
    return bool(_safetensors(folder)) or any((folder / name).exists() for name in (TORCH_INDEX, TORCH_WEIGHTS))


def open_hf(folder: Path) -> Checkpoint:
    """Open a folder.

    Raises:
        InvalidInputError: a file is missing, damaged, not of the folder, or holds Python objects.
        CapabilityError: the library safetensors is not installed.
    """
    state: dict[str, Any] = {}
    weights = _weights(folder)
    state["model"], used = weights.tensors, weights.paths
    for name, key in STATES.items():
        if key not in state and (folder / name).exists():  # else it is among the files
            path = file_inside(folder, name, folder)
            state[key] = files.read_torch(path)
            used.append(path)
    others = {}
    names, hidden = names_below(folder)
    left_out = [*weights.left_out, *hidden]
    series = {path.name for path in folder.iterdir() if IN_SERIES.fullmatch(path.name) and is_hf(path)}
    left_out += sorted(series)
    names = {name for name in names if name.partition("/")[0] not in series}
    taken = {path.relative_to(folder).as_posix() for path in used}
    is_model = _COPIES.fullmatch(used[0].name) or any((folder / index).exists() for index in INDEXES)
    for name in sorted(names - taken):
        if name in INDEXES:  # an export makes a new one
            continue
        is_copy = name == ADAPTER_COPY if used[0].name == ADAPTER else is_model and _COPIES.fullmatch(name)
        if is_copy or name.endswith(_FOR_INFERENCE):
            left_out.append(name)
            continue
        path = file_inside(folder, name, folder)
        others[name] = Later(path.read_bytes, "bytes")
        used.append(path)
    if others:
        state["files"] = others
    size = sum(path.stat().st_size for path in used)
    trainer, imported = folder / TRAINER_STATE, dict[str, Any](files=len(others))
    if weights.index_metadata:
        imported["index"] = weights.index_metadata
    about = {"safetensors": weights.metadata} if weights.metadata else {}
    stated = read_json(trainer) if trainer.is_file() else {}
    metrics = metrics_of_trainer(stated)
    return Checkpoint(state, size, step_in(stated), about, imported, sorted(left_out), files.let_go, metrics)


def _safetensors(folder: Path) -> list[str]:
    """Return the names of the files of weights in safetensors that need no index."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    preferred: list[str] = [name for name in (one_file(MODEL), ADAPTER, one_file(DIFFUSION)) if name in names]
    return preferred[:1] or names


class _Weights(NamedTuple):
    """The weights of a folder by name, and their files.

    Attributes:
        metadata: of the files, as one.
        index_metadata: of the index.
        left_out: metadata that is not among these.
    """

    tensors: dict[str, Any]
    paths: list[Path]
    metadata: dict[str, str]
    index_metadata: dict[str, Any]
    left_out: list[str]


def _weights(folder: Path) -> _Weights:
    for model in (MODEL, DIFFUSION):
        if (folder / index_of(model)).exists() and not (folder / one_file(model)).exists():  # as transformers prefers
            return _indexed(folder, index_of(model))
    names = _safetensors(folder)
    if not names and (folder / TORCH_INDEX).exists() and not (folder / TORCH_WEIGHTS).exists():
        return _indexed(folder, TORCH_INDEX)
    return _of_files([file_inside(folder, name, folder) for name in names or [TORCH_WEIGHTS]])


def _indexed(folder: Path, index: str) -> _Weights:
    """Return the weights of the shards that an index names.

    Raises:
        InvalidInputError: the index and the shards do not fit together.
    """
    where = file_inside(folder, index, folder)
    content = read_json(where)
    weight_map, about = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(f"{where}: expected an object 'weight_map' of names and files; download it again")
    names = sorted(set(map(str, weight_map.values())))
    found = _of_files([file_inside(folder, name, where) for name in names])
    if missing := [name for name in weight_map if name not in found.tensors]:
        raise InvalidInputError(
            f"{where}: names {some(missing, 3)}, but {weight_map[missing[0]]!r} does not hold it; a shard is not of "
            "this model, or was cut off: download it again"
        )
    kept, all_keys = index_metadata(about), about if isinstance(about, dict) else {}
    left_out = [f"{index} (metadata {key!r})" for key in all_keys if key not in kept and key != TOTAL_SIZE]
    return found._replace(index_metadata=kept, left_out=[*found.left_out, *left_out])


def index_metadata(about: Any) -> dict[str, Any]:
    """Return the plain values among the metadata of an index, without the size of the weights."""
    if not isinstance(about, dict):
        return {}
    return {
        key: value
        for key, value in about.items()
        if type(key) is str and key != TOTAL_SIZE and type(value) in (str, int, float, bool)
    }


def _of_files(paths: list[Path]) -> _Weights:
    """Return the weights in files; each key of the metadata is of the first file that has it.

    Raises:
        InvalidInputError: two files have a tensor of one name.
    """
    found = _Weights({}, paths, {}, {}, [])
    homes: dict[str, Path] = {}
    for path in paths:
        for name, tensor in _of_file(path):
            if name in found.tensors:
                raise InvalidInputError(
                    f"{path}: holds {name!r}, as {homes[name]} does; remove the file that does not belong to this model"
                )
            found.tensors[name], homes[name] = tensor, path
        about = safetensors_file.read(path)[1] if path.suffix == files.SAFETENSORS else {}
        for key, text in about.items():
            if text != found.metadata.setdefault(key, text):
                found.left_out.append(f"{path.name} (metadata {key!r})")
    return found


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names of the weights in a file, each with the weight or a `Later`."""
    if path.suffix == files.SAFETENSORS:
        yield from safetensors_file.laters(path)
        return
    state = files.read_torch(path)
    if not isinstance(state, dict):
        raise InvalidInputError(f"{path}: expected a dict of tensors, got {type(state).__name__}")
    yield from state.items()
