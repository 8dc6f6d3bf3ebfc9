# SPDX-License-Identifier: Apache-2.0
"""Versions of JAX, and its public parts outside its top-level namespace.

No other module asks for a version, or for what only some have. Each entry says since when it is as
it is, and holds for all versions from ``OLDEST`` to ``NEWEST``. What it promises is tested in
``tests/core/objects/test_versions.py``.

A *trace state* is an opaque token of the transform that is tracing: two tokens are equal exactly
when they were taken under one trace.

``jax.extend`` is imported on first use: it imports Pallas, which takes a third of the time that
``import shardax`` would take.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer as Tracer

from shardax._core.graph.paths import PyTree

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
    from jax.extend.core import Jaxpr as Jaxpr
    from jax.extend.core import JaxprEqn as JaxprEqn
    from jax.extend.core import Literal as Literal
    from jax.extend.core import Var as Var
    from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun

# The versions of JAX that the tests run on; docs/install.md says when.
OLDEST, NEWEST = (0, 10), (0, 12)

# ``jax.jit(inline=INLINE)`` puts a function into the program that calls it while that is traced.
# 0.10: True. From 0.11 there is an enum, and from 0.12 True means only when it is lowered.
_kinds: Any = getattr(jax, "Inline", None)
INLINE: Any = True if _kinds is None else _kinds.JAX_EARLY


def is_prng_key(value: Any) -> bool:
    """Whether a value is an array of typed random keys."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def check_version(version: tuple[int, ...] = jax.__version_info__) -> None:
    """Refuses a JAX too old; warns of one newer than tested."""
    installed, oldest, newest = (".".join(map(str, each)) for each in (version, OLDEST, NEWEST))
    if version[:2] < OLDEST:
        raise ImportError(
            f"shardax needs JAX {oldest} or newer, and JAX {installed} is installed. "
            f"Update it: pip install --upgrade 'jax>={oldest}'."
        )
    if version[:2] > NEWEST:
        next_version = f"{NEWEST[0]}.{NEWEST[1] + 1}"
        warnings.warn(
            f"JAX {installed} is newer than the versions that shardax is tested with ({oldest} to "
            f"{newest}). If something fails: pip install 'jax<{next_version}', or a newer shardax.",
            stacklevel=2,
        )


check_version()


