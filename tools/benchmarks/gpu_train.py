"""The training run that `tools/bench gpu` measures on: a GPT on Python's own sources, AdamW, three regimes in a row.

`pretrain`: lr 6e-4, warm-up then cosine, halfway through. `finetune`: the same run goes on at a constant 2e-5.
`bf16_rl`: it goes on at 1e-6, and its state is only the bf16 weights, as they are sent to the generators of an RL run,
without the fp32 masters and moments. Weights and moments are fp32, arithmetic is bf16 autocast
(fp32 on a CPU, where bf16 is slow). A state is {kind: {parameter: tensor}} with the kinds p (weights), m (exp_avg),
v (exp_avg_sq), or w (bf16 weights); AdamW's step counts, 4 bytes a parameter, are left out.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import train_gpt
from torch import Tensor, nn
from torch.nn import functional

State = dict[str, dict[str, Tensor]]
REGIMES = ("pretrain", "finetune", "bf16_rl")
GAPS = (1, 10, 50)
PEAK_LR, FINETUNE_LR, RL_LR = 6e-4, 2e-5, 1e-6
SETTLE_STEPS = 20  # of a new regime before its first snapshot
TEXT_BYTES = 12_000_000


@dataclass(frozen=True)
class Size:
    """Dimensions of the model and its batches."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    context: int
    batch: int


FULL = Size(width=1536, layers=14, heads=24, vocabulary=16384, context=512, batch=24)  # 421 M parameters in 87 tensors
TINY = Size(width=128, layers=4, heads=2, vocabulary=1024, context=32, batch=2)  # 0.9 M in 27


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to its input; no biases."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width), the same out."""
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        out: Tensor = mixed + self.down(functional.gelu(self.up(self.norm2(mixed))))
        return out


class GPT(nn.Module):
    """Tokens in, logits of the next token out; the embedding is also the head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # GPT-2's: the matrices that add to the residual stream start smaller
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * size.layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, context) int64 to logits (batch, context, vocabulary)."""
        x = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embed.weight)


def read_tokens(vocabulary: int, text_bytes: int) -> Tensor:  # (n,) int64
    """Words, runs of blanks and signs of the standard library and the common licenses; rare ones are token 0."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(folder.rglob("*.py")) if not {"site-packages", "dist-packages", "test"} & set(f.parts)]
    licenses = Path("/usr/share/common-licenses")
    files = ([f for f in sorted(licenses.iterdir()) if f.is_file()] if licenses.is_dir() else []) + files
    text, size = [], 0
    for file in files:
        text.append(file.read_text(errors="replace"))
        size += len(text[-1])
        if size >= text_bytes:
            break
    words = re.findall(r"\w+|\s+|[^\w\s]", "".join(text))
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), start=1)}
    return torch.tensor([known.get(word, 0) for word in words])


class Trainer:
    """The run. `state` is live: its tensors are the ones that train."""

    def __init__(self, size: Size, device: torch.device, steps: int) -> None:
        """`steps`: how many of pretraining come before its first snapshot."""
        torch.manual_seed(0)
        self.size, self.device, self.steps, self.step, self.lr = size, device, steps, 0, PEAK_LR
        text_bytes = TEXT_BYTES if size is FULL else TEXT_BYTES // 12
        self.tokens = read_tokens(size.vocabulary, text_bytes).to(device)
        self.model = GPT(size).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
        )
        self.loss = torch.zeros((), device=device)

    def train(self, steps: int, lr: float | None = None) -> None:
        """Train at a constant rate, or along pretraining's schedule, of which only the first half is trained.

        Never waits for the device.
        """
        for _ in range(steps):
            self.lr = lr or PEAK_LR * train_gpt.warmup_then_cosine(self.step / (2 * self.steps))
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            starts = torch.randint(len(self.tokens) - self.size.context, (self.size.batch, 1), device=self.device)
            windows = self.tokens[starts + torch.arange(self.size.context + 1, device=self.device)]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = self.model(windows[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.loss, self.step = loss.detach(), self.step + 1

    def state(self) -> State:
        """The live weights and moments."""
        named = [(name, weight) for name, weight in self.model.named_parameters()]
        moments = self.optimizer.state
        return {
            "p": {name: weight.detach() for name, weight in named},
            "m": {name: moments[weight]["exp_avg"] for name, weight in named},
            "v": {name: moments[weight]["exp_avg_sq"] for name, weight in named},
        }

    def snapshots(self, regime: str, say: Callable[[str], None]) -> dict[int, State]:
        """Train on in a regime; return copies of the state by the steps since the first copy: 0 and the gaps."""
        lead, lr = {
            "pretrain": (self.steps, None), "finetune": (SETTLE_STEPS, FINETUNE_LR), "bf16_rl": (SETTLE_STEPS, RL_LR),
        }[regime]  # fmt: skip
        found = {}
        for gap, steps in zip(
            (0, *GAPS), (lead, *(b - a for a, b in zip((0, *GAPS), GAPS, strict=False))), strict=True
        ):
            self.train(steps, lr)
            found[gap] = clone(self.state()) if regime != "bf16_rl" else weights_only(self.state())
            say(f"{regime}: step {self.step}, lr {self.lr:.2g}, loss {self.loss.item():.3f}")
        return found


def clone(state: State) -> State:
    """A copy on the same device."""
    return {kind: {name: tensor.clone() for name, tensor in group.items()} for kind, group in state.items()}


def weights_only(state: State) -> State:
    """The weights rounded to bf16: what inference sees."""
    return {"w": {name: weight.to(torch.bfloat16) for name, weight in state["p"].items()}}


def tensors(state: State) -> list[Tensor]:
    """All tensors, flat, in order."""
    return [tensor for group in state.values() for tensor in group.values()]


def nbytes(state: State) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors(state))


def same_bits(a: State, b: State) -> bool:
    """Whether every tensor is bit-equal."""
    whole = {4: torch.int32, 2: torch.int16}
    return all(
        torch.equal(x.view(whole[x.element_size()]), y.view(whole[y.element_size()]))
        for x, y in zip(tensors(a), tensors(b), strict=True)
    )
