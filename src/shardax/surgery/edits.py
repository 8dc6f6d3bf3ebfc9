# SPDX-License-Identifier: Apache-2.0
"""Wrappers in the places of selected layers.

Layers of a ``nn.Stack`` are edited all at once: what is saved of them, and their adapters, have a
leading dimension of layers.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Dict, Init, Module, Param, Rngs, Selection, Variable, jvp, merge, select, split
from shardax.errors import SelectionError
from shardax.extend import (
    ModuleWrapper,
    Path,
    PyTree,
    align,
    explicit_sharding,
    format_path,
    raise_if_any,
    with_layout,
)
from shardax.named.array import NamedArray
from shardax.named.base import from_parts
from shardax.named.functions import dot
from shardax.named.layers import Linear as NamedLinear
from shardax.nn.arithmetic import (
    as_array,
    at_least_float32,
    cast_all,
    contract,
    einsum,
    take_features,
)
from shardax.nn.conv import ConvBase
from shardax.nn.einsum import Einsum, Equation
from shardax.nn.embedding import Embed, look_up
from shardax.nn.linear import Linear
from shardax.nn.moe import MoE
from shardax.nn.parameters import Initializer, as_size, lecun_normal, zeros
from shardax.nn.quantization import QuantizedKernel

Adaptable = Linear | Einsum | ConvBase | MoE | Embed | NamedLinear


class LayerWrapper(ModuleWrapper):
    """Base of wrappers around a layer or a function."""

    def __init__(self, layer: Callable[..., PyTree]) -> None:
        Module.__init__(self)
        self.body = layer


class TransparentWrapper(LayerWrapper):
    """Base of wrappers that leave a layer's path in recordings and patches as it is."""


def wrap_selected(edit: str, selection: Selection, wrap: Callable[[Path, Any], Any]) -> PyTree:
    """Replaces the selection by a function of path and value."""
    wrappers: list[Any] = []
    for path, value in checked_selection(edit, selection).get_by_path().items():
        if not callable(value) or isinstance(value, (type, Variable)):
            raise SelectionError(
                f"{edit} wraps what a model calls, and {format_path(path)} is {value!r}. Select "
                f"layers or functions: sx.select(model).at_instances_of(sx.nn.Linear)."
            )
        wrappers.append(wrap(path, value))
    return selection.set_all(wrappers)


def checked_selection(edit: str, selection: Any) -> Selection:
    """Returns a selection; raises if it is none."""
    if isinstance(selection, Selection):
        return selection
    raise SelectionError(
        f"{edit} takes a selection, and not a {type(selection).__name__}. Select first what to "
        f"edit: sx.select(model).at_instances_of(sx.nn.Linear)."
    )


# --- saved activations ---


