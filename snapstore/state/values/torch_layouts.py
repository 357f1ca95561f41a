"""Tensors of torch itself that consist of several tensors: sparse, jagged and quantized ones.

In: such a tensor. Out: the dense tensors in it by name, and a context of plain values; and back, as composite.py needs
them. The tensors in it share its memory. Their number of elements may differ from save to save, so a restore makes a
new tensor and assigns it to that of the target as a whole.

Invariant: `make` checks what torch does not: stored indices or offsets never lead outside of the stored values.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import UnsupportedLeafError
from ...threads import imported
from .containers import expect
from .tensors import is_whole

if TYPE_CHECKING:
    import torch

Tensors = dict[str, Any]
LayoutContext = dict[str, Any]

#: The modules of torch.Tensor, torch.nn.Parameter and jagged tensors.
_MODULES = frozenset({"torch", "torch.nn.parameter", "torch.nested._internal.nested_tensor"})
#: The first tensor of offsets over a memory: jagged tensors that share the object have one ragged size.
_offsets: weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor] = weakref.WeakValueDictionary()


class TorchLayout:
    """A kind of tensors. Its name stands in the tree in the place of a class; see "Classes" in docs/format.md."""

    fixed: tuple[str, ...] = ("dtype",)  # keys of the context that a target must have too
    fixed_in_place: tuple[str, ...] = ()  # further ones, of a target that stays the object

    @staticmethod
    def flatten(value: Any) -> tuple[Tensors, LayoutContext]:
        """Return the tensors in a value, and what else there is to know of it."""
        raise NotImplementedError

    @staticmethod
    def make(inner: Tensors, context: LayoutContext, shape: Any) -> Any:
        """Return a tensor of stored tensors.

        Raises:
            Exception: They do not fit each other; torch raises errors of several kinds.
        """
        raise NotImplementedError

    @staticmethod
    def assign(target: Any, new: Any) -> None:
        """Give a tensor the values of another one of its shape, and its sparsity or scale."""
        target.copy_(new.to(target.device))


class SparseCoo(TorchLayout):
    """A sparse tensor of coordinates."""

    __module__, __qualname__ = "torch", "sparse_coo"

    @staticmethod
    def flatten(value: Any) -> tuple[Tensors, LayoutContext]:  # noqa: D102
        return {"indices": value._indices(), "values": value._values()}, {"is_coalesced": value.is_coalesced()}

    @staticmethod
    def make(inner: Tensors, context: LayoutContext, shape: Any) -> Any:  # noqa: D102
        import torch

        new = torch.sparse_coo_tensor(inner["indices"], inner["values"], shape, check_invariants=True)
        return new._coalesced_(expect(context["is_coalesced"], bool))  # whatever the order of the indices is


class _Compressed(TorchLayout):
    """A sparse tensor of compressed rows or columns: CSR, CSC, BSR, BSC."""

    __qualname__ = ""
    index: tuple[str, str] = ("", "")

    @classmethod
    def flatten(cls, value: Any) -> tuple[Tensors, LayoutContext]:
        return {name: getattr(value, name)() for name in (*cls.index, "values")}, {}

    @classmethod
    def make(cls, inner: Tensors, context: LayoutContext, shape: Any) -> Any:
        import torch

        rows, columns, values = (inner[name] for name in (*cls.index, "values"))
        layout = getattr(torch, cls.__qualname__)
        torch._validate_sparse_compressed_tensor_args(rows, _ascending(rows, columns), values, shape, layout)
        batches, along = rows.ndim - 1, cls.index[1] == "col_indices"
        block = values.shape[batches + 1 + along] if cls.__qualname__.startswith("sparse_bs") else 1
        if columns.numel() and not 0 <= int(columns.min()) <= int(columns.max()) < shape[batches + along] // block:
            raise ValueError("the indices lead outside of the shape")
        return torch.sparse_compressed_tensor(rows, columns, values, shape, layout=layout, check_invariants=False)

    @staticmethod
    def assign(target: Any, new: Any) -> None:
        target.resize_as_sparse_(new)  # it may have another number of elements
        target.copy_(new.to(target.device))


def _ascending(rows: Any, columns: Any) -> Any:
    """Return ascending indices in place of the columns of each row, which torch demands only if it checks them.

    Raises:
        ValueError: The rows do not end where the columns do.
    """
    import torch

    count, steps = columns.shape[-1], rows.diff()
    is_within = rows.shape[:-1] == columns.shape[:-1] and bool(((rows >= 0) & (rows <= count)).all())
    if not is_within or (steps < 0).any() or (rows[..., 0] != 0).any() or (rows[..., -1] != count).any():
        raise ValueError("the offsets of the rows do not fit the indices")
    starts = rows[..., :-1].flatten().repeat_interleave(steps.flatten()).reshape(columns.shape)
    return torch.arange(count, dtype=columns.dtype, device=columns.device) - starts.to(columns.dtype)


def _compressed(name: str, rows: str, columns: str) -> type[TorchLayout]:
    body = {"__module__": "torch", "__qualname__": name, "index": (f"{rows}_indices", f"{columns}_indices")}
    return type(name, (_Compressed,), body)


class Quantized(TorchLayout):
    """A tensor of integers with a scale and zero point, of the whole tensor or of each channel."""

    __module__, __qualname__ = "torch", "quantized"
    fixed = ("dtype", "scheme", "axis")
    integers: ClassVar = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}

    @classmethod
    def flatten(cls, value: Any) -> tuple[Tensors, LayoutContext]:  # noqa: D102
        import torch

        context = {"scheme": str(value.qscheme()).removeprefix("torch.")}
        inner = {"values": cls._integers(value)}
        if value.qscheme() is torch.per_tensor_affine:
            return inner, {**context, "scale": value.q_scale(), "zero_point": value.q_zero_point()}
        inner |= {"scales": value.q_per_channel_scales(), "zero_points": value.q_per_channel_zero_points()}
        return inner, {**context, "axis": value.q_per_channel_axis()}

    @classmethod
    def _integers(cls, value: Any) -> Any:
        """Return the integers of a quantized tensor, in its memory.

        Raises:
            UnsupportedLeafError: Its storage is too short: torch would make it longer.
        """
        import torch

        if not is_whole(value):
            raise UnsupportedLeafError("tensor whose storage was freed, or cut short, has no stored form")
        dtype = getattr(torch, cls.integers[str(value.dtype).removeprefix("torch.")])
        empty = torch.empty(0, dtype=dtype, device=value.device)
        return empty.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    @classmethod
    def make(cls, inner: Tensors, context: LayoutContext, shape: Any) -> Any:  # noqa: D102
        import torch

        values, dtype, scheme = inner["values"], context["dtype"], context["scheme"]
        form = {"dtype": dtype, "device": values.device}
        if scheme == "per_tensor_affine":
            scale, zero_point = expect(context["scale"], float), expect(context["zero_point"], int)
            new = torch._empty_affine_quantized(shape, scale=scale, zero_point=zero_point, **form)
        else:
            axis, scales, zero_points = expect(context["axis"], int), inner["scales"], inner["zero_points"]
            if not 0 <= axis < len(shape) or not (shape[axis],) == scales.shape == zero_points.shape:
                raise ValueError("the scales and zero points do not fit the shape")
            new = torch._empty_per_channel_affine_quantized(
                shape, scales=scales, zero_points=zero_points, axis=axis, **form
            )
        if (values.shape, values.dtype) != (shape, cls._integers(new).dtype) or str(new.qscheme()) != f"torch.{scheme}":
            raise ValueError("the integers have another shape, dtype or scheme")
        values = values.clone()  # in its layout
        return new.set_(values.untyped_storage(), values.storage_offset(), shape, values.stride())


class Jagged(TorchLayout):
    """A nested tensor of rows of different lengths. Its ragged size is -1 in the stored shape."""

    __module__, __qualname__ = "torch", "jagged"
    fixed = ("dtype", "ragged")
    fixed_in_place = ("sizes",)

    @staticmethod
    def flatten(value: Any) -> tuple[Tensors, LayoutContext]:  # noqa: D102
        found = {"values": value._values.detach(), "offsets": value._offsets, "lengths": value._lengths}
        inner = {name: one for name, one in found.items() if one is not None}
        return inner, {"ragged": value._ragged_idx, "sizes": [list(one.shape) for one in inner.values()]}

    @staticmethod
    def make(inner: Tensors, context: LayoutContext, shape: Any) -> Any:  # noqa: D102
        import torch

        values, offsets, lengths, ragged = inner["values"], inner["offsets"], inner.get("lengths"), context["ragged"]
        sizes = list(values.shape)
        is_list = offsets.ndim == 1 and len(offsets) > 0 and offsets.dtype in (torch.int64, torch.int32)
        if not is_list or not 1 <= expect(ragged, int) <= len(sizes):
            raise ValueError("the offsets do not fit the values")
        ends = offsets[1:] if lengths is None else offsets[:-1] + lengths
        rows = torch.stack([offsets[:-1], ends])  # of another shape than the offsets: torch raises
        if len(ends) and not (
            int(rows.min()) >= 0 and int(rows.max()) <= sizes[ragged - 1] and (rows[0] <= ends).all()
        ):
            raise ValueError("the offsets lead outside of the values")
        sizes[ragged - 1] = -1
        if [len(ends), *sizes] != list(shape):
            raise ValueError("the values have another shape")
        key = (offsets.device, offsets.data_ptr(), offsets.dtype, len(offsets))
        offsets = _offsets.setdefault(key, offsets) if lengths is None else offsets
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)

    @classmethod
    def assign(cls, target: Any, new: Any) -> None:  # noqa: D102
        here, there = cls.flatten(target)[0], cls.flatten(new)[0]
        for name, one in here.items():
            one.copy_(there[name])
        target._metadata_cache.clear()  # the longest and shortest row, as they were


LAYOUTS: dict[str, type[TorchLayout]] = {
    kind.__qualname__: kind
    for kind in (
        SparseCoo,
        _compressed("sparse_csr", "crow", "col"),
        _compressed("sparse_csc", "ccol", "row"),
        _compressed("sparse_bsr", "crow", "col"),
        _compressed("sparse_bsc", "ccol", "row"),
        Quantized,
        Jagged,
    )
}


def layout_of(value: Any) -> type[TorchLayout] | None:
    """Return the kind of a sparse, jagged or quantized tensor of torch; None for any other value. It is fast."""
    if type(value).__module__ not in _MODULES:
        return None
    torch: Any = imported("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    if value.is_quantized:
        return Quantized if str(value.dtype).removeprefix("torch.") in Quantized.integers else None
    return None if value.layout is torch.strided else LAYOUTS.get(str(value.layout).removeprefix("torch."))


def is_layout(kind: Any) -> bool:
    """Return whether a class is a kind of `LAYOUTS`."""
    return isinstance(kind, type) and issubclass(kind, TorchLayout)


def flatten(value: Any) -> tuple[Tensors, LayoutContext, Any]:
    """Return the tensors in a value that `layout_of` knows, its context, and its shape."""
    import torch

    kind: Any = layout_of(value)
    inner, context = kind.flatten(value.detach())
    grad = {"requires_grad": value.requires_grad, "parameter": isinstance(value, torch.nn.Parameter)}
    shape = torch.Size(size if type(size) is int else -1 for size in value.shape)
    return inner, {"dtype": value.dtype, **context, **grad}, shape


def make(kind: type[TorchLayout], inner: Tensors, context: LayoutContext, shape: Any) -> Any:
    """Return a tensor of stored tensors and a context, which may come from a store.

    Raises:
        Exception: They are not those of such a tensor.
    """
    import torch

    new = kind.make(inner, expect(context, dict), shape)
    if new.dtype is not context["dtype"]:
        raise TypeError(f"its values have the dtype {new.dtype}, stored is {context['dtype']}")
    grad = expect(context["requires_grad"], bool)
    return torch.nn.Parameter(new, grad) if expect(context["parameter"], bool) else new.requires_grad_(grad)


def misfit(stored: LayoutContext, present: Any, *, in_place: bool) -> str | None:
    """Return why a tensor cannot get the values of a stored one of its kind and shape, or None if it can."""
    kind: Any = layout_of(present)
    _, context, _ = flatten(present)
    for key in kind.fixed + (kind.fixed_in_place if in_place else ()):
        here, there = context.get(key), stored.get(key) if type(stored) is dict else None
        if type(here) is not type(there) or here != there:
            return f"{key}: expected {here} as in the target, got {there}"
    return None


def assign(target: Any, new: Any) -> None:
    """Give a tensor of the target the values of a restored one; it stays the object."""
    import torch

    kind: Any = layout_of(target)
    with torch.no_grad():
        kind.assign(target, new)
