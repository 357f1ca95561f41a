"""A LoRA of PEFT: saved without its base model, resumed, exported, and loaded by PEFT with the same outputs."""

import json
import os
import re
import shlex
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file

from kit.processes import ROOT
from kit.repositories import OPTIONS, same
from kit.shell import invoke
from snapstore import InvalidInputError, Repository, SnapshotManager
from snapstore.convert import ExportOptions, export_snapshot
from snapstore.storage.memory import MemoryStore

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
TOKENS = torch.arange(24).view(2, 12)


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def adapted(**options):
    """Return a model with a LoRA whose weights are all random."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]} | options)
    model = peft.get_peft_model(llama(), config).eval()
    scramble(model)
    return model


def scramble(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) / 10)


def outputs(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.fixture
def repository():
    with Repository.create(MemoryStore(), options=OPTIONS) as opened:
        yield opened


def exported(repository, tmp_path, state, config="adapter", **options):
    snapshot = repository.save(state, run="r", step=1)
    options = ExportOptions(config=tmp_path / config if config else None, **options)
    return export_snapshot(repository, snapshot.ref, tmp_path / "out", to="hf", options=options)


def loaded(folder):
    return peft.PeftModel.from_pretrained(llama(), folder)


def test_the_recipe(tmp_path, monkeypatch, capsys):
    """Its script resumes to the bit, and its commands make a folder that its last lines load."""
    page = (ROOT / "docs" / "guides" / "recipes.md").read_text().split("\n## A LoRA\n")[1].split("\n## ")[0]
    script, load = (block.split("```")[0] for block in page.split("```python\n")[1:])
    llama().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)

    def run(code, folder, *arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        code = code.replace("/data/base", str(tmp_path / "base")).replace("interval_steps=30", "interval_steps=3")
        names = {}
        exec(code.replace("/data/snapshots", str(tmp_path / folder)), names)
        return names

    whole = run(script, "whole", "10")
    parts = run(script, "parts", "7")
    assert not same(dict(parts["state"]["model"]), dict(whole["state"]["model"]))
    parts = run(script, "parts", "10")
    assert parts["start"] == 7
    assert same(dict(parts["state"]["model"]), dict(whole["state"]["model"]))
    (command,) = re.findall(r"^\$ snapstore (export .*)$", page, re.MULTILINE)
    with Repository.open(tmp_path / "parts") as repository:
        size = repository.snapshot("lora@9").logical_bytes
        model = parts["model"]
        repository.restore_into("lora@9", {"model": peft.get_peft_model_state_dict(model)}, keys="model*")
    assert size < 40_000  # the base model alone has more
    refused = invoke([*shlex.split(command.replace("--config adapter ", "")), "--repo", str(tmp_path / "parts")])
    assert refused.exit_code == 1
    assert not (tmp_path / "out").exists()
    result = invoke([*shlex.split(command), "--repo", str(tmp_path / "parts")])
    assert result.exit_code == 0, result.output
    assert "an adapter of PEFT, without its base model" in result.output
    found = run(load, "parts")["model"]
    assert torch.equal(outputs(found), outputs(model))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )


KINDS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "module": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "all": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("form", ["model", "adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_that_of_peft(kind, form, repository, tmp_path):
    """A snapshot of the whole model, or of what PEFT takes for the adapter, gives the file that PEFT writes."""
    model = adapted(**KINDS[kind])
    model.save_pretrained(tmp_path / "adapter")
    state = model if form == "model" else peft.get_peft_model_state_dict(model)
    found = exported(repository, tmp_path, {"model": state, "step": 3})
    assert found.files[:2] == ["README.md", "adapter_config.json"]
    assert "adapter_model.safetensors" in found.files
    theirs = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    if (kind, form) == ("embedding", "model"):  # PEFT also writes the embedding itself, which is the base model's
        theirs = {name: value for name, value in theirs.items() if "base_layer" not in name}
    assert same(dict(sorted(ours.items())), dict(sorted(theirs.items())))
    assert torch.equal(outputs(loaded(tmp_path / "out")), outputs(model))


def test_prefixes_of_wrappers_are_removed(repository, tmp_path):
    model = adapted()
    model.peft_config["default"].save_pretrained(tmp_path / "adapter")
    state = {f"net.module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(
        InvalidInputError, match=r"another prefix before base_model.model.: take it off with --strip net"
    ):
        exported(repository, tmp_path, {"model": state})
    exported(repository, tmp_path, {"model": state}, strip=["net."])
    assert torch.equal(outputs(loaded(tmp_path / "out")), outputs(model))


def test_an_adapter_that_transformers_has_added(repository, tmp_path):
    """Such a model has no prefix of PEFT; a folder of PEFT does."""
    model = llama()
    config = peft.LoraConfig(r=4, lora_alpha=10, target_modules=["q_proj"])
    model.add_adapter(config)
    scramble(model)
    config.save_pretrained(tmp_path / "adapter")
    exported(repository, tmp_path, {"model": model})
    assert torch.equal(outputs(loaded(tmp_path / "out")), outputs(model))


def test_no_config_is_made_up(repository, tmp_path):
    """Nothing tells lora_alpha. The error names the command that writes the config; the folder of the base has none."""
    model = adapted()
    llama().save_pretrained(tmp_path / "base")
    for config in (None, "base"):
        with pytest.raises(
            InvalidInputError, match=re.escape('model.peft_config["default"].save_pretrained("adapter")')
        ):
            exported(repository, tmp_path, {"model": model}, config)
    assert not (tmp_path / "out").exists()
    model.peft_config["default"].save_pretrained(tmp_path / "base")  # beside that of the model
    assert exported(repository, tmp_path, {"model": model}, "base").files == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


REFUSED = {
    "rank": ({}, {"r": 8}, r"lora_A.weight has rank 4, but adapter_config.json says r=8"),
    "modules": ({}, {"target_modules": ["k_proj"]}, r"is not among target_modules=\['k_proj'\]"),
    "bias": (
        {"bias": "lora_only"},
        {"bias": "lora_only"},
        "an adapter with bias='lora_only'.*get_peft_model_state_dict",
    ),
    "tokens": ({"trainable_token_indices": [1]}, {"trainable_token_indices": [1]}, "get_peft_model_state_dict"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_config_that_does_not_fit_is_refused(kind, repository, tmp_path):
    options, config, text = REFUSED[kind]
    peft.LoraConfig(**{"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]} | config).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(InvalidInputError, match=text):
        exported(repository, tmp_path, {"model": adapted(**options)})
    assert not (tmp_path / "out").exists()


def test_other_adapters_are_exported_as_peft_chooses_them(repository, tmp_path):
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = peft.get_peft_model(llama(), config).eval()
    scramble(model)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(InvalidInputError, match=r"of IA3; save .*get_peft_model_state_dict"):
        exported(repository, tmp_path, {"model": model})
    exported(repository, tmp_path, {"model": peft.get_peft_model_state_dict(model)})
    assert torch.equal(outputs(loaded(tmp_path / "out")), outputs(model))


@pytest.mark.parametrize(
    "options", [{"trainable_token_indices": [1, 5]}, {"bias": "lora_only"}], ids=["tokens", "bias"]
)
def test_the_form_that_a_refusal_names_is_exported(options, repository, tmp_path):
    model = adapted(**options)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(InvalidInputError, match="get_peft_model_state_dict"):
        exported(repository, tmp_path, {"model": model})
    exported(repository, tmp_path, {"model": peft.get_peft_model_state_dict(model)})
    assert torch.equal(outputs(loaded(tmp_path / "out")), outputs(model))


def test_two_adapters_are_no_folder(repository, tmp_path):
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.peft_config["default"].save_pretrained(tmp_path / "adapter")
    with pytest.raises(InvalidInputError, match="holds 2 adapters"):
        exported(repository, tmp_path, {"model": model})
    exported(repository, tmp_path, {"model": peft.get_peft_model_state_dict(model)})
    assert torch.equal(outputs(loaded(tmp_path / "out")), outputs(model))


def test_the_config_of_an_adapter_makes_no_adapter(repository, tmp_path):
    """PEFT would load nothing from such a folder, and say so in a warning only."""
    adapted().peft_config["default"].save_pretrained(tmp_path / "adapter")
    with pytest.raises(InvalidInputError, match="is that of a LoRA, but no tensor is named"):
        exported(repository, tmp_path, {"model": llama()})


def test_the_trainer_saves_the_config(tmp_path):
    """Its snapshots are exported without an option; and a training with an adapter resumes."""
    pytest.importorskip("accelerate")
    from kit.hugging_face import SnapshotCallback, Tokens, checkpoint_dir

    def trained(folder, steps, until=None):
        model = adapted(lora_dropout=0.1).train()
        options = {"max_steps": steps, "save_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True}
        args = transformers.TrainingArguments(str(tmp_path / "o"), **options, disable_tqdm=True, learning_rate=0.01)
        with SnapshotManager(tmp_path / folder, run="a") as manager:
            trainer = transformers.Trainer(model, args, train_dataset=Tokens(32), callbacks=[SnapshotCallback(manager)])
            with checkpoint_dir(manager, until) as path:
                trainer.train(resume_from_checkpoint=path)
        return model

    whole = trained("whole", 4)
    trained("parts", 4)
    resumed = trained("parts", 4, until=2)
    assert same(resumed.state_dict(), whole.state_dict())
    with Repository.open(tmp_path / "parts") as repository:
        found = export_snapshot(repository, "a@4", tmp_path / "out", to="hf")
    assert found.files == ["adapter_config.json", "adapter_model.safetensors"]
    assert torch.equal(outputs(loaded(tmp_path / "out")), outputs(resumed))
    assert loaded(tmp_path / "out").peft_config["default"].lora_alpha == 10