class SavedActivation(LayerWrapper):
    """A layer with a saved result; made by ``save_activations``.

    Args:
        layer: A Module, or a function.

    Attributes:
        body: The layer.
        activation: ``Intermediate`` with the tuple of results, one for each call; there is none
            before the first.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.surgery.SavedActivation(jnp.sin)
        >>> y = layer(jnp.ones(2))
        >>> layer.activation.value[0] is y
        True
    """

    _own = frozenset({"body", "activation"})

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the layer and saves its result."""
        result = self.body(*args, **kwargs)
        self.sow("activation", result)
        return result


def save_activations(selection: Selection) -> PyTree:
    """Makes selected layers save their results.

    Args:
        selection: Layers, or functions that a model calls, such as the softmax of attention.

    Returns:
        The model with a ``SavedActivation`` around each; weights are shared. After a call,
        ``sx.pop(model, sx.Intermediate)`` returns the activations by path and removes them: each
        a tuple with the result of every call since.

    Raises:
        SelectionError: If something selected is not called, or if nothing is selected.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> watched = sx.surgery.save_activations(sx.select(model).at(lambda mlp: mlp.up))
        >>> x = jnp.ones((1, 2))
        >>> _ = watched(x)
        >>> (up,) = sx.pop(watched, sx.Intermediate)["up"]["activation"]
        >>> bool((up == model.up(x)).all())
        True
    """
    return wrap_selected("save_activations", selection, lambda _, layer: SavedActivation(layer))


# --- low-rank adapters ---


class LoRA(LayerWrapper):
    """A layer plus a low-rank term for each kernel; made by ``lora``.

    With sizes it is around any layer, or alone: the term is then of the input's last dimension, and
    knows of no kernel.

    The term is ``scale * (x @ a @ b)``: the kernel's dimensions are split into those that are
    summed over, which ``a`` has, and those that are made, which ``b`` has; in a convolution ``a``
    has the window. Experts have a term each. LoRA is from Hu et al., arXiv:2106.09685.

    Args:
        layer: A ``Linear`` (also of ``sx.named``), ``Einsum``, convolution, ``MoE`` or ``Embed``,
            also one of a stack. With sizes any Module that is called with an array first, or None.
        rank: Size of the dimension between ``a`` and ``b``.
        scale: Factor of the term.
        in_features: Size of the last dimension of the input; None for the layer's kernel to say.
        out_features: Likewise of the result.
        param_dtype: Dtype of ``a`` and ``b`` where sizes are given; otherwise that of the kernel.
        rngs: Random streams; ``params`` is used.

    Attributes:
        body: The layer, or None.
        a: ``Param`` with the tag ``"lora"``: drawn with variance 1 / fan-in. Of a ``MoE`` a
            ``Dict`` with one for each of ``gate``, ``up`` and ``down``.
        b: Likewise, zeros. Of an ``Embed`` ``a`` is zeros, and ``b`` is drawn.
        scale: Factor of the term.

    Raises:
        SelectionError: If a low-rank term of the layer's kernel is not known.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.surgery.LoRA(sx.nn.Linear(8, (4, 2), rngs=sx.Rngs(0)), 3, rngs=sx.Rngs(1))
        >>> layer.a.shape, layer.b.shape, layer(jnp.ones((5, 8))).shape
        ((8, 3), (3, 4, 2), (5, 4, 2))
        >>> alone = sx.surgery.LoRA(None, 3, in_features=8, out_features=4, rngs=sx.Rngs(1))
        >>> alone(jnp.ones((5, 8))).shape
        (5, 4)
    """

    _own = frozenset({"body", "a", "b", "scale", "sizes"})
    sizes: tuple[int, int] | None = None  # set only where given

    def __init__(
        self,
        layer: Any,
        rank: int,
        scale: float = 1.0,
        *,
        in_features: int | None = None,
        out_features: int | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        rngs: Rngs | None = None,
    ) -> None:
        rngs, rank = rngs or Rngs(0), as_size("LoRA", "rank", rank)
        if in_features is not None or out_features is not None:
            _check_callable(layer)
            super().__init__(layer)
            inputs = as_size("LoRA", "in_features", in_features)
            outputs = as_size("LoRA", "out_features", out_features)
            self.sizes, self.scale = (inputs, outputs), float(scale)
            init = Init(lecun_normal((0,), (1,)), (inputs, rank), param_dtype, rngs=rngs)
            self.a = Param(init, axes=("in", None), tag="lora")
            init = Init(zeros, (rank, outputs), param_dtype)
            self.b = Param(init, axes=(None, "out"), tag="lora")
            return
        _refuse_unknown(layer, type(layer).__name__)
        super().__init__(layer)
        pairs = {name: self._pair(name, rank, rngs) for name in kernels_of(layer)}
        self.a: Any
        self.b: Any
        if isinstance(layer, MoE):  # several kernels, and a pair for each
            self.a = Dict({name: a for name, (a, _) in pairs.items()})
            self.b = Dict({name: b for name, (_, b) in pairs.items()})
        else:
            ((self.a, self.b),) = pairs.values()
        self.scale = float(scale)

    def _pair(self, name: str, rank: int, rngs: Rngs) -> tuple[Param, Param]:
        """Makes ``a`` and ``b`` of a kernel."""
        kernel, terms = getattr(self.body, name), LinearTerms.of(self.body)
        lead = kernel.ndim - len(terms.whole.kernel)  # dimensions of stacks
        sizes = dict(zip(terms.whole.kernel, kernel.shape[lead:], strict=True))
        names = dict(zip(terms.whole.kernel, (kernel.axes or ())[lead:], strict=False))

        def make(letters: str, initializer: Initializer) -> Param:
            shape = (*kernel.shape[:lead], *(sizes.get(letter, rank) for letter in letters))
            axes = (*(kernel.axes or (None,) * lead)[:lead], *map(names.get, letters))
            init = Init(initializer, shape, kernel.dtype, rngs=rngs)
            return Param(init, axes=axes, tag="lora")

        def drawn(equation: Equation) -> Initializer:
            dimensions = equation.kernel_dimensions()
            summed, made, batch = (tuple(lead + place for place in each) for each in dimensions)
            return lecun_normal(summed, made, (*range(lead), *batch))

        # A row of a table is looked up, not summed over: drawn, it would hardly count.
        looked_up = isinstance(self.body, Embed)
        a = make(terms.first.kernel, zeros if looked_up else drawn(terms.first))
        return a, make(terms.second.kernel, drawn(terms.second) if looked_up else zeros)

    def __call__(self, x: Any, *args: PyTree, **options: Any) -> PyTree:
        """Maps an input as the layer does, and adds the term.

        Args:
            x: The input of the layer.
            *args: For a layer around which it is by sizes.
            **options: What the layer takes by name, such as ``mask`` and ``out_sharding``.

        Returns:
            What the layer returns, plus the term.
        """
        if self.sizes is None:
            return self._adapted(x, *args, **options)
        inputs = take_features("LoRA", x, self.sizes[:1], "in_features")
        inputs, a, b = cast_all(None, inputs, self.a.value, self.b.value)
        term = self.scale * contract(contract(inputs, a, (0,)), b, (0,))
        if self.body is None:
            return term
        y = as_array(self.body(x, *args, **options))
        return y + align(term.astype(y.dtype), y)

    def _adapted(self, x, *, mask=None, out_sharding=None):
        """Adds the term of a known kernel."""
        if isinstance(self.body, NamedLinear):
            y = self.body(x)
            return y + (self.scale * self._named_term(x)).astype(y.dtype)
        if isinstance(self.body, MoE):
            pairs = {name: (self.a[name].value, self.b[name].value) for name in self.a}
            return self.body.call_adapted(x, mask, out_sharding, pairs, self.scale)
        options = {} if mask is None else {"mask": mask}
        y, x = self.body(x, out_sharding=out_sharding, **options), as_array(x)
        if isinstance(self.body, Embed):
            a, b = cast_all(self.body.dtype, self.a.value, self.b.value)
            term = contract(look_up(a, x), b, (0,), explicit_sharding(y))
            return y + (self.scale * term).astype(y.dtype)
        if isinstance(self.body, ConvBase):
            return y + (self.scale * self._convolved(x, y)).astype(y.dtype)
        terms = LinearTerms.of(self.body)
        x = terms.whole.expanded(x)
        extra = x.ndim - len(terms.whole.input)
        x, a, b = cast_all(self.body.dtype, x, self.a.value, self.b.value)
        middle = einsum(terms.first.spelled_out(extra), x, a)
        term = einsum(terms.second.spelled_out(extra), middle, b, out_sharding)
        return y + (self.scale * term).astype(y.dtype)

    def _named_term(self, x: NamedArray) -> NamedArray:
        """Multiplies a named array by ``a`` and ``b``, by names."""
        layer, rank = self.body, ("lora", "rank")
        batch, inputs, made = layer.batch_axes.names, layer.input_axes.names, layer.output_names()
        data, a, b = cast_all(layer.dtype, x.data, self.a.value, self.b.value)
        a = from_parts(NamedArray, a, (*batch, *inputs, rank))
        b = from_parts(NamedArray, b, (*batch, rank, *made.values()))
        term = dot(dot(from_parts(NamedArray, data, x.dims), a, inputs), b, (rank,))
        return term.rename({new: name for name, new in made.items() if new != name})

    def _convolved(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Convolves with ``a``, in each group, and mixes the channels with ``b``."""
        groups = self.body.groups
        middle = self.body.convolve(x, jnp.tile(self.a.value, groups), None)

        def mix(middle: jax.Array, b: jax.Array) -> jax.Array:
            parts = middle.reshape(*middle.shape[:-1], groups, -1)
            mixed = jnp.einsum("...gr,rgo->...go", parts, b.reshape(len(b), groups, -1))
            return mixed.reshape(y.shape)

        return with_layout(mix, explicit_sharding(y), *cast_all(None, middle, self.b.value))

    def attend(self, x: Any, *, out_sharding: Any = None) -> jax.Array:
        """Multiplies by the transposed table of an ``Embed``, and adds the term."""
        y = self.body.attend(x, out_sharding=out_sharding)
        x, a, b = cast_all(self.body.dtype, as_array(x), self.a.value, self.b.value)
        term = contract(contract(x, b, (1,), None), a, (1,), out_sharding)
        return y + (self.scale * term).astype(y.dtype)

    def merged(self) -> Any:
        """Returns the layer with the terms added to its kernels."""
        layer = self.body
        if self.sizes is not None and layer is not None:
            raise SelectionError(
                f"A LoRA with sizes is around a {type(layer).__name__}, and does not know to which "
                f"kernel its term belongs. Keep it, or adapt the layers inside: "
                f"sx.surgery.lora(sx.select(model), rank=2)."
            )
        if self.sizes is not None:
            layer = Linear(*self.sizes, use_bias=False, param_dtype=self.a.dtype, rngs=Rngs(0))
            a, b = (v.value.astype(at_least_float32(v.dtype)) for v in (self.a, self.b))
            layer.kernel.value = (self.scale * contract(a, b, (0,))).astype(self.a.dtype)
            return layer
        for name in kernels_of(layer):
            several = isinstance(self.body, MoE)
            a, b = (self.a[name], self.b[name]) if several else (self.a, self.b)
            total = self._sum(getattr(self.body, name), a, b)
            layer = select(layer).at_keypaths((name,)).set(total)
        return layer

    def _sum(self, kernel, a, b):
        """Returns a kernel with its term added."""
        terms = LinearTerms.of(self.body)
        parts = (terms.first.kernel, terms.second.kernel, terms.whole.kernel)
        lead = _unused("".join(parts))[: kernel.ndim - len(terms.whole.kernel)]
        inner, outer, whole = (lead + letters for letters in parts)
        dtype = at_least_float32(kernel.dtype)
        a, b = a.value.astype(dtype), b.value.astype(dtype)
        term = align(einsum(f"{inner},{outer}->{whole}", a, b), kernel.value)
        total = (kernel.value.astype(dtype) + self.scale * term).astype(kernel.dtype)
        return kernel.replace(total)


