# SPDX-License-Identifier: Apache-2.0
"""Arguments of a planned step, as shapes with axis names.

The *step* is a function that is compiled: made by ``sx.jit`` or ``jax.jit``, or plain Python. Its
*arguments* are as for a call, but nothing in them needs to hold an array: lazy or abstract Modules
and optimizers, boxes of shapes, and ``NamedShape`` for arrays such as a batch, whose dimensions
have no names otherwise. Arrays are taken for their shapes.

An argument's *kind* is ``"parameters"`` (Variables of type ``Param`` or ``Quantized``, boxes),
``"optimizer"`` (``OptState``, and the states of optax), ``"batch"`` (``NamedShape`` and plain
arrays), or ``"other"`` (caches, random streams, statistics).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardax import LogicallyPartitioned, OptState, Param, Quantized, Rules, Variable, abstract
from shardax.extend import (
    AnyMesh,
    Object,
    Origin,
    Path,
    PyTree,
    TreeInventory,
    TreeLayout,
    axis_names_in,
    byte_count,
    format_path,
    mesh_axes_of,
    path_of_keys,
)
from shardax.partition import AxisMetadata, is_box
from shardax.plan.errors import PlanInputError
from shardax.plan.records import ArrayLayout, Layout

KINDS = ("parameters", "optimizer", "batch", "other")
_LISTED = 8


@dataclass(frozen=True)
class NamedShape:
    """The shape, dtype and axis names of an array argument.

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
        """The same for JAX, without names."""
        return jax.ShapeDtypeStruct(self.shape, np.dtype(self.dtype))


class _Named(LogicallyPartitioned[Any]):
    """A ``NamedShape`` while the arguments are laid out."""


@dataclass(frozen=True)
class Placed:
    """The arguments of a step in one layout."""

    args: tuple[PyTree, ...] = ()  # abstract, with a sharding at every array; empty after errors
    shardings: tuple[Any, ...] = ()  # like them, what ``jit`` takes as ``in_shardings``
    argument_bytes: dict[str, int] = field(default_factory=dict)  # of one device by kind
    replicated: tuple[str, ...] = ()  # parameters that every device holds whole, largest first
    arrays: tuple[ArrayLayout, ...] = ()  # how parameters and batch are split
    errors: tuple[str, ...] = ()  # why the arguments cannot be laid out so
    warnings: tuple[str, ...] = ()


def unbound(step: object) -> tuple[PyTree, tuple[PyTree, ...], dict[str, PyTree]]:
    """Returns the function under partials and methods, with bound arguments."""
    if isinstance(step, functools.partial):
        function, args, keywords = unbound(step.func)
        return function, (*args, *step.args), {**keywords, **step.keywords}
    if hasattr(step, "__func__") and hasattr(step, "__self__"):  # a method, compiled or not
        method: Any = step
        function, args, keywords = unbound(method.__func__)
        return function, (*args, method.__self__), keywords
    called = type(step).__call__
    if hasattr(called, "trace") and not hasattr(step, "trace"):  # an object whose calls are
        return called, (step,), {}
    return step, (), {}


