# SPDX-License-Identifier: Apache-2.0
"""Dynamic dimensions: sizes that an exported function leaves open.

A *dynamic dimension* has a name in place of a size. The program is traced once for all sizes, so
whatever needs the number itself (a Python loop over it, an ``if`` about it) is an error of JAX.
*Constraints* (``"seq <= 512"``, ``"batch = 8*rows"``) say what JAX may count on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardax.core.errors import ExportError
from shardax.core.node import Object
from shardax.core.paths import format_path, path_step
from shardax.core.pytree import is_object
from shardax.host.array_form import plain_dtype
from shardax.partition.findings import did_you_mean
from shardax.transforms.closures import parameter_name

Dynamic = Mapping[str, int | Mapping[str, int | Sequence[int]]]
"""Dimension by name: one for all arrays in the arguments, or one or several by parameter name."""


def abstract_arguments(
    jit: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Dynamic,
    constraints: Sequence[str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with shapes for arrays, dynamic dimensions among them.

    Args:
        jit: The ``Jit`` that they are for; its static arguments stay as they are.
        args: The positional arguments.
        kwargs: The keyword arguments.
        dynamic: Which dimensions are dynamic.
        constraints: What JAX may count on.

    Raises:
        ExportError: If ``dynamic`` names what is not there, or sizes of one name differ.
    """
    labelled: dict[Any, str] = {
        i: parameter_name(jit.__wrapped__, i)
        for i in range(len(args))
        if i not in jit.static_positions
    }
    labelled |= {name: name for name in kwargs if name not in jit.static_names}
    given = {**dict(enumerate(args)), **kwargs}
    dimensions = _Dimensions(dynamic, constraints, list(labelled.values()))
    for key, label in labelled.items():
        given[key] = jax.tree_util.tree_map_with_path(
            lambda path, leaf, label=label: dimensions.abstract(label, path, leaf),
            given[key],
            is_leaf=is_object,
        )
    dimensions.check_used()
    return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}


class _Dimensions:
    """The dynamic dimensions of one export.

    Args:
        dynamic: As for ``abstract_arguments``.
        constraints: Likewise.
        labels: Names of the arguments.
    """

    def __init__(self, dynamic: Dynamic, constraints: Sequence[str], labels: Sequence[str]) -> None:
        self.dynamic = dynamic
        self.sizes: dict[str, tuple[Any, str]] = {}  # the first size of a name, and where it was
        self.symbols: dict[str, Any] = {}
        self._make_symbols(constraints)
        for name, where in dynamic.items():
            for label in where if isinstance(where, Mapping) else ():
                if label not in labels:
                    raise ExportError(
                        f"dynamic={{{name!r}: ...}} is about an argument {label!r}, but the call "
                        f"has ({', '.join(labels)}).{did_you_mean(label, labels)}"
                    )

    def _make_symbols(self, constraints: Sequence[str]) -> None:
        names = list(self.dynamic)
        if not names and constraints:
            raise ExportError(
                f"constraints={tuple(constraints)!r} are about dynamic dimensions, and there are "
                "none: dynamic={'batch': 0}."
            )
        if names:
            try:
                found = jax.export.symbolic_shape(", ".join(names), constraints=tuple(constraints))
            except Exception as error:
                raise ExportError(
                    f"JAX does not take dynamic={names} with constraints={tuple(constraints)!r}: "
                    f"{error}. Names are identifiers, constraints such as 'seq <= 512'."
                ) from error
            self.symbols = dict(zip(names, found, strict=True))

    def abstract(self, label: str, path: Any, leaf: Any) -> Any:
        """Returns one array of an argument as shape and dtype; anything else as it is."""
        if isinstance(leaf, Object) or not hasattr(leaf, "dtype"):
            return leaf
        where = format_path((label, *map(path_step, path)))
        shape = list(leaf.shape)
        for name, symbol in self.symbols.items():
            for axis in self._axes(name, label):
                if not -len(shape) <= axis < len(shape):
                    raise ExportError(
                        f"dynamic={{{name!r}: ...}} makes dimension {axis} of {where} dynamic, "
                        f"which has the shape {tuple(leaf.shape)}. Say which arguments have it, "
                        f"dynamic={{{name!r}: {{'name of the argument': {axis}}}}}."
                    )
                self._note_size(name, leaf.shape[axis], where)
                shape[axis] = symbol
        return jax.ShapeDtypeStruct(
            tuple(shape),
            plain_dtype(leaf.dtype),
            sharding=_layout(leaf, shape),
            weak_type=getattr(leaf, "weak_type", False),
        )

    def _axes(self, name: str, label: str) -> tuple[int, ...]:
        where = self.dynamic[name]
        axes = where.get(label, ()) if isinstance(where, Mapping) else where
        return (axes,) if isinstance(axes, int) else tuple(axes)

    def _note_size(self, name: str, size: Any, where: str) -> None:
        known, first = self.sizes.setdefault(name, (size, where))
        if size != known:
            raise ExportError(
                f"The dynamic dimension {name!r} is {known} in {first} and {size} in {where}, but "
                f"it is one size. Give one of them a name of its own, or leave it as it is: "
                f"dynamic={{{name!r}: {{{first.lstrip('.')!r}: ...}}}}."
            )

    def check_used(self) -> None:
        """Raises if a name was given that no array has."""
        unused = [name for name in self.symbols if name not in self.sizes]
        if unused:
            raise ExportError(
                f"The dynamic dimensions {unused} are of no array: the arguments that dynamic= "
                "names have none."
            )


def _layout(leaf: Any, shape: Sequence[Any]) -> Any:
    """The sharding over a mesh, if the array or its stand-in has one that fits the shape.

    JAX does not split dynamic dimensions, because nobody knows that they divide. The compiler then
    finds the layout, and callers may pass the array split.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    split = zip(shape, sharding.spec, strict=False)
    return None if any(e is not None and type(s) is not int for s, e in split) else sharding
