# SPDX-License-Identifier: Apache-2.0
"""Rematerialisation, and Modules that wrap another Module's call.

``remat`` keeps the inputs of a function for its gradient and computes the rest again. Random
streams are among the inputs, so the second run draws the same numbers.

``Jitted`` and ``Remat`` wrap the call of a Module, their *body*. An attribute that is not the
wrapper's own is read from and written to the body, so a wrapper can take a layer's place; the path
``.kernel`` becomes ``.body.kernel``. A compiled call belongs to the body's class and the options:
layers of one structure share their programs, and so do copies of a model. Inside another
compilation a ``Jitted`` calls its body directly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardax._core._jax import outside_inner_regions, trace_state
from shardax._core.frames import is_eager, local
from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import exact_key
from shardax._core.module import Module
from shardax._transforms.errors import StaticArgumentError, TransformError, unknown_options
from shardax._transforms.jit import eager
from shardax._transforms.jit.jit import Jit, jit
from shardax._transforms.jit.options import JitOptions, with_resolved_arguments
from shardax._transforms.lift import arguments
from shardax._transforms.lift.engine import SingleRunCall, check_operands
from shardax._transforms.lift.signatures import as_tuple, resolve_arguments
from shardax._transforms.lift.transformed import decorator, takes_options, wraps


@decorator
def remat(
    function: Any = None,
    *,
    policy: Callable[..., bool] | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    static: str | None = None,
) -> Any:
    """Makes a function over Modules compute its intermediate values anew when differentiated.

    Results, gradients, random numbers and writes are those of the function itself; only memory and
    time change.

    Args:
        function: A function, method or callable Module. Left out: returns a decorator.
        policy: Which intermediate values are kept all the same, one of
            ``jax.checkpoint_policies``; None: none.
        prevent_cse: As in ``jax.checkpoint``; False is faster inside ``scan`` and under ``jit``
            with a loop around.
        static_argnums: Positions of arguments that are passed on as they are; they must be
            hashable. Booleans and strings that decide what the function does belong here.
        static_argnames: Their names.
        static: ``"auto"`` makes every leaf of the arguments static that is no array, number, Module
            or Variable; ``"numbers"`` Python's numbers, too; as in ``jit``.

    Returns:
        A function of the same arguments.

    Raises:
        StaticArgumentError: If there is no such argument, or when called, if one is a Module or
            not hashable.
        TransformError: When called, if another argument is neither arrays nor objects; when called,
            if the result holds something else than arrays and objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> block = sx.nn.MLP(4, 16, rngs=sx.Rngs(0))
        >>> loss = lambda block, x: sx.remat(block)(x).sum()
        >>> grads = sx.grad(loss)(block, jnp.ones((2, 4)))
        >>> plain = sx.grad(lambda block, x: block(x).sum())(block, jnp.ones((2, 4)))
        >>> all(bool(jnp.array_equal(grads.flat()[p], g)) for p, g in plain.flat().items())
        True
    """
    arguments.check_static_option(static)
    positions, names = resolve_arguments(
        function, static_argnums, static_argnames, "static", StaticArgumentError
    )
    fixed = frozenset({*positions, *names})

    options = (fixed, static, policy, prevent_cse)

    @wraps(function)
    def rematerialised(*args, **kwargs):
        if fixed or static is not None:  # a call by values, which ``eager`` does not compare
            return _remat((function,), options, args, kwargs)
        return eager.run(_remat, (function,), options, args, kwargs)

    return rematerialised


def _remat(
    functions: Sequence[Any],
    options: tuple[Any, ...],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
):
    fixed, static, policy, prevent_cse = options
    arguments.check_static(functions[0], fixed, args, kwargs)
    once = SingleRunCall(
        "remat",
        functions[0],
        args,
        kwargs,
        static=fixed,
        auto_static=static is not None,
        static_numbers=static == arguments.NUMBERS,
    )
    check_operands(once, "make it static: sx.remat(f, static_argnames=...)")

    run = once.program(once.run_whole, "arguments")
    policy = outside_inner_regions(policy)
    transformed = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)
    values, plain = once.graph.values(), list(once.arguments.plain)
    return once.finish(transformed(values, plain, once.arguments.plain_named))


class ModuleWrapper(Module):
    """Base of Modules around another one, whose attributes are also those of the wrapper.

    Args:
        module: The body, a Module that can be called.

    Attributes:
        body: It itself, not a copy.

    Raises:
        TransformError: If it is no Module, or cannot be called.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> class Residual(extend.ModuleWrapper):
        ...     def __call__(self, x):
        ...         return x + self.body(x)
        >>> layer = Residual(sx.nn.Linear(2, 2, rngs=sx.Rngs(0)))
        >>> layer.in_features, layer(jnp.ones((1, 2))).shape
        (2, (1, 2))
    """

    body: Any  # it itself, not a copy
    # Names of the wrapper's own attributes.
    _own = frozenset({"body"})

    def __init__(self, module: Module) -> None:
        if not isinstance(module, Module) or not callable(module):
            raise TransformError(
                f"sx.{type(self).__name__} wraps a Module that can be called, but was given "
                f"{module!r} of type {type(module).__name__}. For a function use sx.jit(f) or "
                "sx.remat(f); for a method, wrap the Module that has it."
            )
        self.body = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            body = self.__dict__.get("body")
            if body is None or name.startswith("__"):
                raise
        return getattr(body, name)

    def __setattr__(self, name: str, value: object) -> None:
        # What ``functools.wraps`` writes is about the wrapper: ``__wrapped__``, ``__name__``.
        if name in self._own or hasattr(Module, name) or name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self.body, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._own:
            super().__delattr__(name)
        else:
            delattr(self.body, name)


# Transforms that run a function's operations one by one unless something is compiled inside.
_UNSTAGED = frozenset({"grad", "jvp", "value_and_grad", "vjp", "vmap"})


class Jitted(ModuleWrapper):
    """A Module whose call is compiled.

    Args:
        module: The body, a Module that can be called.
        **jit_options: Options of ``jit``, positions being those of the arguments of the call.
            ``static`` is ``"auto"`` unless given: strings, functions and flags in the arguments
            are compiled for by value.

    Attributes:
        body: It itself, not a copy. Its attributes are also those of the wrapper.

    Raises:
        TransformError: If it is no Module, or cannot be called; if ``jit`` has no such option.
        StaticArgumentError: If it has no such argument as an option names, or an option is not
            hashable.
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

    def __init__(self, module: Module, **jit_options: object) -> None:
        super().__init__(module)
        known = [field.name for field in dataclasses.fields(JitOptions)]
        if unknown := [name for name in jit_options if name not in known]:
            raise unknown_options("Jitted", unknown, ["module", *known])
        self.compiler = CallCompiler({"static": "auto", **jit_options})
        self.compiler.check(module)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the compiled body, or the body itself inside another compilation."""
        if self.compiler.is_inlined and _is_staged():
            return self.body(*args, **kwargs)
        return self.compiler.compiled(type(self.body), len(args))(self.body, *args, **kwargs)


class CallCompiler:
    """Options of ``jit``, as configuration."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        declared = [self.options.get(name) for name in ("in_shardings", "out_shardings")]
        # Whether a call inside another compiled function needs no program of its own, which it does
        # where shardings are declared.
        self.is_inlined = declared == [None, None]
        self._key = tuple((name, _key(name, options[name])) for name in sorted(options))
        self._hash = hash(self._key)

    def check(self, body: Any) -> None:
        """Raises if an option does not fit the body's arguments; see ``Jitted``."""
        with_resolved_arguments(JitOptions(**self.options), body)

    def compiled(self, kind: type, count: int) -> Jit:
        """Returns the compiled call of a class."""
        key = (kind, self, None if self.is_inlined else count)
        found = _compiled.get(key)
        if found is None:
            found = _compiled[key] = jit(kind.__call__, **self._shifted(count))
        return found

    def _shifted(self, count: int) -> dict[str, Any]:
        """Returns the options of a function whose first argument is the body."""
        shifted = dict(self.options)
        for name in ("static_argnums", "donate_argnums"):
            places = as_tuple(shifted.get(name))
            shifted[name] = tuple(place + 1 if place >= 0 else place for place in places)
        declared = shifted.get("in_shardings")
        if declared is not None:
            several = type(declared) in (tuple, list)
            shifted["in_shardings"] = (None, *(declared if several else [declared] * count))
        return shifted

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, CallCompiler)
            and self._hash == other._hash
            and self._key == other._key
        )

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: object) -> CallCompiler:
        return self

    def __reduce__(self) -> Any:
        return (CallCompiler, (self.options,))

    def __repr__(self) -> str:
        return f"jit({', '.join(f'{name}={option!r}' for name, option in self.options.items())})"


