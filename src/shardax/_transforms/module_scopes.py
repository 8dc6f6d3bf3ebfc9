# SPDX-License-Identifier: Apache-2.0
"""Scopes of Modules in compiled programs.

Instructions of a program keep the names of the scopes (``jax.named_scope``) in which they were
traced. In the block of ``module_scopes`` the methods of Modules open one, named by the path of the
Module: for that, each Module has a subclass of its class, whose methods are wrapped.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
from collections.abc import Callable, Generator
from typing import Any

import jax

from shardax._core.graph.paths import Path, format_path
from shardax._core.module import Module
from shardax._core.state.split_merge import iter_modules
from shardax._transforms.lift.transformed import wraps

# The attribute of a Module that names its scope: its path in the block of ``module_scopes``, or a
# fixed name (``set_scope``). An attribute, so that inner transforms, which build Modules anew, keep
# it.
_SCOPE = "shardax_scope"

# The path of the Module whose method is running.
_current_path: contextvars.ContextVar[Path] = contextvars.ContextVar(
    "shardax_scope_within", default=()
)


@contextlib.contextmanager
def module_scopes(tree: object) -> Generator[None]:
    """Makes the methods of Modules open scopes, named by paths from the Module that calls them.

    If the model calls ``layers[0]``, which calls its ``attn``, which calls its ``q``, the scopes
    are ``layers[0]/attn/q``.
    """
    # The last of several paths to one Module names it.
    paths = {id(module): path for path, module in iter_modules(tree)}
    changed = [(module, type(module)) for path, module in iter_modules(tree) if path]
    for module, kind in changed:
        object.__setattr__(module, _SCOPE, paths[id(module)])
        object.__setattr__(module, "__class__", scoped(kind))
    try:
        yield
    finally:
        for module, kind in changed:
            object.__setattr__(module, "__class__", kind)
            vars(module).pop(_SCOPE, None)


def set_scope(module: Module, name: str) -> None:
    """Makes the methods of a Module open a scope of a fixed name, for good."""
    setattr(module, _SCOPE, name)
    object.__setattr__(module, "__class__", scoped(type(module)))


@functools.cache  # one for each class, for good: JAX keeps the classes of its pytrees
def scoped(kind: type[Module]) -> type[Module]:
    """Returns a subclass whose methods open a scope, for instances to change to."""
    return subclass(kind, lambda name, method: _in_scope(method))


def subclass(
    kind: type[Module], around: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> type[Module]:
    """Returns a subclass of the same name, whose public methods are wrapped by ``around``."""
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, Module) or base is Module:
            continue
        for name, method in vars(base).items():
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and isinstance(method, types.FunctionType):
                methods[name] = around(name, method)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made = type(kind)(kind.__name__, (kind,), methods | names)
    assert issubclass(made, kind)
    return made


def _in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self, *args, **kwargs):
        scope = vars(self).get(_SCOPE)
        if not scope:  # a Module made in the block
            return method(self, *args, **kwargs)
        if not isinstance(scope, tuple):  # a fixed name
            with jax.named_scope(scope):
                return method(self, *args, **kwargs)

        outer = _current_path.get()
        if outer == scope:  # a method of its own that another one calls
            return method(self, *args, **kwargs)

        is_below = scope[: len(outer)] == outer
        path = scope[len(outer) :] if is_below else scope
        token = _current_path.set(scope)
        try:
            with jax.named_scope(format_path(path).removeprefix(".")):
                return method(self, *args, **kwargs)
        finally:
            _current_path.reset(token)

    return call


_KEY_HAS_NAMES = "jax_compilation_cache_include_metadata_in_key"


@contextlib.contextmanager
def compiled_with_names() -> Generator[None]:
    """Keeps JAX's compilation cache from programs with other names of scopes."""
    before = getattr(jax.config, _KEY_HAS_NAMES)
    jax.config.update(_KEY_HAS_NAMES, True)
    try:
        yield
    finally:
        jax.config.update(_KEY_HAS_NAMES, before)