class Inputs:
    """The arguments of a step, with their names, kinds and axis names."""

    def __init__(self, step: Callable[..., PyTree], args: Sequence[PyTree]) -> None:
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
        self.names = _argument_names(step, args)
        self.tree = {
            name: jax.tree.map(_boxed, arg, is_leaf=_is_part)
            for name, arg in zip(self.names, args, strict=True)
        }

        self.inventory = TreeInventory(self.tree)
        states = _optax_states(self.tree)
        subjects = self.inventory.filter_subjects()
        self.kinds = [
            _kind(leaf.path, leaf.variable, subject.like, states)
            for leaf, subject in zip(self.inventory.leaves, subjects, strict=True)
        ]
        self._check_named()

    def _check_named(self) -> None:
        """Raises for parameters and arrays of the batch without axis names."""
        unnamed = [
            label(info.path)
            for leaf in self.leaves_of("parameters", "batch")
            if leaf.axes is None
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

    def leaves_of(self, *kinds: str) -> Iterator[Any]:
        """Yields the leaves of the inventory that are of some kinds."""
        for leaf, kind in zip(self.inventory.leaves, self.kinds, strict=True):
            if kind in kinds:
                yield leaf

    def names_on(self, *kinds: str) -> tuple[str, ...]:
        """Returns the axis names on arguments of some kinds, in order of first use."""
        names: dict[str, None] = {}
        for leaf in self.leaves_of(*kinds):
            for info in leaf.arrays:
                names |= dict.fromkeys(axis_names_in(leaf.names_of(info) or ()))
        return tuple(names)

    @property
    def logical_names(self) -> tuple[str, ...]:
        """Every axis name of the arguments, in order of first use."""
        return self.names_on(*KINDS)

    @property
    def batch_names(self) -> frozenset[str]:
        """Names of the first dimensions of arguments of the kind ``"batch"``."""
        axes = [leaf.axes for leaf in self.leaves_of("batch")]
        return frozenset(names[0] for names in axes if names and isinstance(names[0], str))

    @property
    def tokens(self) -> int:
        """Elements of the batch's first integer array, or 0."""
        for leaf in self.leaves_of("batch"):
            for info in leaf.arrays:
                if jax.numpy.issubdtype(info.dtype, jax.numpy.integer):
                    return math.prod(info.shape)
        return 0

    @property
    def parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(map(math.prod, self.parameter_shapes))

    @property
    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all parameters, sorted."""
        leaves = self.leaves_of("parameters")
        return sorted(tuple(info.shape) for leaf in leaves for info in leaf.arrays)

    def whole_bytes(self, *kinds: str) -> int:
        """Returns the bytes of whole arguments of some kinds, as one device would hold them."""
        arrays = [info for leaf in self.leaves_of(*kinds) for info in leaf.arrays]
        return sum(byte_count(info.shape, info.dtype) for info in arrays)

    def shapes(self) -> tuple[Any, ...]:
        """Returns the arguments as shapes without a layout, for tracing."""
        return self._positional(self.abstract())

    def abstract(
        self, mesh: AnyMesh | None = None, rules: Rules | None = None, **options: Any
    ) -> dict[str, Any]:
        """Returns the arguments by name, with shapes in place of arrays."""
        return jax.tree.map(
            lambda own_shape, shape: own_shape if shape is None else shape,
            self.tree,
            abstract(self.tree, mesh, rules, **options),
            is_leaf=_is_part,
        )

    def _positional(self, tree: object) -> tuple[Any, ...]:
        """The arguments of a tree by name, in order and unboxed."""
        values = jax.tree.map(
            lambda leaf: leaf.value if isinstance(leaf, _Named) else leaf, tree, is_leaf=_is_part
        )
        return tuple(values[name] for name in self.names)

    def place(
        self, layout: Layout, mesh: AnyMesh | None = None, *, with_args: bool = True
    ) -> Placed:
        """Returns the arguments laid out over a mesh, by default an abstract one."""
        if mesh is None:
            mesh = auto_mesh(layout.sizes)
        # No rules at all would be taken for rules that were forgotten.
        rules = layout.as_rules or Rules([(name, None) for name in self.logical_names])
        options: dict[str, Any] = {
            "overrides": self._for_optimizer(layout.optimizer_rules),
            "memory_kind": self._for_optimizer(layout.optimizer_memory),
        }
        tree_layout = TreeLayout(self.inventory, mesh, rules, **options, function="plan")
        errors = [str(each) for each in tree_layout.diagnostics if each.severity == "error"]
        if errors:
            return Placed(errors=tuple(errors))

        bytes_by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
        replicated: dict[str, int] = {}  # parameters by path, with their bytes
        arrays: list[ArrayLayout] = []
        gives_way: set[Path] = set()  # arrays in which one name is meant to give way to another
        shardings_of_leaves = tree_layout.shardings()
        for leaf, kind, shardings in zip(
            self.inventory.leaves, self.kinds, shardings_of_leaves, strict=True
        ):
            for info, sharding in zip(leaf.arrays, shardings, strict=False):
                size = byte_count(sharding.shard_shape(info.shape), info.dtype)
                if kind != "optimizer" or not layout.optimizer_memory:  # else on the host
                    bytes_by_kind[kind] += size
                if kind in ("parameters", "batch"):
                    arrays.append(_array_layout(leaf, info, kind, sharding.spec))
                if kind == "parameters" and sharding.is_fully_replicated:
                    replicated[label(info.path)] = size
                if kind == "batch" or (kind == "optimizer" and layout.optimizer_rules):
                    gives_way.add(info.path)

        warnings = [
            str(each)
            for each in tree_layout.diagnostics
            if each.severity == "warning"
            # A batch's later dimensions are meant to give way to its first.
            and not (each.code == "mesh-axis-conflict" and each.path in gives_way)
        ]
        placed = Placed(
            argument_bytes=bytes_by_kind,
            replicated=tuple(sorted(replicated, key=lambda path: (-replicated[path], path))),
            arrays=tuple(arrays),
            warnings=tuple(warnings),
        )
        if not with_args:
            return placed
        return dataclasses.replace(
            placed,
            args=self._positional(self.abstract(mesh, rules, **options)),
            shardings=self._positional(tree_layout.entries(shardings_of_leaves)),
        )

    def _for_optimizer(self, value: object) -> list[tuple[Any, Any]] | None:
        """A value for the optimizer's state alone, by filter."""
        if not value:
            return None

        paths = {leaf.path for leaf in self.leaves_of("optimizer")}
        if not paths:
            raise PlanInputError(
                "The layout says where the optimizer's state is, but the step has none among its "
                "arguments: give it the sx.train.Optimizer, as in (model, optimizer, batch)."
            )
        # ``Rules`` takes a list of pairs.
        value = list(value) if isinstance(value, tuple) else value
        return [(lambda path, _: path in paths, value)]


def label(path: Path) -> str:
    """Formats a path among the arguments, such as ``model.layers[0].kernel``."""
    first, *inner = path
    return f"{first}{format_path(tuple(inner)) if inner else ''}"


def auto_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Returns a mesh without devices whose axes are Auto."""
    # Which they are by default to JAX 0.11; from 0.12 they are Explicit.
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), kinds)


def _argument_names(step: Callable[..., object], args: Sequence[object]) -> tuple[str, ...]:
    """The names of the arguments in the step's signature."""
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


def _boxed(leaf: object) -> object:
    """Returns the box of a ``NamedShape``; anything else is itself."""
    return _Named(leaf.struct, leaf.axes) if isinstance(leaf, NamedShape) else leaf


def _is_part(value: object) -> bool:
    return is_box(value) or isinstance(value, (NamedShape, Object))


def _optax_states(tree: object) -> list[Path]:
    """Paths of the states of optax, named tuples of its own."""

    def is_state(value: object) -> bool:
        module = type(value).__module__
        return hasattr(type(value), "_fields") and module.partition(".")[0] == "optax"

    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda v: is_state(v) or _is_part(v))
    return [path_of_keys(path) for path, leaf in leaves if is_state(leaf)]


