# SPDX-License-Identifier: Apache-2.0
"""Wrappers in the places of selected layers.

Layers of a ``nn.Stack`` are edited all at once: what is saved of them, and their adapters, have a
leading dimension of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Dict, Init, Module, Param, Rngs, Selection, Variable, jvp, merge, select, split
from shardax.errors import SelectionError
from shardax.extend import ModuleWrapper, Path, PyTree, align, format_path, raise_if_any
from shardax.nn.arithmetic import (
    as_array,
    at_least_float32,
    cast_all,
    contract,
    einsum,
    take_features,
)
from shardax.nn.kernels.equation import Equation
from shardax.nn.kernels.layer import KernelLayer, KernelMap, LowRankTerm, unused_letters
from shardax.nn.linear import Linear
from shardax.nn.parameters import Initializer, as_size, lecun_normal, zeros
from shardax.nn.quantization import QuantizedKernel
from shardax.surgery import errors


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
        layer: A ``nn.KernelLayer``: a ``Linear`` (also of ``sx.named``), ``Einsum``, convolution,
            ``MoE``, ``Embed``, or one of yours; also one of a stack. With sizes any Module that is
            called with an array first, or None.
        rank: Size of the dimension between ``a`` and ``b``.
        scale: Factor of the term.
        in_features: Size of the last dimension of the input; None for the layer's kernel to say.
        out_features: Likewise of the result.
        param_dtype: Dtype of ``a`` and ``b`` where sizes are given; otherwise that of the kernel.
        rngs: Random streams; ``params`` is used.

    Attributes:
        body: The layer, or None.
        a: ``Param`` with the tag ``"lora"``: drawn with variance 1 / fan-in. Of a layer of
            several kernels, as a ``MoE`` is, a ``Dict`` with one for each.
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
        self.a: Any
        self.b: Any

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

        kernel_maps = _adaptable(layer, type(layer).__name__).kernel_maps()
        super().__init__(layer)
        if not kernel_maps:
            raise errors.no_known_kernel(type(layer).__name__)
        pairs = {
            name: _make_pair(getattr(layer, name), kernel_map, rank, rngs)
            for name, kernel_map in kernel_maps.items()
        }
        if len(pairs) > 1:
            self.a = Dict({name: a for name, (a, _) in pairs.items()})
            self.b = Dict({name: b for name, (_, b) in pairs.items()})
        else:
            ((self.a, self.b),) = pairs.values()
        self.scale = float(scale)

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
            return self.body.call_with_terms(x, self._terms(), *args, **options)

        inputs = take_features("LoRA", x, self.sizes[:1], "in_features")
        inputs, a, b = cast_all(None, inputs, self.a.value, self.b.value)
        term = self.scale * contract(contract(inputs, a, (0,)), b, (0,))
        if self.body is None:
            return term
        y = as_array(self.body(x, *args, **options))
        return y + align(term.astype(y.dtype), y)

    def attend(self, x: Any, *, out_sharding: Any = None) -> jax.Array:
        """Multiplies by the transposed table of an ``Embed``, and adds the term."""
        return self.body.attend_with_terms(x, self._terms(), out_sharding)

    def _terms(self) -> dict[str, LowRankTerm]:
        """Returns the term of each kernel of a layer of known kernels."""
        names = list(self.body.kernel_maps())
        pairs = dict.fromkeys(names, (self.a, self.b))
        if len(names) > 1:
            pairs = {name: (self.a[name], self.b[name]) for name in names}
        return {name: LowRankTerm(a.value, b.value, self.scale) for name, (a, b) in pairs.items()}

    def merged(self) -> Any:
        """Returns the layer with the terms added to its kernels."""
        layer = self.body
        if self.sizes is not None and layer is not None:
            raise errors.no_kernel_to_merge_into(layer)

        if self.sizes is not None:
            layer = Linear(*self.sizes, use_bias=False, param_dtype=self.a.dtype, rngs=Rngs(0))
            a, b = (v.value.astype(at_least_float32(v.dtype)) for v in (self.a, self.b))
            layer.kernel.value = (self.scale * contract(a, b, (0,))).astype(self.a.dtype)
            return layer

        kernel_maps = self.body.kernel_maps()
        for name, term in self._terms().items():
            total = _sum(getattr(self.body, name), kernel_maps[name], term)
            layer = select(layer).at_keypaths((name,)).set(total)
        return layer


def _make_pair(kernel: Param, kernel_map: KernelMap, rank: int, rngs: Rngs) -> tuple[Param, Param]:
    """Makes ``a`` and ``b`` of a kernel."""
    letters, (first, second) = kernel_map.equation.kernel, kernel_map.factors
    stacks, stack_axes = kernel_map.dimensions_of_stacks(kernel)
    lead = len(stacks)
    sizes = dict(zip(letters, kernel.shape[lead:], strict=True))
    names = dict(zip(letters, (kernel.axes or ())[lead:], strict=False))

    def make(letters: str, initializer: Initializer) -> Param:
        shape = (*stacks, *(sizes.get(letter, rank) for letter in letters))
        axes = (*stack_axes, *map(names.get, letters))
        init = Init(initializer, shape, kernel.dtype, rngs=rngs)
        return Param(init, axes=axes, tag="lora")

    def drawn(equation: Equation) -> Initializer:
        dimensions = equation.kernel_dimensions()
        summed, made, batch = (tuple(lead + index for index in each) for each in dimensions)
        return lecun_normal(summed, made, (*range(lead), *batch))

    # A row of a table is looked up, not summed over: drawn, it would hardly count.
    if kernel_map.is_table:
        return make(first.kernel, zeros), make(second.kernel, drawn(second))
    return make(first.kernel, drawn(first)), make(second.kernel, zeros)


def _sum(kernel: Param, kernel_map: KernelMap, term: LowRankTerm) -> Param:
    """Returns a kernel with its term added."""
    first, second = kernel_map.factors
    parts = (first.kernel, second.kernel, kernel_map.equation.kernel)
    stacks, _ = kernel_map.dimensions_of_stacks(kernel)
    lead = unused_letters("".join(parts))[: len(stacks)]
    inner, outer, whole = (lead + letters for letters in parts)

    dtype = at_least_float32(kernel.dtype)
    product = einsum(f"{inner},{outer}->{whole}", term.a.astype(dtype), term.b.astype(dtype))
    added = term.scale * align(product, kernel.value)
    return kernel.replace((kernel.value.astype(dtype) + added).astype(kernel.dtype))


def _check_callable(layer: object) -> None:
    """Raises for what LoRA cannot be around, with sizes."""
    if layer is not None and (not isinstance(layer, Module) or not callable(layer)):
        raise errors.not_callable(layer)


def _adaptable(layer: Any, where: str) -> KernelLayer:
    """Returns a layer; raises if the low-rank terms of its kernels are not known."""
    if not isinstance(layer, KernelLayer):
        raise errors.no_known_kernel(where)
    problem = layer.low_rank_problem()
    if problem is not None:
        raise errors.no_low_rank(where, layer, problem)

    # Only the class that says the maps, or a base of it, is known to compute by them.
    known = _definer(type(layer), "kernel_maps")
    for method in ("__call__", "attend"):
        definer = _definer(type(layer), method)
        if definer is not None and known is not None and not issubclass(known, definer):
            raise errors.call_of_its_own(where, layer, method)
    return layer


def _definer(cls: type, name: str) -> type | None:
    """Returns the class that defines a method, if any."""
    return next((each for each in cls.__mro__ if name in vars(each)), None)


def lora(
    selection: Selection, rank: int, scale: float = 1.0, *, rngs: Rngs | None = None
) -> PyTree:
    """Adds low-rank adapters to linear layers.

    Args:
        selection: What holds the layers: each ``Linear`` (also of ``sx.named``), ``Einsum``,
            convolution, ``MoE`` and other ``nn.KernelLayer`` in it is adapted, with kernels of any
            rank, and those of a ``Stack``, with an adapter for each of its layers. Of a ``MoE``
            those are the kernels of the experts; its router stays as it is unless it is selected
            itself, and so does an ``Embed``.
        rank: Rank of the adapters.
        scale: Factor of what they add.
        rngs: Random streams; ``params`` is used. None: ``Rngs(0)``.

    A layer with kernels that stands within an adapted one is left as it is, such as the router of a
    MoE.

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
    selected = {id(part) for part in given.get_all()}

    # Asked before the outermost layers are taken, or one that is left out would hide those in it.
    def is_adapted(part: object) -> bool:
        is_asked = id(part) in selected
        return isinstance(part, KernelLayer) and (is_asked or part.is_adapted_unasked)

    layers = given.at_subtrees_where(is_adapted)
    adapted = {id(each.body) for each in select(selection.tree).at_instances_of(LoRA).get_all()}

    streams = rngs or Rngs(0)

    def adapt(path: Path, layer: KernelLayer) -> LoRA:
        kernel_maps = _adaptable(layer, format_path(path)).kernel_maps()
        if id(layer) in adapted:
            raise errors.adapted_already(path[:-1])

        for name, kernel_map in kernel_maps.items():
            kernel = getattr(layer, name)
            if not kernel_map.fits(kernel):
                raise errors.mapped_over_another_axis(path, kernel.shape, kernel_map.shape)
        return LoRA(layer, rank, scale, rngs=streams)

    return wrap_selected("lora", layers, adapt)


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
        for name in adapter.body.kernel_maps()
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