def _check_callable(layer: object) -> None:
    """Raises for what LoRA cannot be around, with sizes."""
    if layer is not None and (not isinstance(layer, Module) or not callable(layer)):
        raise SelectionError(
            f"A LoRA with sizes is around a Module that is called, or alone, but was given "
            f"{layer!r}. Alone it is sx.surgery.LoRA(None, 2, in_features=8, out_features=4)."
        )


def _refuse_unknown(layer: object, where: str) -> None:
    """Raises if the low-rank term of a layer's kernel is not known."""
    if not isinstance(layer, Adaptable):
        raise SelectionError(
            f"{where} has no kernel that LoRA knows. Give the sizes of its input and result: "
            f"sx.surgery.LoRA(layer, 2, in_features=8, out_features=4)."
        )
    if isinstance(layer, ConvBase) and layer.mask is not None:
        raise SelectionError(
            f"{where} is a {type(layer).__name__} with a mask of its kernel, and the sum of two "
            f"masked kernels has no low rank. Leave it out: selection.where(...)."
        )
    # The term is added to what the base computes: such a layer would not equal its merged one.
    own = [name for name in ("__call__", "attend") if _is_own(type(layer), name)]
    if own:
        raise SelectionError(
            f"{where} is a {type(layer).__name__}, whose {own[0]} is its own, so shardax does not "
            f"know what a low-rank term of its kernel adds. Make it a Module that calls the layer, "
            f"or leave it out: selection.where(...)."
        )