# Compiled calls by class and options. Classes of Modules live on anyway, being pytrees to JAX.
_compiled: dict[Any, Jit] = {}


def _key(name: str, option: object):
    """Returns what an option compares by."""
    try:
        return exact_key(tuple(sorted(option.items())) if isinstance(option, dict) else option)
    except TypeError as error:
        raise StaticArgumentError(
            f"The option {name}={option!r} of sx.Jitted is not hashable ({error}), but is part of "
            "a model's structure. Use tuples instead of lists."
        ) from error


def _is_staged() -> bool:
    """Whether this call becomes part of a program being traced."""
    # A plain JAX transform counts as such, because it most often is ``jax.jit``.
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


class Remat(ModuleWrapper):
    """A Module whose call is recomputed for its gradient.

    Args:
        module: The body, a Module that can be called. Strings, functions and flags may be among its
            arguments.
        policy: As for ``remat``: what is kept all the same.
        prevent_cse: As for ``remat``.

    Attributes:
        body: It itself, not a copy. Its attributes are also those of the wrapper.

    Raises:
        TransformError: If it is no Module, or cannot be called.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> layer = sx.Remat(mlp, policy=jax.checkpoint_policies.dots_saveable)
        >>> loss = lambda layer: layer(jnp.ones((1, 2))).sum()
        >>> grads, plain = sx.grad(loss)(layer), sx.grad(loss)(mlp)
        >>> layer.body is mlp, bool((grads.body.up.kernel == plain.up.kernel).all())
        (True, True)
    """

    _own = frozenset({"body", "policy", "prevent_cse"})

    @takes_options
    def __init__(
        self, module: Module, policy: Callable[..., bool] | None = None, prevent_cse: bool = True
    ) -> None:
        super().__init__(module)
        self.policy = policy
        self.prevent_cse = prevent_cse

    def __call__(self, *args: object, **kwargs: object) -> PyTree:
        """Calls the body."""
        call = remat(self.body, policy=self.policy, prevent_cse=self.prevent_cse, static="auto")
        return call(*args, **kwargs)
