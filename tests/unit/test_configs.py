"""Configs of OmegaConf come back with their interpolations and flags, as from torch.save, or in their plain form."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

from kit import rank_saves
from kit.repositories import created, opened
from kit.states import Saved, again, same, through_torch
from snapstore import InvalidInputError, SnapshotManager, UnsupportedLeafError
from snapstore.state.fill.plan import RestorePlan
from snapstore.state.tree.decode import Decoded
from snapstore.state.tree.weights_only import to_weights_only
from snapstore.state.values.classes import Types
from snapstore.state.values.tensors import StoredPart
from snapstore.state.walk.flatten import flatten

omegaconf = pytest.importorskip("omegaconf")
OmegaConf = omegaconf.OmegaConf

VALUES = {
    "lr": 0.1,
    "model": {"width": 8, "acts": ["relu", {"slope": "${lr}"}], "out": "${model.width}", "near": "${.width}"},
    "missing": "???",
    "none": None,
    "empty": {},
    5: True,
    "escaped": "\\${lr}",
    "environment": "${oc.env:NO_SUCH_VARIABLE}",
}


@dataclasses.dataclass
class Model:
    width: int = 8
    acts: list[str] = dataclasses.field(default_factory=lambda: ["relu"])
    norm: str | None = None
    name: str = omegaconf.MISSING


@dataclasses.dataclass
class Conf:
    model: Model = dataclasses.field(default_factory=Model)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    width: int = "${.model.width}"  # type: ignore[assignment]


def flagged() -> Any:
    config = OmegaConf.create(VALUES)
    OmegaConf.set_struct(config, True)  # as Hydra does
    OmegaConf.set_readonly(config.model, True)
    OmegaConf.set_struct(config.model.acts, False)
    return config


def structured() -> Any:
    config = OmegaConf.structured(Conf)
    config.model.width, config.sizes["a"], config.model.acts = 9, 3, ["gelu", "relu"]
    return config


#: name -> a function that makes a config.
MAKE = {
    "dict": lambda: OmegaConf.create(VALUES),
    "list": lambda: OmegaConf.create([1, {"a": "${0}"}, [2, "???"]]),
    "flags": flagged,
    "structured": structured,
    "structured in another": lambda: OmegaConf.create({"conf": structured(), "z": 1}),
    "part": lambda: flagged().model,
    "part of a part": lambda: flagged().model.acts,
    "part without interpolations": lambda: flagged().empty,
    "structured part": lambda: structured().model,
}


def nodes(config: Any) -> Any:
    """Return all that there is to know of a config: types, values that are not resolved, and flags in effect."""
    if not isinstance(config, omegaconf.Container):
        return type(config), config._metadata.ref_type, config._value()
    flags = [config._get_flag(flag) for flag in ("readonly", "struct", "allow_objects")]
    content = config.__dict__["_content"]
    items = content.items() if isinstance(content, dict) else enumerate(content)
    about = config._metadata
    below = [(key, nodes(child)) for key, child in items]
    return type(config), flags, about.object_type, about.key_type, about.element_type, below


def decoded(*kinds: type) -> Decoded:
    return Decoded(types=Types(kinds))


@pytest.fixture
def repository():
    with opened(created()) as found:
        yield found


@pytest.mark.parametrize("name", MAKE)
def test_a_config_comes_back_as_from_torch(name, monkeypatch):
    state = {"h": {"config": MAKE[name](), "n": 1}, "w": torch.ones(2)}
    found = again(state, decoded=decoded(Conf, Model))["h"]["config"]
    assert nodes(found) == nodes(state["h"]["config"]) == nodes(through_torch(state)["h"]["config"])
    monkeypatch.setenv("NO_SUCH_VARIABLE", "set now")
    resolved = OmegaConf.to_container(found, resolve=True)
    assert resolved == OmegaConf.to_container(state["h"]["config"], resolve=True)


@pytest.mark.parametrize("name", MAKE)
def test_a_config_of_the_target_is_replaced_by_the_stored_one(repository, name):
    repository.save({"h": {"config": MAKE[name]()}, "w": torch.ones(2)}, run="a", step=0)
    target = {"h": {"config": MAKE[name]()}, "w": torch.zeros(2)}
    with omegaconf.flag_override(target["h"]["config"], ["readonly", "struct"], False):
        target["h"]["config"].merge_with([9] if name in ("list", "part of a part") else {})
    repository.restore_into("a@0", target)
    assert nodes(target["h"]["config"]) == nodes(MAKE[name]())
    same(target["w"], torch.ones(2))


def test_another_type_does_not_fit(repository):
    repository.save({"h": {"config": structured()}}, run="a", step=0)
    with pytest.raises(InvalidInputError, match=r"h\.config: type: expected DictConfig as in the target, got dict"):
        repository.restore_into("a@0", {"h": {"config": OmegaConf.create({})}})
    repository.restore_into("a@0", {"h": {"config": OmegaConf.create({})}}, types=[Conf, Model])


def test_without_omegaconf_it_is_a_dict(monkeypatch):
    state = {"h": {"config": flagged()}, "w": torch.ones(1)}
    saved = Saved(state)
    monkeypatch.delitem(sys.modules, "omegaconf")
    same(saved.restore()["h"]["config"], VALUES)


def test_without_the_class_of_a_structured_config_all_of_it_is_plain():
    state = {"h": {"config": OmegaConf.create({"conf": structured(), "z": 1})}, "w": torch.ones(1)}
    model = {"width": 9, "acts": ["gelu", "relu"], "norm": None, "name": "???"}
    expected = {"conf": {"model": model, "sizes": {"a": 3}, "width": "${.model.width}"}, "z": 1}
    same(again(state)["h"]["config"], expected)
    same(again(state, decoded=decoded(Conf))["h"]["config"], expected)


def typed_values() -> Any:
    return omegaconf.DictConfig({"a": 1}, element_type=int)


def flagged_value() -> Any:
    config = OmegaConf.create({"a": 1})
    OmegaConf.set_readonly(config._get_node("a"), True)
    return config


@pytest.mark.parametrize(
    "make", [typed_values, flagged_value, lambda: OmegaConf.create({"a": omegaconf.IntegerNode(1)})]
)
def test_what_would_not_come_back_is_refused_with_advice(make):
    with pytest.raises(UnsupportedLeafError, match=r"h\.config: a config .* has no stored form: pass omegaconf\.Ome"):
        flatten({"h": {"config": make()}})


@pytest.mark.parametrize("content", [None, "???", "${a}"])
def test_a_config_without_values_is_refused(content):
    with pytest.raises(UnsupportedLeafError, match=r"^c: a config that is .* pass None in its place$"):
        flatten({"c": omegaconf.DictConfig(content)})


def test_a_subclass_is_refused():
    kind = type("Mine", (omegaconf.DictConfig,), {})
    with pytest.raises(UnsupportedLeafError, match=r"h\.config: .*Mine has no stored form"):
        flatten({"h": {"config": kind({"a": 1})}})


def test_a_manager_and_ranks_save_them(repository):
    with SnapshotManager(repository, run="a") as manager:
        config = OmegaConf.create({"a": 0})
        for step in range(3):
            manager.save(step, {"h": {"config": config}, "w": torch.ones(2)})
            config.a += 1
    assert [repository.restore(f"a@{step}")["h"]["config"].a for step in range(3)] == [0, 1, 2]
    snapshot, _ = rank_saves.save(repository, [lambda: {"h": {"config": flagged()}, "w": torch.ones(2)}] * 2, 0)
    assert nodes(repository.restore(snapshot.ref)["h"]["config"]) == nodes(flagged())


def test_files_have_the_plain_form():
    written, changed = to_weights_only({"h": [flagged(), OmegaConf.create([1, "${0}"])]})
    same(written, {"h": [VALUES, [1, "${0}"]]})
    assert [one.written_as for one in changed] == ["dict", "list"]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("DictConfig", ["list", [1]]),
        ("ListConfig", ["dict", ["a"], [1]]),
        ("DictConfig", ["dict", ["a"], ["${"]]),
        ("DictConfig", ["dict", [1.5], [["set", []]]]),
        ("DictConfig(struct=Maybe)", ["dict", [], []]),
    ],
)
def test_a_forged_config_is_refused(name, plain):
    with pytest.raises(InvalidInputError, match=r"cannot make a .*Config.* of OmegaConf of what is stored"):
        restored(["object", "subclass", "omegaconf", name, plain])


@pytest.mark.parametrize("keys", [["b"], ["a", "b"], [0], 5])
def test_a_forged_part_of_a_config_is_refused(keys):
    config = ["object", "subclass", "omegaconf", "DictConfig", ["dict", ["a"], [1]]]
    keys = keys if type(keys) is int else ["list", keys]
    tree = ["object", "dataclass", "omegaconf", "part of a config", ["dict", ["config", "keys"], [config, keys]]]
    with pytest.raises(InvalidInputError, match=r"cannot make a part of a config of OmegaConf of what is stored"):
        restored(tree)


def restored(tree: Any) -> Any:
    return RestorePlan([StoredPart("", tree, [])]).finish()


def test_an_unknown_name_is_left_in_its_plain_form():
    for name in ("Config", "DictConfig[os:system]", "DictConfig(a", "NodeConfig"):
        assert restored(["object", "subclass", "omegaconf", name, ["dict", ["a"], [1]]]) == {"a": 1}