def _is_own(cls: type, name: str) -> bool:
    """Whether a method is defined outside shardax's layers."""
    definer = next((each for each in cls.__mro__ if name in vars(each)), None)
    ours = ("shardax.nn.", "shardax.named.")
    return definer is not None and not definer.__module__.startswith(ours)


def kernels_of(layer: object) -> tuple[str, ...]:
    """Names of the adapted kernels of a layer."""
    if isinstance(layer, MoE):
        return ("gate", "up", "down")
    return ("embedding",) if isinstance(layer, Embed) else ("kernel",)


class LinearTerms(NamedTuple):
    """Equations of a linear layer and of its low-rank term."""

    whole: Equation
    first: Equation  # with ``a``
    second: Equation  # with ``b``
    sizes: tuple[int, ...]  # of the kernel of one layer, where they are known

    @classmethod
    def of(cls, layer: Adaptable) -> Self:
        sizes: tuple[int, ...] = ()
        if isinstance(layer, Einsum):
            whole = layer.equation
        elif isinstance(layer, MoE):
            whole = Equation("etd", "edh", "eth", ellipsis=False)
            count, features = map(_as_tuple, (layer.router.out_features, layer.router.in_features))
            sizes = (*count, *features, layer.gate.shape[-1])
        elif isinstance(layer, NamedLinear):
            parts = (layer.batch_axes, layer.input_axes, layer.output_axes)
            sizes = tuple(size for axes in parts for size in axes.sizes)
            letters, count = string.ascii_letters[: len(sizes)], len(layer.batch_axes.names)
            end = count + len(layer.input_axes.names)
            output = letters[:count] + letters[end:]
            whole = Equation(letters[:end], letters, output, ellipsis=False)
        elif isinstance(layer, Embed):  # a product of one-hot vectors
            whole = Equation("v", "vf", "f", ellipsis=True)
            sizes = (layer.num_embeddings, layer.features)
        elif isinstance(layer, ConvBase):  # a product of the input's windows
            letters = string.ascii_letters[: len(layer.kernel_size) + 2]
            whole = Equation(letters[:-1], letters, letters[-1], ellipsis=True)
            sizes = (*layer.kernel_size, layer.in_features // layer.groups, layer.out_features)
        else:
            inputs, outputs = map(_as_tuple, (layer.in_features, layer.out_features))
            sizes = (*inputs, *outputs)
            letters, count = string.ascii_letters[: len(sizes)], len(inputs)
            whole = Equation(letters[:count], letters, letters[count:], ellipsis=True)
        summed, made, batch = (
            "".join(whole.kernel[place] for place in places) for places in whole.kernel_dimensions()
        )
        rank = _unused(whole.input + whole.kernel)[0]
        middle = "".join(letter for letter in whole.input if letter not in summed) + rank
        inputs = whole.ellipsis, whole.input_place
        first = Equation(whole.input, batch + summed + rank, middle, *inputs)
        outputs = whole.ellipsis, 0, whole.output_place
        second = Equation(middle, batch + rank + made, whole.output, *outputs)
        return cls(whole, first, second, sizes)


def _as_tuple(sizes) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)


