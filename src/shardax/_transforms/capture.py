# SPDX-License-Identifier: Apache-2.0
"""Capture: what a model sows and perturbs during one call, as States.

In a call, in this order:

1. Variables with initial values are set, or made where there are none (``init``).
2. The methods of Modules get another class, so that they sow their results (``method_outputs``).
3. The function runs. What it sows stands on the Modules of the model itself.
4. The values of the captured types are collected into States.
5. Variables of these types that are new are taken off again, and those that were there before get
   their old values back, also after an exception. So the model is the same after the call as
   before, except for its other effects.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax

from shardax._core.errors import ForeignMutationError, StateMismatchError
from shardax._core.frames import local
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.init.rng import Rngs, RngStream
from shardax._core.module import Module
from shardax._core.object import Object, epoch
from shardax._core.state.frozen import Origin
from shardax._core.state.split_merge import iter_modules, iter_variables
from shardax._core.state.state import State
from shardax._core.threads import OneThread
from shardax._core.variable import Variable
from shardax._core.variable_types import Perturbation
from shardax._transforms.errors import TransformError
from shardax._transforms.lift.transformed import takes_options, wraps
from shardax._transforms.method_wrapping import subclass

VariableType = type[Variable[Any]]


@takes_options
def capture(
    function: Any,
    *variable_types: VariableType,
    init: State | Mapping[Any, PyTree] | None = None,
    method_outputs: VariableType | None = None,
) -> PyTree:
    """Makes a function that also returns what Modules sow during the call.

    Args:
        function: A Module, a method of one, or a function with the model as its first argument. If
            it is a Variable type: returns a decorator for these types.
        *variable_types: Types of the Variables to return, such as ``sx.Intermediate``.
        init: Values by path of Variables during the call, such as a State of perturbations that an
            earlier call returned. Those that do not exist are made, by the types in the State, or
            as ``sx.Perturbation``.
        method_outputs: A Variable type: what public methods of Modules return is sown too, as
            ``output`` of a call and as ``name_output`` of another method; results other than arrays
            are left out.

    Returns:
        A function of the same arguments that returns (result, State, ...) with one State for each
        type. Without types it returns the result alone.

    Raises:
        TransformError: If there is no Module to look into.
        StateMismatchError: When called, if a path of ``init`` leads to no Module.
        ConcurrentWriteError: When called, if another thread captures from the same Modules.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> class Square(sx.Module):
        ...     def __call__(self, x):
        ...         self.sow("seen", x)
        ...         return x**2
        >>> square = Square()
        >>> y, seen = sx.capture(square, sx.Intermediate)(jnp.float32(3))
        >>> float(seen["seen"][0]), hasattr(square, "seen")
        (3.0, False)
        >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> y, outputs = sx.capture(mlp, method_outputs=sx.Intermediate)(jnp.ones((1, 2)))
        >>> list(outputs), outputs["up"]["output"][0].shape
        (['gate', 'up', 'down', 'output'], (1, 4))
    """
    captured = variable_types
    if isinstance(function, type) and issubclass(function, Variable):
        return functools.partial(
            _capture_decorated, (function, *captured), init=init, method_outputs=method_outputs
        )

    if method_outputs is not None and method_outputs not in captured:
        captured = (*captured, method_outputs)
    for kind in captured:
        if not (isinstance(kind, type) and issubclass(kind, Variable)):
            raise TransformError(
                f"sx.capture takes types of Variables after the function, such as "
                f"sx.Intermediate, not {kind!r}."
            )
    if not callable(function):
        raise TransformError(
            f"sx.capture takes a function, a method or a callable Module, not a "
            f"{type(function).__name__}."
        )
    owner = function.__self__ if isinstance(function, types.MethodType) else function

    @wraps(function)
    def run(*args, **kwargs) -> PyTree:
        model = args[0] if args else None
        if isinstance(owner, Module):
            model = owner
        if not isinstance(model, Object):
            raise TransformError(
                f"The function given to sx.capture has a model as its first argument, but was "
                f"called with a {type(model).__name__} there. Give sx.capture the Module or a "
                f"method of it, or pass the model first."
            )

        paths = {id(module): path for path, module in iter_modules(model)}
        with _capturing.hold(paths), _only_during(model, captured, init or {}) as collect:
            with _methods_sow(model, method_outputs):
                result = function(*args, **kwargs)
            states = collect()
        return (result, *states) if captured else result

    return run


def _capture_decorated(
    kinds: tuple[VariableType, ...], function: Callable[..., PyTree], **options: Any
) -> Callable[..., PyTree]:
    return capture(function, *kinds, **options)


# What a call attaches stands on the model itself, so one thread would take what others sow.
_capturing = OneThread("captures from the Module", "and would get what this one sows")


# --- Variables during the call ----------------------------------------------------------------


class _Before(NamedTuple):
    """A Variable that was there before the call."""

    variable: Variable[Any]
    value: Any


@contextlib.contextmanager
def _only_during(
    model: Object, captured: tuple[VariableType, ...], init: State | Mapping[Any, PyTree]
) -> Generator[Callable[[], list[State]]]:
    """Sets initial values, and afterwards undoes what the call did to captured Variables.

    Yields a function that returns, at the end of the call, a State for each captured type.
    """
    before = {
        id(variable): _Before(variable, variable.value)
        for _, variable in iter_variables(model)
        if isinstance(variable, captured)
    }
    created = _set_initial(model, State(init), before)

    def attached() -> dict[int, tuple[Module, str]]:
        """Returns (Module, attribute) of each captured Variable that is new, by ``id``."""
        places: dict[int, tuple[Module, str]] = {}
        for _, module in iter_modules(model):
            for name, item in vars(module).items():
                is_captured = isinstance(item, captured) or id(item) in created
                if is_captured and id(item) not in before:
                    places[id(item)] = (module, name)
        return places

    def collect() -> list[State]:
        values: list[dict[Path, Leaf]] = [{} for _ in captured]
        origins: list[dict[Path, Origin]] = [{} for _ in captured]
        new = attached()
        for path, variable in iter_variables(model, *captured) if captured else ():
            value = variable.value
            known = before.get(id(variable))
            if known is None and id(variable) not in new:
                continue  # in no attribute of a Module
            if known is not None:
                if value is known.value:
                    continue
                value = _new_part(known.value, value)

            kinds = [index for index, kind in enumerate(captured) if isinstance(variable, kind)]
            values[kinds[0]][path] = value
            origins[kinds[0]][path] = Origin(type(variable), variable._metadata)
        return [State.from_flat(*pair) for pair in zip(values, origins, strict=True)]

    try:
        yield collect
    finally:
        for module, name in attached().values():
            delattr(module, name)
        for variable, value in before.values():
            if variable.value is not value:
                variable.value = value


def _new_part(old: Any, new: Any) -> Any:
    """Returns what was appended to a tuple, or the new value."""
    if not isinstance(old, tuple) or not isinstance(new, tuple) or len(new) <= len(old):
        return new
    is_appended = all(a is b for a, b in zip(old, new, strict=False))
    return new[len(old) :] if is_appended else new


def _set_initial(model: Object, init: State, before: dict[int, _Before]) -> set[int]:
    """Sets values by path, noting those before; returns the ``id`` of each new Variable."""
    modules = dict(iter_modules(model))
    created: set[int] = set()
    for path, value in init.flat().items():
        holder = modules.get(path[:-1])
        if holder is None or not path:
            raise StateMismatchError(
                f"init of sx.capture has a value for {format_path(path)}, but there is no Module "
                f"at {format_path(path[:-1])}. Take it from an earlier call: y, init = "
                f"sx.capture(model, sx.Perturbation)(x)."
            )

        name = str(path[-1])
        present = vars(holder).get(name)
        if isinstance(present, Variable):
            before.setdefault(id(present), _Before(present, present.value))
            present.value = value
            continue

        kind = init.origins()[path].variable_type
        variable = (Perturbation if kind is Variable else kind)(value)
        try:
            setattr(holder, name, variable)
        except ForeignMutationError as error:
            raise ForeignMutationError(_attached_in_closure(model, path)) from error
        created.add(id(variable))
    return created


def _attached_in_closure(model: object, path: Path) -> str:
    kind, frame = type(model).__name__, local.frame
    assert frame is not None  # else nothing would be refused
    return (
        f"sx.capture makes a Variable at {format_path(path)}, as init says, but inside sx."
        f"{frame.name} this {kind} was reached through a closure or global, and its structure "
        f"cannot change there. Give the function the model as an argument: def loss(init, model, "
        f"x): return sx.capture(model, init=init)(x); or make the Variable before, by a call of "
        f"the model."
    )


# --- outputs of methods during the call -------------------------------------------------------

_sowing: contextvars.ContextVar[bool] = contextvars.ContextVar("shardax_sowing", default=False)


@contextlib.contextmanager
def _methods_sow(model: object, kind: VariableType | None) -> Generator[None]:
    """Makes the methods of Modules sow their results, by giving each Module another class."""
    if kind is None:
        yield
        return

    modules = [module for _, module in iter_modules(model)]
    changed = [
        (module, type(module)) for module in modules if not isinstance(module, (Rngs, RngStream))
    ]
    for module, plain in changed:
        object.__setattr__(module, "__class__", _sowing_class(plain, kind))
    epoch.advance(*modules)  # structures that are remembered have the plain classes

    token = _sowing.set(True)
    try:
        yield
    finally:
        _sowing.reset(token)
        for module, plain in changed:
            object.__setattr__(module, "__class__", plain)
        epoch.advance(*modules)


@functools.cache  # one for each class and type, since compiled programs depend on both
def _sowing_class(plain: type[Module], kind: VariableType) -> type[Module]:
    """Returns a subclass whose public methods sow what they return as Variables of a type."""

    def around(name: str, method: Callable[..., object]) -> Callable[..., Any]:
        attribute = "output" if name == "__call__" else f"{name}_output"

        @wraps(method)
        def call(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            leaves = jax.tree.leaves(result, is_leaf=lambda item: isinstance(item, Object))
            if _sowing.get() and leaves and all(isinstance(leaf, jax.Array) for leaf in leaves):
                self.sow(attribute, result, kind)
            return result

        return call

    return subclass(plain, around)
