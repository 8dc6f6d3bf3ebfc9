# SPDX-License-Identifier: Apache-2.0
"""What a step is planned for: its arguments as shapes, and what of them a layout puts where.

The *step* is a function that is compiled: made by ``sx.jit`` or ``jax.jit``, or plain Python. Its
*arguments* are as for a call, but nothing in them needs to hold an array: lazy or abstract Modules
and optimizers, boxes of shapes, and ``NamedShape`` for arrays such as a batch, whose dimensions
have no names otherwise. Arrays are taken for their shapes.

An argument's *kind* is ``"parameters"`` (Variables of type ``Param``, boxes), ``"optimizer"``
(``OptState``, and what is in the states of optax), ``"batch"`` (``NamedShape`` and plain arrays),
or ``"other"`` (caches, random streams, statistics).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from shardax._core.graph.paths import Path, format_path, path_step
from shardax._core.object import Object
from shardax._core.state.state import Origin
from shardax._core.variable import OptState, Param, Variable
from shardax.partition.boxes.boxes import AxisMetadata, LogicallyPartitioned
from shardax.partition.errors import Diagnostic
from shardax.partition.inventory import ArrayInfo, LeafInfo, TreeInventory
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules, mesh_axes_of
from shardax.partition.tree_layout import TreeLayout
from shardax.plan.errors import PlanInputError
from shardax.plan.records import ArrayLayout, Layout

KINDS = ("parameters", "optimizer", "batch", "other")
_LISTED = 8


@dataclasses.dataclass(frozen=True)
class NamedShape:
    """The shape, dtype and axis names of an array that an argument will be.

    Attributes:
        shape: Sizes of its dimensions.
        dtype: Its dtype.
        axes: One name per dimension; None for one that is never split.

    Raises:
        PlanInputError: If there is not one name per dimension.

    Example:
        >>> tokens = NamedShape((64, 2048), "int32", ("batch", "seq"))
        >>> tokens.struct
        ShapeDtypeStruct(shape=(64, 2048), dtype=int32)
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[Any, ...]

    def __post_init__(self) -> None:
        for name in ("shape", "axes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.shape) != len(self.axes):
            raise PlanInputError(
                f"NamedShape has shape {self.shape} and axes {self.axes}. Give one name per "
                "dimension, None for one that is never split."
            )

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The same as JAX has it, without names."""
        return jax.ShapeDtypeStruct(self.shape, np.dtype(self.dtype))


class _Named(LogicallyPartitioned[Any]):
    """A ``NamedShape`` while the arguments are laid out."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """The arguments of a step in one layout.

    Attributes:
        args: Abstract arguments, with a sharding at every array; empty if there are errors.
        shardings: Like them, the shardings alone: what ``jit`` takes as ``in_shardings``.
        argument_bytes: Bytes of one device by kind.
        replicated: Paths of parameters that every device holds whole, largest first.
        arrays: How parameters and batch are split.
        errors: Why the arguments cannot be laid out so.
        warnings: What else there is to say.
    """

    args: tuple[Any, ...]
    shardings: tuple[Any, ...]
    argument_bytes: dict[str, int]
    replicated: tuple[str, ...]
    arrays: tuple[ArrayLayout, ...]
    errors: tuple[str, ...]
    warnings: tuple[str, ...]


class Inputs:
    """The arguments of a step.

    Args:
        step: The step.
        args: Its positional arguments.

    Attributes:
        step: The step.
        args: Its arguments as given.
        names: What the arguments are called in it.
        tree: Arguments by name.

    Raises:
        PlanInputError: If the step cannot be called, the arguments do not fit its signature, or
            there are parameters or batches without axis names; lists them.

    Example:
        >>> import shardax as sx
        >>> def loss(weight, x):
        ...     return (x @ weight.value).sum()
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (8, 16)), axes=("embed", "mlp"))
        >>> inputs = Inputs(loss, (weight, NamedShape((32, 8), "float32", ("batch", "embed"))))
        >>> rules = (("batch", "data"), ("mlp", "model"))
        >>> layout = Layout("tensor parallel", rules, (("data", 2), ("model", 4)))
        >>> placed = inputs.place(layout)
        >>> {kind: size for kind, size in placed.argument_bytes.items() if size}
        {'parameters': 128, 'batch': 512}
    """

    def __init__(self, step: Callable[..., Any], args: Sequence[Any]) -> None:
        if not callable(step):
            raise PlanInputError(
                f"The step is {step!r} of type {type(step).__name__}, which cannot be called. Give "
                "the function that is compiled: plan.compare(train_step, (model, batch), ...)."
            )
        if isinstance(args, (str, Mapping)) or not isinstance(args, Sequence):
            raise PlanInputError(
                f"The arguments are {type(args).__name__}; give a tuple of the step's positional "
                "arguments, as in plan.compare(train_step, (model, optimizer, batch), ...)."
            )
        self.step = step
        self.args = tuple(args)
        self.names = _names(step, args)
        self.tree = {
            name: jax.tree.map(_as_box, arg, is_leaf=_is_part)
            for name, arg in zip(self.names, args, strict=True)
        }
        self._inventory = TreeInventory(self.tree)
        states = _optax_states(self.tree)
        subjects = self._inventory.filter_subjects()
        self.kinds = [
            _kind(leaf, subject.like, states)
            for leaf, subject in zip(self._inventory.leaves, subjects, strict=True)
        ]
        self._refuse_unnamed()

    @property
    def logical_names(self) -> tuple[str, ...]:
        """Every axis name of the arguments, in order of first use."""
        found: dict[str, None] = {}
        for leaf in self._inventory.leaves:
            for names in (leaf.names_of(info) for info in leaf.arrays):
                for name in names or ():
                    for each in name if isinstance(name, tuple) else (name,):
                        if isinstance(each, str):
                            found[each] = None
        return tuple(found)

    @property
    def batch_names(self) -> frozenset[str]:
        """Names of the first dimensions of arguments of the kind ``"batch"``."""
        leaves = zip(self._inventory.leaves, self.kinds, strict=True)
        axes = [leaf.axes for leaf, kind in leaves if kind == "batch"]
        return frozenset(names[0] for names in axes if names and isinstance(names[0], str))

    def shapes(self) -> tuple[Any, ...]:
        """Returns the arguments as shapes without a layout, for tracing."""
        from shardax.partition import abstract

        return self._as_args(abstract(self.tree, None))

    def place(self, layout: Layout, mesh: AnyMesh | None = None) -> Placed:
        """Lays the arguments out.

        Args:
            layout: The layout.
            mesh: Its mesh; None for an abstract one, which is enough for everything but compiling.

        Returns:
            The arguments in the layout, or why that cannot be.
        """
        from shardax.partition import abstract

        sizes = layout.sizes
        where = mesh if mesh is not None else AbstractMesh(tuple(sizes.values()), tuple(sizes))
        # No rules at all would be taken for rules that were forgotten.
        rules = layout.as_rules or Rules([(name, None) for name in self.logical_names])
        found = TreeLayout(self._inventory, where, rules, function="plan", rules_for="boxes")
        errors = tuple(str(f) for f in found.diagnostics if f.severity == "error")
        if errors:
            return Placed((), (), {}, (), (), errors, ())
        each = found.shardings()
        sizes_by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
        whole: dict[str, int] = {}
        arrays: list[ArrayLayout] = []
        for leaf, kind, shardings in zip(self._inventory.leaves, self.kinds, each, strict=True):
            for info, sharding in zip(leaf.arrays, shardings, strict=False):
                size = math.prod(sharding.shard_shape(info.shape)) * info.dtype.itemsize
                sizes_by_kind[kind] += size
                if kind in ("parameters", "batch"):
                    arrays.append(_array_layout(leaf, info, kind, sharding.spec))
                if kind == "parameters" and sharding.is_fully_replicated:
                    whole[label(info.path)] = size
        return Placed(
            self._as_args(abstract(self.tree, where, rules)),
            tuple(_unboxed(found.entries(each))[name] for name in self.names),
            sizes_by_kind,
            tuple(sorted(whole, key=lambda path: (-whole[path], path))),
            tuple(arrays),
            (),
            self._warnings(found.diagnostics),
        )

    def _warnings(self, diagnostics: Sequence[Diagnostic]) -> tuple[str, ...]:
        leaves = zip(self._inventory.leaves, self.kinds, strict=True)
        batch = {info.path for leaf, kind in leaves if kind == "batch" for info in leaf.arrays}
        return tuple(
            str(diagnostic)
            for diagnostic in diagnostics
            if diagnostic.severity == "warning"
            # That a batch's later dimensions give way to its first is how it is meant.
            and not (diagnostic.code == "mesh-axis-conflict" and diagnostic.path in batch)
        )

    def _as_args(self, tree: dict[str, Any]) -> tuple[Any, ...]:
        found = _unboxed(tree)
        return tuple(found[name] for name in self.names)

    def _refuse_unnamed(self) -> None:
        unnamed = [
            label(info.path)
            for leaf, kind in zip(self._inventory.leaves, self.kinds, strict=True)
            if kind in ("parameters", "batch") and leaf.axes is None
            for info in leaf.arrays
            if info.shape and info.axes is None
        ]
        if unnamed:
            more = f" and {len(unnamed) - _LISTED} more" if len(unnamed) > _LISTED else ""
            raise PlanInputError(
                f"{len(unnamed)} arrays have no axis names, so no rules can lay them out: "
                f"{', '.join(unnamed[:_LISTED])}{more}. Name the dimensions: "
                'sx.Param(init, axes=("embed", "mlp")) for a parameter, '
                'plan.NamedShape((64, 2048), "int32", ("batch", "seq")) for a batch; a name of '
                "None is for a dimension that is never split."
            )


def label(path: Path) -> str:
    """Returns a path among the arguments as text, such as ``model.layers[0].kernel``."""
    return format_path(path).removeprefix(".")


def _names(step: Callable[..., Any], args: Sequence[Any]) -> tuple[str, ...]:
    """What the arguments are called in the step's signature."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # some callables written in C have none
        return tuple(f"args[{i}]" for i in range(len(args)))
    try:
        bound = signature.bind(*args)
    except TypeError as error:
        raise PlanInputError(
            f"The step takes {signature}, but was given {len(args)} arguments: {error}. Give all "
            "of its positional arguments as one tuple."
        ) from error
    names: list[str] = []
    for name, value in bound.arguments.items():
        several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{i}]" for i in range(len(value))] if several else [name]
    return tuple(names)