def _unused(letters: str) -> str:
    return "".join(letter for letter in string.ascii_letters if letter not in letters)


def lora(
    selection: Selection, rank: int, scale: float = 1.0, *, rngs: Rngs | None = None
) -> PyTree:
    """Adds low-rank adapters to linear layers.

    Args:
        selection: What holds the layers: each ``Linear`` (also of ``sx.named``), ``Einsum``,
            convolution and ``MoE`` in it is adapted, with kernels of any rank, and those of a
            ``Stack``, with an adapter for each of its layers. Of a ``MoE`` those are the kernels of
            the experts; its router stays as it is unless it is selected itself, and so does an
            ``Embed``.
        rank: Rank of the adapters.
        scale: Factor of what they add.
        rngs: Random streams; ``params`` is used. None: ``Rngs(0)``.

    Returns:
        The model with a ``LoRA`` around each layer; weights are shared. The adapters have the tag
        ``"lora"``, which is a filter: ``sx.grad(loss, wrt="lora")``. They have the axis names of
        their kernels; ``sx.shard`` lays them out.

    Raises:
        SelectionError: If a layer has an adapter already, or is of a subclass with a call of its
            own, or if there is no such layer.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> model = sx.nn.MLP(8, 16, rngs=sx.Rngs(0))
        >>> adapted = sx.surgery.lora(sx.select(model).at(lambda mlp: (mlp.up, mlp.down)), rank=2)
        >>> sorted(path[0] for path in sx.state(adapted, "lora").flat())
        ['down', 'down', 'up', 'up']
        >>> x = jnp.ones((1, 8))
        >>> bool((adapted(x) == model(x)).all())
        True
    """
    given = checked_selection("lora", selection)
    named = set(given.get_by_path())
    linears = given.at_instances_of(Adaptable).where(
        lambda path, layer: path in named or not isinstance(layer, Embed)
    )
    adapted = {id(each.body) for each in select(selection.tree).at_instances_of(LoRA).get_all()}
    streams = rngs or Rngs(0)

    def adapt(path: Path, layer) -> LoRA:
        _refuse_unknown(layer, format_path(path))
        if id(layer) in adapted:
            raise SelectionError(
                f"{format_path(path[:-1])} has an adapter already. Merge it first, "
                f"sx.surgery.merge_lora(model), or leave the layer out: selection.where(...)."
            )
        expected, kernel = LinearTerms.of(layer).sizes, getattr(layer, kernels_of(layer)[0])
        if expected and kernel.shape[-len(expected) :] != expected:
            raise SelectionError(
                f"{format_path(path)} has a kernel of shape {kernel.shape}, which does not "
                f"end with {expected}: its layers were mapped over another axis than the first. "
                f"Map them with out_axes=0, or adapt a layer before it is mapped."
            )
        return LoRA(layer, rank, scale, rngs=streams)

    return wrap_selected("lora", linears, adapt)


