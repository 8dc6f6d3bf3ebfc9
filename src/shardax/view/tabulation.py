# SPDX-License-Identifier: Apache-2.0
"""The table of a model's Modules in one call.

The call is traced on an abstract copy, so that nothing is allocated and the model stays as it is.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax

from shardax import Module, Rngs, RngStream, abstract, eval_shape, iter_modules, iter_variables
from shardax._files import write_whole
from shardax._parallel.kernels import recorded_choices
from shardax._tables import Column, DisplayTable
from shardax.extend import Object, Options, Path, byte_count, format_path, join_first, wrap_methods
from shardax.view.errors import ViewError
from shardax.view.page import html_page
from shardax.view.parameter_table import format_bytes, format_count


@dataclass(frozen=True)
class TabulationRow:
    """One Module.

    Attributes:
        path: Where it stands, as text.
        type: Its class's name.
        inputs: Shapes of the arguments of its first call; empty if it is not called.
        outputs: Shapes of the result of that call.
        sizes: (type of Variable, elements, bytes) for each type in it; a shared Variable counts
            where it is met first.
        flops: Operations of the call in it and in what it calls; None if they were not counted.
        kernels: What its calls run by, where ``sx.kernels`` or a layer asks for a kernel, with the
            reasons against others.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> row = sx.tabulate(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), jnp.ones((1, 2))).rows[0]
        >>> row.type, row.inputs, row.outputs
        ('Linear', 'float32[1,2]', 'float32[1,3]')
    """

    path: str
    type: str
    inputs: str
    outputs: str
    sizes: tuple[tuple[str, int, int], ...]
    flops: int | None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tabulation:
    """A model's Modules, one row each; ``str()`` is the table as text.

    Attributes:
        rows: The rows, in the model's order.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> table = sx.tabulate(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), jnp.ones((1, 2)))
        >>> table.rows[0].sizes, table.rows[0].flops
        ((('Param', 9, 36),), 15)
    """

    rows: tuple[TabulationRow, ...]

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the header and one tuple of texts per row."""
        return self._table().texts()

    def html(self) -> str:
        """Returns the table as HTML."""
        kernels = [f"<p>{escape(line)}</p>" for line in self._kernel_lines()]
        return "".join([self._table().html("modules"), *kernels])

    def _table(self) -> DisplayTable:
        # A column for each type of Variable in the model, and one of operations if counted.
        kinds = list(dict.fromkeys(kind for row in self.rows for kind, *_ in row.sizes))
        counted = any(row.flops is not None for row in self.rows)
        heads = [*kinds, "FLOPs"] if counted else kinds
        columns = [Column(head=head) for head in ("module", "type", "inputs", "outputs")]
        columns += [Column(head=head, right=True) for head in heads]

        rows: list[list[str]] = []
        for row in self.rows:
            by_kind = {kind: f"{size:,} ({format_bytes(n)})" for kind, size, n in row.sizes}
            cells = [row.path, row.type, row.inputs, row.outputs]
            cells += [by_kind.get(kind, "") for kind in kinds]
            if counted:
                cells.append(format_count(row.flops or 0))
            rows.append(cells)
        return DisplayTable.of(columns, rows)

    def write_page(self, path: str | FilePath) -> None:
        """Writes the table as an HTML page.

        Args:
            path: The file.
        """
        write_whole(FilePath(path), html_page(self.rows[0].type, self.html()))

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        lines = self._table().lines()
        kernels = self._kernel_lines()
        return "\n".join([*lines, "", *kernels] if kernels else lines)

    def _kernel_lines(self) -> list[str]:
        """Returns a text for each kernel that layers run by, with these layers."""
        # Each reason once: a model has many layers that run by one kernel for one reason.
        paths: dict[str, list[str]] = {}
        for row in self.rows:
            for text in row.kernels:
                paths.setdefault(text, []).append(row.path)

        return [
            f"{join_first(by_kernel)} {'runs' if len(by_kernel) == 1 else 'run'} by {text}"
            for text, by_kernel in paths.items()
        ]