def _is_part(value: Any) -> bool:
    return isinstance(value, (NamedShape, AxisMetadata, Object))


def _as_box(leaf: Any) -> Any:
    if isinstance(leaf, NamedShape):
        return _Named(leaf.struct, leaf.axes)
    return leaf


def _unboxed(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, _Named) else leaf, tree, is_leaf=_is_part
    )


def _optax_states(tree: Any) -> list[Path]:
    """Paths of the states of optax, which are named tuples of its own."""

    def is_state(value: Any) -> bool:
        module = type(value).__module__
        return hasattr(type(value), "_fields") and module.partition(".")[0] == "optax"

    found = jax.tree.leaves_with_path(tree, is_leaf=lambda v: is_state(v) or _is_part(v))
    return [tuple(map(path_step, path)) for path, leaf in found if is_state(leaf)]


def _kind(leaf: LeafInfo, like: Any, states: Sequence[Path]) -> str:
    kind = like.variable_type if isinstance(like, Origin) else type(like)
    if issubclass(kind, OptState) or any(leaf.path[: len(path)] == path for path in states):
        return "optimizer"
    if issubclass(kind, _Named) or kind is Variable:
        return "batch" if leaf.variable is None else "other"
    return "parameters" if issubclass(kind, (Param, AxisMetadata)) else "other"


def _array_layout(leaf: LeafInfo, info: ArrayInfo, kind: str, spec: Any) -> ArrayLayout:
    missing = (None,) * (len(info.shape) - len(spec))
    return ArrayLayout(
        label(info.path),
        kind,
        tuple(info.shape),
        info.dtype.name,
        tuple(leaf.names_of(info) or (None,) * len(info.shape)),
        tuple(mesh_axes_of(entry) for entry in (*spec, *missing)),
    )