def _kind(
    leaf_path: Path, variable: Variable | None, like: Variable | Origin, states: Sequence[Path]
) -> str:
    kind = like.variable_type if isinstance(like, Origin) else type(like)
    if issubclass(kind, OptState) or any(leaf_path[: len(path)] == path for path in states):
        return "optimizer"
    if issubclass(kind, _Named) or kind is Variable:
        return "batch" if variable is None else "other"
    return "parameters" if issubclass(kind, (Param, Quantized, AxisMetadata)) else "other"


def _array_layout(leaf, info, kind: str, spec: PartitionSpec) -> ArrayLayout:
    rank = len(info.shape)
    return ArrayLayout(
        path=label(info.path),
        kind=kind,
        shape=tuple(info.shape),
        dtype=info.dtype.name,
        names=tuple(leaf.names_of(info) or (None,) * rank),
        spec=tuple(mesh_axes_of(entry) for entry in (*spec, *(None,) * (rank - len(spec)))),
    )


@contextlib.contextmanager
def needs_no_values() -> Generator[None]:
    """Turns JAX's concretization errors into one with the line."""
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    ) as error:
        # The innermost line that is neither JAX's nor shardax's.
        line, frame = "", error.__traceback__
        while frame is not None:
            name = frame.tb_frame.f_globals.get("__name__", "")
            if name.partition(".")[0] not in ("jax", "shardax", "contextlib"):
                line = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
            frame = frame.tb_next

        raise PlanInputError(
            f"The step needs concrete values{line}, but is planned from shapes alone. Compute with "
            "jax.numpy and sx.cond or sx.while_loop there, or make the value static. JAX says: "
            f"{str(error).splitlines()[0]}"
        ) from error
