"""Trainings of a tiny Llama with Hugging Face's packages; as a script, one that kills itself: `REPOSITORY STEP`.

Dropout draws random numbers at each step and the data is shuffled, so a training that does not resume exactly where it
ended gets other weights.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from snapstore import SnapshotManager
from snapstore.integrations.transformers import SnapshotCallback, checkpoint_dir

__all__ = ["ExportableState", "SnapshotCallback", "checkpoint_dir"]
transformers.logging.set_verbosity_error()


class Tokens(torch.utils.data.Dataset):
    """Texts of 8 random tokens below 64."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def llama() -> LlamaForCausalLM:
    """Return a Llama of 2 layers with tied embeddings and dropout, always of the same weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=0.1, tie_word_embeddings=True))


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    """Return a trainer of 8 steps, 5 in an epoch, that logs each step and evaluates and saves each third."""
    given = {
        **{"output_dir": str(folder), "max_steps": 8, "per_device_train_batch_size": 2, "use_cpu": True},
        **{"gradient_accumulation_steps": 2, "learning_rate": 0.01, "warmup_steps": 2, "report_to": []},
        **{"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "disable_tqdm": True},
        **{"metric_for_best_model": "eval_loss", "restore_callback_states_from_checkpoint": True},
    }
    args = transformers.TrainingArguments(**given | options)
    model = llama()
    early = EarlyStoppingCallback(5)
    made = Trainer(model, args, train_dataset=Tokens(20), eval_dataset=Tokens(4), callbacks=[early, Draw(), *callbacks])
    made.remove_callback(transformers.PrinterCallback)
    return made


class Draw(TrainerCallback):
    """Draws from python's and NumPy's generators at each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        random.random()
        np.random.random()


class KillAt(TrainerCallback):
    """Kills the process when the step after `step` begins: the save of `step` has just begun."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    with SnapshotManager(root / "snapshots", run="a") as manager:
        trainer(root / "killed", SnapshotCallback(manager), KillAt(int(sys.argv[2]))).train()
