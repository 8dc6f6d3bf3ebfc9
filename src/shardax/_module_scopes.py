# SPDX-License-Identifier: Apache-2.0
"""Scopes of Modules in compiled programs.

Instructions of a program keep the names of the scopes (``jax.named_scope``) in which they were
traced. In the block of ``module_scopes`` the methods of Modules open one.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax

from shardax import Module, iter_modules
from shardax.extend import Path, format_path, wrap_methods

_PLACE = "shardax_scope"
_within: contextvars.ContextVar[Path] = contextvars.ContextVar("shardax_scope_within", default=())


@contextlib.contextmanager
def module_scopes(tree: object) -> Generator[None]:
    """Makes Modules open scopes named by their paths."""
    # Relative to that of the Module in whose method another is called: layers[0]/attn/q.
    changed = [(module, type(module)) for path, module in iter_modules(tree) if path]
    places = {id(module): path for path, module in iter_modules(tree)}
    for module, kind in changed:
        # An attribute, so that inner transforms, which build Modules anew, keep it.
        object.__setattr__(module, _PLACE, places[id(module)])
        object.__setattr__(module, "__class__", scoped(kind))
    try:
        yield
    finally:
        for module, kind in changed:
            object.__setattr__(module, "__class__", kind)
            vars(module).pop(_PLACE, None)


def set_scope(module: Module, name: str) -> None:
    """Makes the methods of a Module open a scope, for good."""
    setattr(module, _PLACE, name)
    object.__setattr__(module, "__class__", scoped(type(module)))


@functools.cache  # one for each class, for good: JAX keeps the classes of its pytrees
def scoped(kind: type[Module]) -> type[Module]:
    """A subclass whose methods open a scope, for instances to change to."""
    return wrap_methods(kind, lambda name, method: _in_scope(method))


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


def _in_scope(method: Callable[..., object]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        place = vars(self).get(_PLACE)
        if not isinstance(place, tuple):  # a fixed name, or a Module made in the block
            with jax.named_scope(place) if place else contextlib.nullcontext():
                return method(self, *args, **kwargs)
        outer = _within.get()
        if outer == place:  # a method of its own that another one calls
            return method(self, *args, **kwargs)
        inner = place[len(outer) :] if place[: len(outer)] == outer else place
        token = _within.set(place)
        try:
            with jax.named_scope(format_path(inner).removeprefix(".")):
                return method(self, *args, **kwargs)
        finally:
            _within.reset(token)

    return call
