# SPDX-License-Identifier: Apache-2.0
"""Reading any Python value, without calling anything of the user's.

Attributes are read by the descriptors of the class, and items by the methods of the native base
class: methods of the user's classes (``__getattr__``, ``__iter__``) may run code, and make what
they return.
"""

from __future__ import annotations

import collections
import sys
import types
import weakref
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# Packages whose instances (meshes, policies, loggers) are no values of the user's. A class that was
# made by ``exec`` without a module name says that it is of ``builtins``.
LIBRARIES = frozenset(
    {"jax", "jaxlib", "numpy", "shardax", *sys.stdlib_module_names} - {"builtins"}
)

# Flags of a class: made at run time, and without a constructor.
_HEAP_TYPE, _NO_CONSTRUCTOR = 1 << 9, 1 << 7


def package_of(kind: type) -> str:
    """Returns the name of the package that a class is of, "" if it does not say."""
    module = kind.__module__
    return module.partition(".")[0] if type(module) is str else ""


def is_of_library(kind: type) -> bool:
    """Whether a class is one of Python's own, or of ``LIBRARIES``."""
    package = package_of(kind)
    return package in LIBRARIES or (package == "builtins" and not kind.__flags__ & _HEAP_TYPE)


def native_base(kind: type) -> type:
    """Returns the first base class that is written in C."""
    for base in kind.__mro__:
        if not base.__flags__ & _HEAP_TYPE or base.__flags__ & _NO_CONSTRUCTOR:
            return base
        if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType):
            return base
    return object


# --- attributes -----------------------------------------------------------------------------------


class _Storage(NamedTuple):
    """Where instances of a class have their attributes."""

    dictionary: Any  # the descriptor of ``__dict__``, None without one
    slots: tuple[tuple[str, types.MemberDescriptorType], ...]


_storages: weakref.WeakKeyDictionary[type, _Storage] = weakref.WeakKeyDictionary()
_NATIVE_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def _storage_of(kind: type) -> _Storage:
    known = _storages.get(kind)
    if known is not None:
        return known

    dictionary: Any = None
    slots: dict[str, types.MemberDescriptorType] = {}
    for base in kind.__mro__:
        members = vars(base)
        descriptor = members.get("__dict__")
        # Not a property of the user's, which might have that name.
        if dictionary is None and isinstance(descriptor, _NATIVE_DESCRIPTORS):
            dictionary = descriptor
        if "__slots__" in members:
            for name, member in members.items():
                if isinstance(member, types.MemberDescriptorType):
                    slots.setdefault(name, member)

    _storages[kind] = storage = _Storage(dictionary, tuple(slots.items()))
    return storage


def has_attributes(kind: type) -> bool:
    """Whether instances of a class may have attributes of their own."""
    storage = _storage_of(kind)
    return storage.dictionary is not None or bool(storage.slots)


def attributes_of(value: object) -> dict[str, Any]:
    """Returns the attributes of an instance, also those in ``__slots__``."""
    storage = _storage_of(type(value))
    attributes: dict[str, Any] = {}
    if storage.dictionary is not None:
        attributes.update(storage.dictionary.__get__(value))
    for name, member in storage.slots:
        try:
            attributes[name] = member.__get__(value)
        except AttributeError:  # it was never set
            continue
    return attributes


# --- items ----------------------------------------------------------------------------------------

MAPPINGS = (dict, types.MappingProxyType)
SEQUENCES = (list, tuple, collections.deque)
SETS = (set, frozenset)


def items_of_mapping(value: Any) -> list[tuple[Any, Any]]:
    """Returns (key, item) of each entry of a dict or mapping proxy."""
    native: Any = dict if isinstance(value, dict) else types.MappingProxyType
    return list(native.items(value))


def items_of_sequence(value: Any) -> list[Any]:
    """Returns the items of a list, tuple or deque."""
    native: Any = next(kind for kind in SEQUENCES if isinstance(value, kind))
    return list(native.__iter__(value))


def items_of_set(value: Any) -> list[Any]:
    """Returns the items of a set or frozenset, in no order."""
    native: Any = set if isinstance(value, set) else frozenset
    return list(native.__iter__(value))


def items_of_array(value: np.ndarray[Any, Any]) -> list[Any]:
    """Returns the objects that an array of NumPy holds; none of one that holds numbers."""
    return np.ndarray.ravel(value).tolist() if value.dtype.hasobject else []


# --- ways -----------------------------------------------------------------------------------------

# How a part was reached from a value: the way to what holds it, and the last step; None for the
# value itself. Walks over values keep a way for all that waits, so it shares what it can.
Way: TypeAlias = tuple[Any, Any] | None


def steps_of(way: Way) -> list[Any]:
    """Returns the steps of a way, the first one first."""
    steps: list[Any] = []
    while way is not None:
        way, step = way
        steps.append(step)
    steps.reverse()
    return steps
