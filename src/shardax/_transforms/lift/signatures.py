# SPDX-License-Identifier: Apache-2.0
"""Parameters of a user's function: names, positions, and arguments given by name.

The path of an argument, in messages and prefixes, begins with the name of its parameter. Options
name arguments by position or by name, as in ``jax.jit``.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardax._core.errors import ShardaxError
from shardax._core.graph.paths import PyTree
from shardax._transforms import errors

Parameters = tuple[inspect.Parameter, ...]

# Parameters by function, which may close over a model: held weakly, they keep nothing alive.
_PARAMETERS: weakref.WeakKeyDictionary[Any, Parameters | None] = weakref.WeakKeyDictionary()


def parameters_of(function: object) -> Parameters | None:
    """Returns a function's parameters, or None if it has no signature."""
    # A comparison of the user's own is not run: it could find those of another callable.
    if type(function).__eq__ is not object.__eq__:
        return _find_parameters(function)

    try:
        return _PARAMETERS[function]
    except KeyError:
        parameters = _PARAMETERS[function] = _find_parameters(function)
        return parameters
    except TypeError:  # without a hash, or without weak references
        return _find_parameters(function)


def _find_parameters(function: Any) -> Parameters | None:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def positional_names(function: object) -> list[str]:
    """Returns the names of a function's positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        parameter.name for parameter in parameters_of(function) or () if parameter.kind in kinds
    ]


def parameter_name(function: object, position: int) -> str:
    """Returns the name of a function's positional parameter, for messages."""
    names = positional_names(function)
    return names[position] if position < len(names) else f"args[{position}]"


def argument_path(function: object, key: int | str) -> tuple[str, ...]:
    """Returns the path of an argument, given by position or name: its parameter's name."""
    return (parameter_name(function, key) if isinstance(key, int) else key,)


def by_position(
    function: object,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    most: int | None = None,
    fill: str | None = None,
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Moves arguments given by name to their positions in the signature.

    Args:
        function: The user's function.
        args: The arguments given by position.
        kwargs: The arguments given by name.
        most: How many positions at most.
        fill: Where defaults are filled in: in the ``"gaps"`` before the last argument given by
            name, for ``"all"`` that is missing, or nowhere (None). As an argument, a default is
            traced.

    Returns:
        The positional arguments, and those that stay by name.
    """
    positional, named = list(args), dict(kwargs)

    missing = list((parameters_of(function) or ())[len(positional) : most])
    if fill == "gaps":
        while missing and missing[-1].name not in named:
            missing.pop()

    for parameter in missing:
        has_default = parameter.default is not parameter.empty
        is_positional = parameter.kind is not parameter.KEYWORD_ONLY
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in named:
            positional.append(named.pop(parameter.name))
        elif fill is not None and has_default and is_positional:
            positional.append(parameter.default)
        else:
            break

    if fill == "all":
        for parameter in parameters_of(function) or ():
            if (
                parameter.kind is parameter.KEYWORD_ONLY
                and parameter.default is not parameter.empty
            ):
                named.setdefault(parameter.name, parameter.default)
    return tuple(positional), named


def resolve_arguments(
    function: object, argnums: object, argnames: object, kind: str, error: type[ShardaxError]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Resolves positions and names of arguments from each other, as ``jax.jit`` does.

    Args:
        function: The user's function.
        argnums: An option of positions, one or several.
        argnames: An option of names, one or several.
        kind: What the options are called: ``"static"`` for ``static_argnums``.
        error: The class of the error for arguments that there are not.

    Returns:
        All positions and all names, sorted; an argument that can be given either way is in both.
    """
    positions, names = as_tuple(argnums), as_tuple(argnames)
    for position in positions:
        if isinstance(position, bool) or not hasattr(position, "__index__"):
            raise error(_wrong_type(f"{kind}_argnums", position, kind))
    for name in names:
        if not isinstance(name, str):
            raise error(_wrong_type(f"{kind}_argnames", name, kind))

    parameters = parameters_of(function)
    if parameters is None or not (positions or names):
        return positions, names

    positional = positional_names(function)
    count = len(positional)
    function_name = getattr(function, "__name__", function)
    is_variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    for position in positions:
        if not is_variadic and not -count <= position < count:
            raise error(
                f"{kind}_argnums={position} is out of range: {function_name} has {count} "
                f"positional parameters ({', '.join(positional)})."
            )

    parameter_names = [parameter.name for parameter in parameters]
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for name in names:
        if not takes_any_name and name not in parameter_names:
            raise error(
                f"{kind}_argnames has {name!r}, but {function_name} has only "
                f"({', '.join(parameter_names)})."
            )

    positions = [position % count if position < 0 else position for position in positions]
    positions_of_names = [positional.index(name) for name in names if name in positional]
    names_of_positions = [positional[position] for position in positions if position < count]
    all_positions = {*positions, *positions_of_names}
    all_names = {*names, *names_of_positions}
    return tuple(sorted(all_positions)), tuple(sorted(all_names))


def _wrong_type(option: str, entry: object, kind: str) -> str:
    return (
        f"{option}={entry!r} is of type {type(entry).__name__}; positions are integers, "
        f"{kind}_argnums=0, and names are strings, {kind}_argnames='x'."
    )


def as_tuple(option: object) -> tuple[Any, ...]:
    """Returns an option, that is None, one entry or several, as a tuple."""
    if option is None:
        return ()
    if isinstance(option, Iterable) and not isinstance(option, str):
        return tuple(option)
    return (option,)


def check_callable(function: object, name: str) -> None:
    """Raises TransformError unless what a transform is given can be called."""
    if not callable(function):
        raise errors.not_callable(name, function)
