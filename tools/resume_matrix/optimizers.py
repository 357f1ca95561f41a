"""The optimizers of the matrix: those of torch, and those of the other packages that are installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

Parameters = list[torch.nn.Parameter]
RATE = 1e-2
#: Options with which a class has the state that it is known for.
_OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "ASGD": {"t0": 3},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "pytorch_optimizer.bsam": {"num_data": 64},
    "pytorch_optimizer.kron": {"max_size_triangular": 64},
    "pytorch_optimizer.lbfgs": {"lr": 0.1, "max_iter": 3},
    "pytorch_optimizer.ranger21": {"num_iterations": 64},
}
#: Optimizers of pytorch-optimizer that get the matrices alone (a step of kron with a convolution takes seconds), and
#: those whose groups say which parameters are matrices.
_OF_MATRICES = ("kron", "spectralsphere")
_MUONS = ("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon")
_IMPLEMENTATIONS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
#: Package -> the function that lists its optimizers.
_PACKAGES: dict[str, Callable[[], Iterator[tuple[str, Callable[[Parameters], Any]]]]] = {}


class Optimizer(NamedTuple):
    """A row of the matrix: a name, such as "torch.AdamW fused", and the function that makes the optimizer."""

    name: str
    make: Callable[[Parameters], Any]


def packages() -> dict[str, bool]:
    """Return the packages of the matrix, and whether each is installed."""
    return {name: find_spec(name) is not None for name in _PACKAGES}


def chosen(patterns: list[str]) -> list[str]:
    """Return the names that match one of some patterns, of the packages that are installed: ["torch.* fused"]."""
    of_package = {
        package: [one for one in patterns if fnmatchcase(package, one.partition(".")[0])]
        for package, is_there in packages().items()
        if is_there
    }
    return [
        name
        for package, fitting in of_package.items()
        if fitting
        for name in _of_package(package)
        if any(fnmatchcase(name, pattern) for pattern in fitting)
    ]


def named(name: str) -> Optimizer:
    """Return the optimizer of a name."""
    return _of_package(name.partition(".")[0])[name]


@cache
def _of_package(package: str) -> dict[str, Optimizer]:
    return {f"{package}.{name}": Optimizer(f"{package}.{name}", make) for name, make in _PACKAGES[package]()}


def _of(package: str) -> Callable[[Any], Any]:
    def note(function: Any) -> Any:
        _PACKAGES[package] = function
        return function

    return note


def _classes(module: Any) -> Iterator[tuple[str, type]]:
    """Yield the optimizers that a module has, by name."""
    for name in sorted(dir(module)):
        kind = getattr(module, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield name, kind


def _called(kind: type, **options: Any) -> Callable[[Parameters], Any]:
    taken = inspect.signature(kind).parameters
    rate = {"lr": RATE} if "lr" in taken and "lr" not in options else {}
    return partial(kind, **rate, **options)


@_of("torch")
def _torch() -> Iterator[tuple[str, Callable[[Parameters], Any]]]:
    for name, kind in _classes(torch.optim):
        taken = inspect.signature(kind).parameters
        own = _OPTIONS.get(name, {})
        ways = {way: options for way, options in _IMPLEMENTATIONS.items() if options.keys() <= taken.keys()}
        for way, options in ways.items():
            yield f"{name} {way}", _called(kind, **own, **options)
        if not ways:
            yield name, _called(kind, **own)
    for way in ("for-loop", "foreach", "fused"):
        yield f"AdamW amsgrad {way}", _called(torch.optim.AdamW, amsgrad=True, **_IMPLEMENTATIONS[way])


@_of("transformers")
def _transformers() -> Iterator[tuple[str, Callable[[Parameters], Any]]]:
    kind = import_module("transformers.optimization").Adafactor
    yield "Adafactor", partial(kind, lr=RATE, relative_step=False, scale_parameter=False)
    yield "Adafactor momentum", partial(kind, lr=RATE, relative_step=False, beta1=0.9)
    yield "Adafactor relative_step", partial(kind, warmup_init=True)


@_of("torchao")
def _torchao() -> Iterator[tuple[str, Callable[[Parameters], Any]]]:
    module = import_module("torchao.optim")
    for name, kind in _classes(module):
        if not name.startswith("_"):
            yield name, _called(kind)
    yield "AdamW bf16_stochastic_round", _called(module._AdamW, bf16_stochastic_round=True)


@_of("schedulefree")
def _schedulefree() -> Iterator[tuple[str, Callable[[Parameters], Any]]]:
    module = import_module("schedulefree")
    for name, kind in _classes(module):
        if "Wrapper" not in name:
            yield name, _called(kind)
    for name in ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"):
        yield name, partial(_wrapped, getattr(module, name))


def _wrapped(kind: Any, parameters: Parameters) -> Any:
    return kind(torch.optim.SGD(parameters, RATE, momentum=0.9), momentum=0.9)


@_of("prodigyopt")
def _prodigyopt() -> Iterator[tuple[str, Callable[[Parameters], Any]]]:
    yield "Prodigy", import_module("prodigyopt").Prodigy


def _allow(name: str) -> None:
    """Allow the classes of a module, whose objects lie in states of optimizers; snapstore and torch.load ask for it."""
    module = import_module(name)
    kinds: list[Any] = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == name]
    torch.serialization.add_safe_globals(kinds)


@_of("galore_torch")
def _galore_torch() -> Iterator[tuple[str, Callable[[Parameters], Any]]]:
    _allow("galore_torch.galore_projector")
    for name, kind in _classes(import_module("galore_torch")):
        yield name, partial(_galore, kind)


def _galore(kind: Any, parameters: Parameters) -> Any:
    group = {"rank": 4, "update_proj_gap": 4, "scale": 0.25, "proj_type": "std"}
    matrices = [one for one in parameters if one.ndim == 2]
    others = [one for one in parameters if one.ndim != 2]
    own = {"relative_step": False, "scale_parameter": False} if "Adafactor" in kind.__name__ else {}
    return kind([{"params": others}, {"params": matrices, **group}], lr=RATE, **own)


@_of("pytorch_optimizer")
def _pytorch_optimizer() -> Iterator[tuple[str, Callable[[Parameters], Any]]]:
    module = import_module("pytorch_optimizer")
    for utility in ("galore", "graft", "preconditioner"):
        _allow(f"pytorch_optimizer.optimizer.utils.{utility}")
    for name in sorted(module.get_supported_optimizers()):
        yield name, partial(_loaded, module, name)


def _loaded(module: Any, name: str, parameters: Parameters) -> Any:
    kind, own = module.load_optimizer(name), _OPTIONS.get(f"pytorch_optimizer.{name}", {})
    matrices = [one for one in parameters if one.ndim == 2]
    groups: Any = parameters
    if name in _OF_MATRICES:
        groups = matrices
    elif name in _MUONS:
        others = [one for one in parameters if one.ndim != 2]
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    is_free = "prodigy" in name or "dadapt" in name  # they find their rate
    return kind(groups) if is_free else _called(kind, **own)(groups)