def __getattr__(name: str) -> Any:
    if name in ("Literal", "jaxpr_as_fun"):
        return getattr(importlib.import_module("jax.extend.core"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_sharding_type_error(error: Exception) -> bool:
    """Whether JAX asks for the layout of a result over Explicit mesh axes."""
    # 0.10 to 0.12 have no public name for the class of this error.
    return type(error).__name__ == "ShardingTypeError"


def trace_state() -> Any:
    """Returns the token of the current trace."""
    # 0.10 to 0.12. The convention is the one that tells every trace from the others.
    from jax.extend.core import get_opaque_trace_state

    state = functools.partial(get_opaque_trace_state, convention="nnx")
    globals()["trace_state"] = state  # from now on without this function around it
    return state()


# Functions of JAX 0.10 to 0.12 that ask for ``__jax_array__`` only to say that they do not call it.
ARRAYS_ONLY = "but only arrays are taken there."
_TYPE_QUERIES = frozenset({"bind", "canonicalize_value", "shaped_abstractify", "typeof"})


def refused_argument(argument: object) -> str | None:
    """Returns what to say if JAX is about to refuse an object."""
    # Called for a look at ``__jax_array__``. If JAX renames these functions, its own error comes.
    frame = sys._getframe(2)
    if frame.f_code.co_name not in _TYPE_QUERIES:
        return None

    subject = "What was given to a function of JAX"

    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "jax":
        name = frame.f_code.co_name
        home = next((m for m in ("jax.lax", "jax") if hasattr(sys.modules[m], name)), None)
        for parameter, value in frame.f_locals.items() if home else ():
            items = value if isinstance(value, (list, tuple)) else (value,)
            if any(item is argument for item in items):
                subject = f"The argument {parameter} of {home}.{name}"
                break
        frame = frame.f_back

    return (
        f"{subject} is a {argument!r}, {ARRAYS_ONLY} Pass its value: variable.value, or "
        "variable[...]. Functions of jax.numpy and operators take the Variable itself."
    )


# Functions of JAX 0.10 to 0.12 that call a user's function with arguments which they put together
# from leaves: those of custom_vjp, custom_jvp, custom_gradient, custom_vmap and others.
_CALLERS = ("flatten_fun", "_flatten_")
_TREES = frozenset({"jax._src.tree_util", "jax._src.tree", "jax.tree", "jax.tree_util"})


def rebuilds_arguments() -> bool:
    """Whether JAX is rebuilding an argument of a user's function."""
    # If JAX renames these functions, an eager call is no longer recognized.
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not (module in _TREES or module.startswith("shardax.")):
            return module.startswith("jax.") and frame.f_code.co_name.startswith(_CALLERS)
        frame = frame.f_back
    return False


def asks_from_c() -> bool:
    """Whether JAX looks for ``__jax_array__`` from C++."""
    # JAX 0.10 to 0.12. It takes every error for a no; from Python 3.13 all but AttributeError are
    # printed.
    return sys._getframe(2).f_code.co_name == "bind"


@functools.cache
def eager() -> Any:
    """Returns the token of eager execution: no transform is tracing."""
    # Taken in a new thread, because in this one something may be tracing.
    states: list[PyTree] = []
    thread = threading.Thread(target=lambda: states.append(trace_state()))
    thread.start()
    thread.join()
    return states[0]


def open_jaxpr(program: Any) -> Any:
    """Returns a program without what holds its constants."""
    # To JAX 0.10 that is an object around it; from 0.11 the program holds them itself.
    return getattr(program, "jaxpr", program)


def is_jaxpr(value: object) -> bool:
    """Returns whether a value is a program of JAX, open or closed."""
    from jax.extend.core import ClosedJaxpr, Jaxpr

    return isinstance(value, (Jaxpr, ClosedJaxpr))


def with_constants_as_inputs(program: Any) -> Any:
    """Returns an open program whose first inputs are the constants of a closed one."""
    opened = open_jaxpr(program)
    if not opened.constvars:
        return opened
    return opened.replace(constvars=[], invars=[*opened.constvars, *opened.invars])


def with_inner(program: Any, opened: Any) -> Any:
    """Returns a program with the constants of the first and the equations of the second."""
    if not hasattr(program, "consts") or program is opened:
        return opened
    return type(program)(opened, program.consts)


def evaluate(opened: Any, inputs: list[Any]) -> list[Any]:
    """Returns the outputs of an open program without constants."""
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

    return list(jaxpr_as_fun(ClosedJaxpr(opened, []))(*inputs))


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yields the programs inside an equation."""
    for value in jax.tree.leaves(list(equation.params.values())):
        inner = open_jaxpr(value)
        if hasattr(inner, "eqns"):
            yield inner


def never_changes_closures(function: types.FunctionType) -> bool:
    """Whether what a function closed over never changes, sets as well."""
    # From JAX 0.12 policies such as ``save_only_these_names("a")`` are functions that close over a
    # set; to 0.11 they compare by what they were given.
    package = function.__globals__.get("__package__") or ""
    return package.split(".")[0] == "jax"


def jit_options(function: object) -> dict[str, Any]:
    """Returns the options of a function that ``jax.jit`` made, for another."""
    # There is no public way to them; this is for JAX 0.10 to 0.12.
    jit_info = getattr(function, "_jit_info", None)
    if jit_info is None:
        raise TypeError("this version of JAX does not tell the options of a jitted function")

    def options_of(kind: str):
        leaves, treedef = (getattr(jit_info, f"{kind}_{part}") for part in ("leaves", "treedef"))
        options_flat = [None if type(x).__name__ == "UnspecifiedValue" else x for x in leaves]
        return treedef.unflatten(options_flat)

    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    options = {name: getattr(jit_info, name) for name in names}
    options |= {name: getattr(jit_info, name) for name in ("keep_unused", "device", "backend")}
    options["compiler_options"] = dict(jit_info.compiler_options_kvs) or None
    options |= {kind: options_of(kind) for kind in ("in_shardings", "out_shardings")}
    return {name: value for name, value in options.items() if value not in (None, (), False)}


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which an array's shards differ (``shard_map``)."""
    # 0.10 to 0.12; abstract values that are no arrays have no such thing.
    manual_type = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if manual_type is None else manual_type.varying


def outside_inner_regions(policy: Callable[..., bool] | None) -> Callable[..., bool] | None:
    """Returns a remat policy without values of regions within this one."""
    # JAX cannot hand on what the forward pass of a ``shard_map`` within another one keeps: the
    # program does not verify (0.10 to 0.12). Results of such a region can be kept by their names.
    here = jax.sharding.get_abstract_mesh().manual_axes
    return policy if policy is None or not here else _outside_regions_within(policy, here)


@functools.lru_cache(maxsize=256)
def _outside_regions_within(policy: Callable[..., bool], here: tuple[str, ...]):
    # One for each policy, as JAX compares them by identity.
    def keeps(primitive, *arrays, **options):
        axes = jax.sharding.get_abstract_mesh().manual_axes
        return set(axes) <= set(here) and policy(primitive, *arrays, **options)

    return keeps
