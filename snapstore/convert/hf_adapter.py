"""Find the adapter of PEFT in a state: which tensors are its, under which names PEFT loads them, and with which config.

In: the names of a state, as a PeftModel has them (with the name of the adapter, among the weights of the base model),
or as PEFT's `get_peft_model_state_dict` returns them. Out: stored name -> name in `adapter_model.safetensors`. PEFT
gives weights that it does not find new random values, and transformers does too. So a state that is not understood as a
whole is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInputError
from ..format.records import Snapshot
from ..repository import Repository
from ..state.values.tensors import TensorSpec
from ..text import some

ADAPTER_CONFIG = "adapter_config.json"
#: Before the names of the base model, in each file of PEFT.
PREFIX = "base_model.model."
#: Names in a PeftModel: those of LoRA, and of modules that are trained as a whole. PEFT's files leave the adapter out.
_LORA = re.compile(r"(?P<head>.+\.lora_[AB])\.(?P<adapter>[^.]+)(?P<tail>\.(weight|bias))")
_VECTOR = re.compile(r"(?P<head>.+\.lora_magnitude_vector)\.(?P<adapter>[^.]+)\.weight(?P<tail>)")
_EMBEDDING = re.compile(r"(?P<head>.+\.lora_embedding_[AB])\.(?P<adapter>[^.]+)(?P<tail>)")
_WHOLE = re.compile(r"(?P<head>.+)\.modules_to_save\.(?P<adapter>[^.]+)(?P<tail>\..+)")
#: Names that only a PeftModel has. Other names with `lora_` belong to a variant of LoRA.
_OF_MODEL = re.compile(
    r"(.+\.)?(base_layer|original_module|prompt_encoder|token_adapter(?!\.trainable_tokens_delta$)|lora_\w+\.[^.]+\.\w+)"
    r"(\..+)?"
)
_PLAIN = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?A(?:\.weight)?")
WRITE = 'model.peft_config["default"].save_pretrained("adapter")'
RESAVE = 'save {"model": peft.get_peft_model_state_dict(model)} instead: PEFT chooses the tensors there'


def is_adapted(names: list[str]) -> bool:
    """Return whether names are those of a PeftModel, or of an adapter."""
    return any(name.startswith(PREFIX) or _match(name) for name in names)


def _match(name: str) -> re.Match[str] | None:
    return next((m for form in (_LORA, _VECTOR, _EMBEDDING, _WHOLE) if (m := form.fullmatch(name))), None)


def config_of_trainer(repository: Repository, snapshot: Snapshot) -> bytes | None:
    """Return the adapter's config that a SnapshotCallback has saved; None: there is none."""
    if "trainer" not in {ref.part for ref in snapshot.manifests}:
        return None
    texts = repository.restore(f"id:{snapshot.id}", keys="trainer", per_rank=0)["trainer"]
    text = texts.get(ADAPTER_CONFIG) if isinstance(texts, dict) else None
    return text.encode() if isinstance(text, str) else None


def names_in_file(ref: str, specs: list[tuple[str, TensorSpec]], config: bytes | None) -> dict[str, str]:
    """Return stored name -> name in the file, of each tensor of the adapter.

    Args:
        config: the content of adapter_config.json; None: there is none.

    Raises:
        InvalidInputError: there is no config, or it is that of another adapter; or the adapter is not known as a whole.
    """
    found = {name: match for name, _ in specs if (match := _match(name))}
    example = next(iter(found), specs[0][0])
    if config is None:
        raise InvalidInputError(
            f"{ref}: holds an adapter of PEFT ({example}), and its config is not in the snapshot: write it with "
            f"{WRITE}, and export with --config adapter"
        )
    values = _values(config)
    names = {name: match["head"] + match["tail"] for name, match in found.items()}
    if not names:
        names = {name: name for name, _ in specs}
        strange = [name for name in names if (match := _OF_MODEL.fullmatch(name)) and match[2] != "base_layer"]
        if values.get("peft_type") != "LORA":  # get_peft_model_state_dict may return the embeddings below a LoRA
            strange = [name for name in names if _OF_MODEL.fullmatch(name)]
        if strange:
            raise InvalidInputError(f"{ref}: holds {strange[0]} of {values.get('peft_type')}; {RESAVE}")
    else:
        _require_lora(ref, specs, found, values)
    if not any(name.startswith(PREFIX) for name in names.values()):  # transformers' own model.add_adapter
        if inner := [name for name in names if PREFIX in name]:
            raise InvalidInputError(
                f"{ref}: {inner[0]} has another prefix before {PREFIX}: take it off with --strip "
                f"{inner[0].partition(PREFIX)[0]}"
            )
        names = {name: PREFIX + new for name, new in names.items()} if found else names
    _require_fit(ref, {names[name]: spec for name, spec in specs if name in names}, values)
    return names


def _values(config: bytes) -> dict[str, Any]:
    try:
        values = json.JSONDecoder().decode(config.decode())
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidInputError(f"{ADAPTER_CONFIG}: expected a JSON object; write it again with {WRITE}")
    return values


def _require_lora(
    ref: str, specs: list[tuple[str, TensorSpec]], found: Mapping[str, re.Match[str]], values: dict[str, Any]
) -> None:
    """Check that the tensors with known names are all of the adapter.

    Raises:
        InvalidInputError: there may be others, or there are several adapters.
    """
    adapters = sorted({match["adapter"] for match in found.values()})
    if len(adapters) > 1:
        raise InvalidInputError(
            f"{ref}: holds {len(adapters)} adapters ({some(adapters, 5)}), and a folder holds one: save "
            '{"model": peft.get_peft_model_state_dict(model, adapter_name=...)} of each as a run of its own'
        )
    known = ("base_layer", "original_module")
    others = [n for n, _ in specs if n not in found and (m := _OF_MODEL.fullmatch(n)) and m[2] not in known]
    settings = {"peft_type": "LORA", "bias": "none", "trainable_token_indices": None, "target_parameters": None}
    unlike = [f"{key}={values[key]!r}" for key, usual in settings.items() if values.get(key, usual) != usual]
    if others or unlike:
        raise InvalidInputError(f"{ref}: holds an adapter with {some([*unlike, *others], 3)}; {RESAVE}")


def _require_fit(ref: str, specs: dict[str, TensorSpec], values: dict[str, Any]) -> None:
    """Check the rank and the modules of LoRA, which names and shapes tell as well.

    Raises:
        InvalidInputError: the config says others.
    """
    rank, targets = values.get("r"), values.get("target_modules")
    if values.get("peft_type") != "LORA" or values.get("target_parameters"):
        return
    layers = {match["module"]: (name, spec) for name, spec in specs.items() if (match := _PLAIN.fullmatch(name))}
    if not layers:
        raise InvalidInputError(
            f"{ref}: {ADAPTER_CONFIG} is that of a LoRA, but no tensor is named ....lora_A.weight: choose the part "
            "with --part, or leave out --config"
        )
    for module, (name, spec) in layers.items():
        if not values.get("rank_pattern") and isinstance(rank, int) and spec.shape[:1] != (rank,):
            raise InvalidInputError(
                f"{ref}: {name} has rank {spec.shape[0]}, but {ADAPTER_CONFIG} says r={rank}: it is the config of "
                f"another adapter; write that of this one with {WRITE}"
            )
        if isinstance(targets, list) and not any(f".{module}".endswith(f".{target}") for target in targets):
            raise InvalidInputError(
                f"{ref}: {name} is not among target_modules={targets} of {ADAPTER_CONFIG}: it is the config of another "
                f"adapter; write that of this one with {WRITE}"
            )
