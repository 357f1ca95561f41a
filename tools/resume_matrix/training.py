"""The model of the matrix, its layouts, and the training loop.

The model has parameters with 1 to 4 dimensions. Each with more than one has at least 4,096 elements: torchao keeps the
moments of smaller ones in float32. All data is a function of the step, so a resumed run gets the batches of the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from .optimizers import Optimizer

#: Steps before the save, and after it. Some optimizers work at every tenth step: one of those comes after the save.
STEPS, MORE = 5, 6
BATCH, SHAPE = 4, (16, 4, 4)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
#: Optimizers that differentiate the gradients.
_SECOND_ORDER = ("AdaHessian", "SophiaH")
LAYOUTS = ("contiguous", "channels_last", "transposed", "permuted")


class Case(NamedTuple):
    """An optimizer, a layout and a dtype: the rows of the matrix that share a training."""

    optimizer: str
    layout: str
    dtype: str


class Run(NamedTuple):
    """The result of steps of a training, to compare bit for bit."""

    losses: list[float]
    parameters: str


class Net(torch.nn.Module):
    """A convolution, four matrices in one parameter, and a linear layer; `forward` also notes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.experts = torch.nn.Parameter(torch.randn(4, 32, 32) * 0.2)
        self.head = torch.nn.Linear(128, 32)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch of shape (count, 16, 4, 4), as the Trainer wants it."""
        by_expert = torch.tanh(self.conv(x.to(self.experts.dtype))).reshape(-1, 32, 4, 4)
        mixed = torch.tanh(torch.einsum("bceg,eco->bego", by_expert, self.experts)).mean(2)
        loss = (self.head(mixed.flatten(1)) - 1).square().mean()
        self.losses.append(loss.item())
        return {"loss": loss}


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A batch for each step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn((STEPS + MORE) * BATCH, *SHAPE, generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.rows[index]}


def build(case: Case, optimizer: Optimizer, device: str) -> tuple[Net, Any]:
    """Return the model and its optimizer before the first step, always with the same values.

    An optimizer for matrices alone gets the parameters with two dimensions.
    """
    torch.manual_seed(0)
    model = Net().to(device, DTYPES[case.dtype])
    lay_out(model, case.layout)
    parameters = list(model.parameters())
    try:
        made = optimizer.make(parameters)
    except (ValueError, AssertionError, IndexError):
        made = optimizer.make([one for one in parameters if one.ndim == 2])
    if callable(getattr(made, "train", None)):
        made.train()
    return model, made


def lay_out(model: Net, layout: str) -> None:
    """Give one parameter another order of its elements in memory."""
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    elif layout == "transposed":
        model.head.weight.data = model.head.weight.data.t().contiguous().t()
    elif layout == "permuted":
        model.experts.data = model.experts.data.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def train(model: Net, optimizer: Any, first: int, count: int) -> Run:
    """Train for some steps of the plain loop, and return the result."""
    device, rows, needs_graph = model.experts.device, Data().rows, type(optimizer).__name__ in _SECOND_ORDER
    del model.losses[:]
    for step in range(first, first + count):
        seed(step)
        batch = rows[step * BATCH : (step + 1) * BATCH].to(device)

        def closure(batch: torch.Tensor = batch) -> Any:
            optimizer.zero_grad()
            loss = model(batch)["loss"]
            loss.backward(create_graph=needs_graph)
            return loss

        if _needs_closure(optimizer):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return result(model)


def _needs_closure(optimizer: Any) -> bool:
    name = type(getattr(optimizer, "optimizer", optimizer)).__name__  # of the optimizer that Accelerate has wrapped
    return "LBFGS" in name or "Closure" in name or name == "BSAM"


def result(model: Net) -> Run:
    """Return the losses that a model has noted, and a digest of its parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        logical = parameter.detach().cpu().contiguous()
        digest.update(logical.reshape(-1).view(torch.uint8).numpy().tobytes())
    return Run(list(model.losses), digest.hexdigest())


def seed(number: int) -> None:
    """Seed every generator from which an optimizer may draw."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in this block after some seconds; only for the main thread of a process."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