def tabulate(
    model: Module,
    *args: object,
    method: str = "__call__",
    depth: int | None = None,
    filter: Any = ...,
    flops: bool = True,
    **kwargs: object,
) -> Tabulation:
    """Makes the table of a model's Modules in one call.

    Args:
        model: The Module.
        *args: Arguments of the call: arrays, ``jax.ShapeDtypeStruct`` or pytrees of these.
        method: Which method is called.
        depth: Most steps of the paths that are shown; None for all.
        filter: Which Variables count.
        flops: Whether to count operations, for which the call is compiled.
        **kwargs: Arguments of the call by name; numbers and texts are configuration.

    Returns:
        The table, with inputs and outputs of the first call of each Module. Random streams have no
        rows.

    Raises:
        ViewError: If an option does not fit, or operations cannot be counted.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> print(sx.tabulate(sx.nn.MLP(2, 4, rngs=sx.Rngs(0)), jnp.ones((8, 2))))
        module  type    inputs        outputs               Param  FLOPs
        (root)  MLP     float32[8,2]  float32[8,2]  24 (96 B)    576
        .gate   Linear  float32[8,2]  float32[8,4]   8 (32 B)    128
        .up     Linear  float32[8,2]  float32[8,4]   8 (32 B)    128
        .down   Linear  float32[8,4]  float32[8,2]   8 (32 B)    128
    """
    options = Options(ViewError)
    options.instance("model", model, Module, "a Module")
    options.check("method", method, callable(getattr(model, method, None)), "a method's name")
    fits = depth is None or (isinstance(depth, int) and depth >= 0)
    options.check("depth", depth, fits, "None or an integer of at least 0")

    calls = _observed_calls(model, method, args, kwargs)
    counts: Mapping[Path, int] = {}
    if flops:
        from shardax.view.operations import module_operations

        run = _MethodCall(method, kwargs)
        counts = module_operations(model, args, run)

    sizes: dict[Path, dict[str, list[int]]] = {}
    for path, variable in iter_variables(abstract(model), filter):
        leaves = jax.tree.leaves(variable.value)
        size = sum(math.prod(leaf.shape) for leaf in leaves)
        nbytes = sum(byte_count(leaf.shape, leaf.dtype) for leaf in leaves)
        for length in range(len(path) + 1):
            total = sizes.setdefault(path[:length], {}).setdefault(type(variable).__name__, [0, 0])
            total[0] += size
            total[1] += nbytes

    rows = []
    for path, module in iter_modules(model):
        if isinstance(module, (Rngs, RngStream)) or (depth is not None and len(path) > depth):
            continue
        totals = sizes.get(path, {}).items()
        by_kind = [(kind, elements, nbytes) for kind, (elements, nbytes) in totals]
        call = calls.get(path, _ObservedCall("", ""))
        shapes, name = (call.inputs, call.outputs), type(module).__name__
        count = counts.get(path, 0) if flops else None
        kernels = tuple(call.kernels)
        rows.append(TabulationRow(format_path(path), name, *shapes, tuple(by_kind), count, kernels))
    return Tabulation(tuple(rows))


class _MethodCall:
    """A call of a method with arguments by name."""

    def __init__(self, method: str, kwargs: Mapping[str, Any]) -> None:
        self.method = method
        self.kwargs = kwargs

    def __call__(self, model: Module, *args: object) -> Any:
        return getattr(model, self.method)(*args, **self.kwargs)


# --- shapes of calls ------------------------------------------------------------------------------


class _ObservedCall(NamedTuple):
    """Shapes of a Module's first call, kernels of all."""

    inputs: str
    outputs: str
    kernels: Mapping[str, None] = {}  # in order


_Calls = dict[Path, _ObservedCall]
_calls: contextvars.ContextVar[_Calls | None] = contextvars.ContextVar("calls", default=None)
_PLACE = "shardax_tabulated"


def _observed_calls(model: Module, method: str, args, kwargs) -> _Calls:
    """Returns shapes of inputs and outputs of first calls, by path."""
    planned = abstract(model)
    for path, module in iter_modules(planned):
        if not isinstance(module, (Rngs, RngStream)):
            # An attribute, so that inner transforms, which build Modules anew, keep it.
            setattr(module, _PLACE, path)
            object.__setattr__(module, "__class__", _observed(type(module)))
    calls: _Calls = {}
    token = _calls.set(calls)
    try:
        eval_shape(_MethodCall(method, kwargs), planned, *args)
    finally:
        _calls.reset(token)
    return calls


@functools.cache  # one for each class, for good: JAX keeps the classes of its pytrees
def _observed(kind: type[Module]) -> type[Module]:
    def around(name: str, method: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(method, updated=())
        def call(self, *args, **kwargs):
            calls, path = _calls.get(), vars(self).get(_PLACE)
            if calls is None or path is None:
                return method(self, *args, **kwargs)

            is_first = path not in calls  # also where a method calls another of this Module
            if is_first:
                calls[path] = _ObservedCall(_inputs_text(args, kwargs), "")
            try:
                with recorded_choices() as kernels:
                    result = method(self, *args, **kwargs)
            except BaseException:  # such as of a trace that begins anew
                if is_first:
                    del calls[path]
                raise

            first = calls[path]
            outputs = _shapes(result) if is_first else first.outputs
            kernels_so_far = {**first.kernels, **dict.fromkeys(kernels)}
            calls[path] = _ObservedCall(first.inputs, outputs, kernels_so_far)
            return result

        return call

    return wrap_methods(kind, around)


def _inputs_text(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Formats the arrays among arguments, those by name with it."""
    texts = {key: _shapes(value) for key, value in kwargs.items()}
    named = [f"{key}={text}" for key, text in texts.items() if text]
    return ", ".join(filter(None, [*map(_shapes, args), *named]))


def _shapes(tree: object) -> str:
    """Formats the arrays of an argument or result."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Object))
    texts = [
        type(leaf).__name__
        if isinstance(leaf, Object)
        else f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        if hasattr(leaf, "dtype")
        else repr(leaf)
        for leaf in leaves
    ]
    return ", ".join(texts) if len(texts) < 5 else f"{', '.join(texts[:3])}, ... ({len(texts)})"
