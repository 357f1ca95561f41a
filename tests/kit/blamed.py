"""Trainings of small models, dense and sparse, with a fault injected at a step: `train(kind, model, seed)`.

Take it when a test is about `blame`. Every step is saved. `train` returns the step and the tensor to blame, or None.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import nn

from snapstore import Repository, SaveOptions
from snapstore.storage.memory import MemoryStore

CHUNK_BYTES = 8192


class Attention(nn.Module):
    """A block of a small transformer, in which every linear layer has more bytes than lie in a manifest."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, words=200, width=48, rows_used=200, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(blocks))
        self.head = nn.Linear(width, words)
        self.rows_used = rows_used

    def batch(self):
        return torch.randint(0, self.rows_used, (4, 12))

    def loss(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


class Lora(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base, rank=16):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.head = nn.Linear(32, 10)

    def batch(self):
        return torch.randn(8, 3, 12, 12), torch.randint(0, 10, (8,))

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x).mean((2, 3))), y)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8)
        )
        self.goal = torch.randn(32, 8) / 4

    def batch(self):
        return torch.randn(32, 32)

    def loss(self, x):
        return ((self.net(x) - x @ self.goal) ** 2).mean()


def lora(blocks=2):
    model = Transformer(blocks=blocks)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up = Lora(block.qkv), Lora(block.up)
    return model


def large_lora():
    """A base of 6 MB, and adapters of 22 kB. The head has few words and there is one block: a step is cheap."""
    model = lora(blocks=1)
    model.embed = nn.Embedding(30000, model.embed.embedding_dim).requires_grad_(False)
    return model


def rows():
    """A frozen body, and an embedding of which few rows are trained."""
    model = Transformer(words=1000, rows_used=40)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "embed.weight" or name.startswith("blocks.1"))
    return model


MODELS = {"dense": Dense, "convolutions": Convolutions, "transformer": Transformer, "lora": lora, "rows": rows}
SPARSE = {"large lora": large_lora}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
}
SCHEDULES = {
    "constant": lambda step, steps: 1.0,
    "warm-up and cosine": lambda step, steps: min(step / 8, 1) * (1 + math.cos(math.pi * step / steps)) / 2,
    "restarts": lambda step, steps: (1 + math.cos(math.pi * (step % 9) / 9)) / 2 + 1e-3,
    "steps": lambda step, steps: 0.1 ** (step // 10),
}
#: Faults, each with how it is named.
FAULTS = {
    "nan": "nan", "inf": "nan", "scaled": "jumped", "noise": "jumped", "element": "jumped", "row": "jumped",
    "frozen element": "thawed", "unfrozen": "thawed", "detached": "died", "zero gradient": "died",
}  # fmt: skip


@dataclass
class Trained:
    """A run that was trained; `tensor` is the dotted path of the tensor that was changed at `step`."""

    repository: Repository
    store: MemoryStore
    step: int | None
    tensor: str | None
    what: str | None


def train(fault, model, seed, *, optimizer="adamw", schedule="warm-up and cosine", steps=36, store=None):
    torch.manual_seed(seed)
    draw = random.Random(f"{fault} {model} {seed}")
    net = (MODELS | SPARSE)[model]()
    names = dict(net.named_parameters())
    trained = [name for name, p in names.items() if p.requires_grad]
    frozen = [name for name, p in names.items() if not p.requires_grad]
    if fault in ("frozen element", "unfrozen") and not frozen:
        frozen = [draw.choice(trained)]
        names[frozen[0]].requires_grad_(False)
        trained.remove(frozen[0])
    at = draw.randrange(8, steps - 8)
    choices = frozen if FAULTS.get(fault) == "thawed" else trained + (frozen if FAULTS.get(fault) == "nan" else [])
    if fault == "row":
        choices = [name for name in choices if names[name].dim() > 1]
    name = draw.choice(choices) if fault else None
    parameter = names.get(name)
    opt = OPTIMIZERS[optimizer](net.parameters())
    plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: SCHEDULES[schedule](step, steps))
    store = store or MemoryStore()
    repository = Repository.create(
        store, chunk_bytes=CHUNK_BYTES if model in MODELS else 8 * CHUNK_BYTES, options=SaveOptions(threads=1)
    )
    state = {"model": net, "optimizer": opt, "scheduler": plan, "rng": torch.get_rng_state(), "steps": torch.zeros(3)}
    for step in range(steps):
        if step:
            if step == at and fault == "unfrozen":
                parameter.requires_grad_(True)
            if step >= at and fault == "detached":
                parameter.requires_grad_(False)
            loss = net.loss(net.batch())
            opt.zero_grad()
            loss.backward()
            if step >= at and fault == "zero gradient":
                parameter.grad.zero_()
            opt.step()
            plan.step()
        if step == at and fault:
            break_it(fault, parameter, draw)
        state["rng"] = torch.get_rng_state()
        state["steps"] += 1
        repository.save(state, run="r", step=step)
    return Trained(repository, store, at if fault else None, f"model.{name}" if fault else None, FAULTS.get(fault))


def break_it(fault, parameter, draw):
    with torch.no_grad():
        flat = parameter.view(-1)
        one = draw.randrange(flat.numel())
        if fault in ("nan", "inf"):
            flat[one] = math.nan if fault == "nan" else math.inf
        elif fault == "scaled":
            # an adapter that has begun near 0 is small: twice of it is no jump
            parameter.mul_(draw.choice([-3, 4, 10, 100]) if parameter.square().mean().sqrt() > 0.02 else 300)
        elif fault == "noise":
            parameter.add_(torch.randn_like(parameter) * draw.choice([0.1, 0.5, 2]))
        elif fault == "element":
            flat[one] += draw.choice([-1, 1]) * draw.choice([1, 30, 1e4])
        elif fault == "row":
            parameter[draw.randrange(len(parameter))] += draw.choice([1, 10])
        elif fault == "frozen element":
            flat[one] += draw.choice([1e-3, 1, 1e3])
