# SPDX-License-Identifier: Apache-2.0
"""Calling a model as a function of values.

A *functional call* takes a model with slots and frozen values for them, and returns the result with
the new values. It changes nothing, so plain JAX transforms can be used on it.
"""

from __future__ import annotations

from typing import Any

import jax

from shardax.core.binding import bound
from shardax.core.errors import BindError, StatelessCallError
from shardax.core.forms import FrozenVariable, frozen
from shardax.core.paths import Path, format_path
from shardax.core.structure import GraphDef, VariableDef
from shardax.core.taken import Taken
from shardax.core.variables import Variable


def stateless_call(tree: Any, variables: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Calls a model with slots as a pure function of the values that belong there.

    Args:
        tree: A callable Module with slots, or one of its methods. Variables that it still has are
            read as they are; writing them is an error.
        variables: Frozen values for the slots: a tuple as ``unbind(model, freeze=True)`` returns
            it, or any pytree of frozen values.
        *args: Arguments of the call; slots in them are filled too, by the same labels.
        **kwargs: Likewise.

    Returns:
        (result, new frozen values, arranged like ``variables``).

    Raises:
        BindError: If the values do not fit the slots, or are not frozen.
        FrozenVariableError: If the call writes a Variable that was left in the model.
        StatelessCallError: If it adds or removes Variables, or changes other structure, which a
            pure function cannot return.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> class Counter(sx.Module):
        ...     def __init__(self):
        ...         self.count = sx.Variable(0)
        ...     def __call__(self, by):
        ...         self.count += by
        ...         return self.count * 10
        >>> slots, values = sx.unbind(Counter(), freeze=True)
        >>> step = jax.jit(lambda values, by: sx.stateless_call(slots, values, by))
        >>> result, values = step(values, 2)
        >>> result, values = step(values, 3)
        >>> int(result), int(values[0])
        (50, 5)
    """
    leaves, treedef = jax.tree.flatten(variables, is_leaf=lambda x: isinstance(x, Variable))
    mutable = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, FrozenVariable)]
    if mutable:
        raise BindError(
            f"stateless_call takes frozen values, but was given {', '.join(sorted(set(mutable)))}. "
            f"Freeze them, sx.freeze(variables); or call the model with its Variables in place, "
            f"sx.bind(model, variables)(...)."
        )
    arguments = (args, kwargs)
    has_slots = any(True for _ in Taken(arguments).places())
    call = (_with_frozen_rest(tree, arguments), arguments if has_slots else None)
    filled, thawed = bound(call, leaves, lambda leaf: leaf.thaw())
    args, kwargs = filled[1] if has_slots else arguments
    before = _structure(filled)
    result = filled[0](*args, **kwargs)
    _check_unchanged(before, _structure(filled))
    return result, treedef.unflatten([frozen(thawed[leaf.label], leaf.label) for leaf in leaves])


def _with_frozen_rest(tree: Any, arguments: Any) -> Any:
    """Returns the tree with its Variables frozen, but for those that are arguments too."""
    given = set(map(id, Taken(arguments).walk.objects))
    taken = Taken(tree)
    items = [(i, taken.walk.objects[i], taken.walk.paths[i]) for i in taken.variables]
    return taken.rebuilt({i: frozen(v, path) for i, v, path in items if id(v) not in given})


def _structure(tree: Any) -> tuple[GraphDef, list[Path]]:
    walk = Taken(tree).walk
    return GraphDef(tuple(walk.definitions), ()), walk.paths


def _check_unchanged(
    before: tuple[GraphDef, list[Path]], after: tuple[GraphDef, list[Path]]
) -> None:
    if before[0] == after[0]:
        return
    old, new = (dict(zip(paths, each.objects, strict=True)) for each, paths in (before, after))
    changed = [p for p in {**old, **new} if old.get(p) != new.get(p)]
    made = [p for p in changed if p not in old and type(new[p]) is VariableDef]
    shown = ", ".join(format_path(path[1:]) for path in (made or changed)[:4])
    what = f"added the Variables {shown}" if made else f"changed the structure of {shown}"
    raise StatelessCallError(
        f"The functional call {what}. It returns new values for the slots that were filled, and "
        f"nothing else, so this would be lost. Make such Variables before they are taken out "
        f"(a first call of the model does, where layers sow or cache); or use sx.jit, which "
        f"carries changes of structure back."
    )