def merge_lora(model: object) -> PyTree:
    """Adds every low-rank adapter to its kernel.

    Args:
        model: A model with adapters.

    Returns:
        The model of the original structure, with new kernels where there were adapters.

    Raises:
        SelectionError: If there are none, or of a quantized kernel.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> model = sx.nn.MLP(8, 16, rngs=sx.Rngs(0))
        >>> adapted = sx.surgery.lora(sx.select(model), rank=2)
        >>> sx.graphdef(sx.surgery.merge_lora(adapted)) == sx.graphdef(model)
        True
    """
    adapters = select(model).at_instances_of(LoRA)
    problems = [
        format_path(path)
        for path, adapter in adapters.get_by_path().items()
        if adapter.sizes is None
        for name in kernels_of(adapter.body)
        if isinstance(getattr(adapter.body, name), QuantizedKernel)
    ]
    raise_if_any(
        SelectionError,
        list(dict.fromkeys(problems)),
        "merge_lora adds to kernels, and would round these again: ",
        ". Make them parameters first: sx.surgery.merge_lora(sx.dequantize(model)).",
    )
    return adapters.apply(lambda adapter: adapter.merged())


# --- linear approximations ---


class Linearised(LayerWrapper):
    """The linear approximation of a layer around an input; made by ``linearise``.

    That is ``f(point) + f'(point) (x - point)``; further arguments are given to the layer as they
    are.

    Args:
        layer: A Module, or a function.
        point: The input to approximate around, an array or a pytree of arrays.

    Attributes:
        body: The layer.
        point: ``Variable`` with the input.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> square = sx.surgery.Linearised(jnp.square, jnp.float32(3))
        >>> float(square(jnp.float32(5)))  # 9 + 6 * (5 - 3)
        21.0
    """

    _own = frozenset({"body", "point"})

    def __init__(self, layer: Callable[..., PyTree], point: object) -> None:
        super().__init__(layer)
        self.point = Variable(point)

    def __call__(self, x: Any, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Approximates the layer at an input; the point is broadcast."""
        point = jax.tree.map(lambda old, new: jnp.broadcast_to(old, new.shape), self.point.value, x)
        moved = jax.tree.map(jnp.subtract, x, point)
        result, change = jvp(lambda x: self.body(x, *args, **kwargs), (point,), (moved,))
        return jax.tree.map(jnp.add, result, change)


class _Recorder(LayerWrapper):
    """A layer with a saved first argument."""

    _own = frozenset({"body", "inputs"})

    def __call__(self, x: object, *args: object, **kwargs: object) -> PyTree:
        self.sow("inputs", x)
        return self.body(x, *args, **kwargs)


def linearise(selection: Selection, *args: PyTree, **kwargs: PyTree) -> Any:
    """Replaces selected layers by linear approximations around the inputs of one call.

    So a later call on other inputs keeps, for example, the scales of the norms, and effects of
    changes add up.

    Args:
        selection: Layers, or functions that a model calls, each called once.
        *args: Arguments of the call of the whole model, which is run on a copy.
        **kwargs: Likewise.

    Returns:
        The model with a ``Linearised`` around each; weights are shared.

    Raises:
        SelectionError: If something selected is not called, or more than once, or if its first
            argument is not of floats, or if nothing is selected.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> model = sx.nn.Sequential(jnp.square, sx.nn.Linear(2, 1, rngs=sx.Rngs(0)))
        >>> squares = sx.select(model).at(lambda model: model.layers[0])
        >>> linear = sx.surgery.linearise(squares, jnp.array([1.0, 2.0]))
        >>> linear.layers[0](jnp.array([3.0, 2.0])).tolist()  # 2 * 3 - 1, 4 * 2 - 4
        [5.0, 4.0]
    """
    wrapped = wrap_selected("linearise", selection, lambda _, layer: _Recorder(layer))
    recording = merge(*split(wrapped))  # of its own, with the same arrays
    recording(*args, **kwargs)
    recorders = select(recording).at_instances_of(_Recorder).get_by_path()

    def replace(path: Path, layer) -> Linearised:
        seen = recorders[path].__dict__.get("inputs")
        inputs = () if seen is None else seen.value
        dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(inputs)]
        if len(inputs) != 1 or not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
            found = f"was called {len(inputs)} times" if len(inputs) != 1 else "takes integers"
            raise SelectionError(
                f"{format_path(path)} cannot be linearised: it {found}, and there is one "
                f"approximation around one input of floats. Leave it out of the selection."
            )
        return Linearised(layer, inputs[0])

    return wrap_selected("linearise", selection, replace)
