# SPDX-License-Identifier: Apache-2.0
"""Arguments that a compiled function treats in a way of their own.

*Static* arguments are compiled for by value, *donated* ones lend their memory. Here is found which
they are, and what static ones are compared by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardax.core.errors import ShardaxError, StaticArgumentError
from shardax.core.node import Object
from shardax.core.static import Static
from shardax.transforms.closures import parameter_name, parameters_of
from shardax.transforms.static_leaves import AUTO, NUMBERS, argument_key


def resolve_arguments(
    function: Any, argnums: Any, argnames: Any, kind: str, error: type[ShardaxError]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Resolves positions and names of arguments from each other, as ``jax.jit`` does.

    Args:
        function: The user's function.
        argnums: ``static_argnums`` or ``donate_argnums`` as given.
        argnames: ``static_argnames`` or ``donate_argnames`` as given.
        kind: ``"static"`` or ``"donate"``, for messages.
        error: What to raise.

    Returns:
        (positions, names), sorted; negative positions are counted from the end.

    Raises:
        ShardaxError: Of the given class, if the function has no such argument.
    """
    positions, names = as_tuple(argnums), as_tuple(argnames)
    parameters = parameters_of(function)
    if parameters is None or not (positions or names):
        return positions, names
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    count = len(positional)
    shown = getattr(function, "__name__", function)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for position in positions:
        if not variadic and not -count <= position < count:
            raise error(
                f"{kind}_argnums={position} is out of range: {shown} has {count} positional "
                f"parameters ({', '.join(positional)})."
            )
    known = [p.name for p in parameters]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in names:
            if name not in known:
                raise error(
                    f"{kind}_argnames has {name!r}, but {shown} has only ({', '.join(known)})."
                )
    positions = tuple(p % count if p < 0 else p for p in positions)
    all_positions = {
        *positions,
        *(positional.index(n) for n in names if n in positional),
    }
    all_names = {*names, *(positional[p] for p in positions if p < count)}
    return tuple(sorted(all_positions)), tuple(sorted(all_names))


def check_static_option(static: str | None) -> None:
    """Raises if the option ``static`` has a value that it does not take.

    Raises:
        StaticArgumentError: Saying which it takes.
    """
    if static not in (None, AUTO, NUMBERS):
        raise StaticArgumentError(
            f"static={static!r}: the option takes 'auto', which makes everything static that is no "
            f"array, number or Module; 'numbers', which makes Python's numbers static, too; or "
            f"None. To choose arguments, use static_argnums or static_argnames."
        )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Returns an option that may be None, one entry or several, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, str)) else tuple(value)


def static_argument(value: Any, function: Any, place: int | str) -> Static:
    """Returns a static argument by its exact key.

    Args:
        value: What was passed.
        function: The user's function, for messages.
        place: Position or name of the argument.

    Raises:
        StaticArgumentError: If the value is a Module or not hashable.
    """
    label = parameter_name(function, place) if isinstance(place, int) else place
    if isinstance(value, Object):
        raise StaticArgumentError(
            f"The argument {label!r} is static, but a {type(value).__name__} was passed: its "
            f"values would be frozen into the program and "
            f"changes missed. Pass it as an ordinary argument: a Module's configuration is static "
            f"by itself."
        )
    try:
        return Static(value, argument_key(value))
    except TypeError as error:
        raise StaticArgumentError(
            f"The static argument {label!r} of {getattr(function, '__name__', function)} is "
            f"{value!r} of type {type(value).__name__}, which is "
            f"not hashable ({error}). Pass arrays as ordinary arguments; use tuples instead of "
            f"lists, frozen dataclasses instead of dicts, and an sx.Module for what holds arrays "
            f"or changes."
        ) from error


class Signature(NamedTuple):
    """A call, sorted into what is passed and what identifies it.

    Attributes:
        args: Positional arguments that are not static.
        kwargs: Keyword arguments that are not static.
        static: (position or name, value) of each static argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: tuple[tuple[Any, Static], ...]


def separate_static(
    function: Any,
    positions: Sequence[int],
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Signature:
    """Sorts the arguments of a call.

    Args:
        function: The user's function, for messages.
        positions: Which positions are static.
        names: Which names are static.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        StaticArgumentError: If a static one is a Module or not hashable.
    """
    static: list[tuple[Any, Static]] = [
        (i, static_argument(args[i], function, i)) for i in positions if i < len(args)
    ]
    static += [
        (name, static_argument(kwargs[name], function, name)) for name in names if name in kwargs
    ]
    dynamic = tuple(arg for i, arg in enumerate(args) if i not in positions)
    named = {name: arg for name, arg in kwargs.items() if name not in names}
    return Signature(dynamic, named, tuple(static))
