# SPDX-License-Identifier: Apache-2.0
"""``Jitted``: a Module around another one, whose call is compiled.

What is compiled belongs to the body's class and the options, not to one object: layers of one
structure share their programs, and so do copies of a model. While something else is being compiled
around it, a ``Jitted`` calls its body directly and becomes part of that program.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from shardax.core._jax import is_eager, trace_state
from shardax.core.frames import local
from shardax.core.modules import Module
from shardax.core.static import exact_key
from shardax.transforms.around import Around
from shardax.transforms.jit import Jit, jit
from shardax.transforms.static_arguments import as_tuple

_UNSTAGED = frozenset({"grad", "jvp", "value_and_grad", "vjp", "vmap"})
"""Transforms that run a function's operations one by one unless something is compiled inside."""


class Jitted(Around):
    """A Module whose call is compiled.

    Args:
        module: The body, a Module that can be called.
        **jit_options: Options of ``jit``, positions being those of the arguments of the call.
            ``static`` is ``"auto"`` unless given: strings, functions and flags in the arguments
            are compiled for by value.

    Attributes:
        body: It itself, not a copy. Its attributes are also those of the wrapper.

    Raises:
        LayerConfigError: If it is no Module, or cannot be called.
        StaticArgumentError: If it has no such argument as an option names.
        DonationError: Likewise.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> layer = sx.Jitted(mlp)
        >>> layer.body is mlp, layer.up is mlp.up, layer(jnp.ones((1, 2))).shape
        (True, True, (1, 2))
        >>> [path for path, _ in sx.iter_variables(layer)][0]
        ('body', 'gate', 'kernel')
    """

    _own = frozenset({"body", "compiler"})

    def __init__(self, module: Module, **jit_options: Any) -> None:
        super().__init__(module)
        self.compiler = compiler(jit_options)
        self.compiler.compiled(module, ())  # so that an option that does not fit is refused here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the body, compiled, or as a part of what is being compiled around it."""
        if self.compiler.is_inlined and _is_staged():
            return self.body(*args, **kwargs)
        return self.compiler.compiled(self.body, args)(self.body, *args, **kwargs)


class Compiler:
    """Options of ``jit``, with what was compiled under them: static configuration.

    Args:
        options: The options.
        key: What they compare by.

    Attributes:
        is_inlined: Whether a call inside another compiled function needs no program of its own,
            which it does where shardings are declared.
    """

    def __init__(self, options: Mapping[str, Any], key: Any) -> None:
        self.options = dict(options)
        self.key = key
        declared = [self.options.get(name) for name in ("in_shardings", "out_shardings")]
        self.is_inlined = declared == [None, None]
        self._functions: dict[Any, Jit] = {}

    def compiled(self, body: Any, args: Sequence[Any]) -> Jit:
        """Returns the compiled call of a class.

        Args:
            body: An instance.
            args: The positional arguments.
        """
        key: Any = type(body).__call__
        if not self.is_inlined:
            key = (key, len(args))
        known = self._functions.get(key)
        if known is None:
            options = _for_method(self.options, len(args))
            known = self._functions[key] = jit(type(body).__call__, **options)
        return known

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Compiler) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __deepcopy__(self, memo: Any) -> Compiler:
        return self

    def __reduce__(self) -> Any:
        return (compiler, (self.options,))

    def __repr__(self) -> str:
        return f"jit({', '.join(f'{name}={option!r}' for name, option in self.options.items())})"


_known: weakref.WeakValueDictionary[Any, Compiler] = weakref.WeakValueDictionary()
"""Compilers in use, by options."""


def compiler(options: Mapping[str, Any]) -> Compiler:
    """Returns the one compiler of some options.

    Args:
        options: Options of ``jit``.
    """
    given = {"static": "auto", **options}
    try:
        key = exact_key(tuple(sorted(given.items())))
    except TypeError:  # an option that cannot be compared: each use is one of its own
        return Compiler(given, object())
    found = _known.get(key)
    if found is None:
        found = _known[key] = Compiler(given, key)
    return found


def _for_method(options: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Returns options for a function that takes the body as its first argument.

    Args:
        options: Options for a call of the body.
        count: The number of positional arguments of the call.
    """
    shifted = dict(options)
    for name in ("static_argnums", "donate_argnums"):
        if name in options:
            places = as_tuple(options[name])
            shifted[name] = tuple(place + 1 if place >= 0 else place for place in places)
    declared = options.get("in_shardings")
    if declared is not None:
        several = isinstance(declared, (tuple, list)) and type(declared) in (tuple, list)
        shifted["in_shardings"] = (None, *(declared if several else [declared] * count))
    return shifted


def _is_staged() -> bool:
    """Whether a program is being made around this call, of which it becomes a part.

    A plain JAX transform counts as such, because it most often is ``jax.jit``.
    """
    if is_eager():
        return False
    frame = local.frame
    if frame is None or frame.trace != trace_state():
        return True
    while frame is not None:
        if frame.name not in _UNSTAGED:
            return True
        frame = frame.parent
    return False
