# SPDX-License-Identifier: Apache-2.0
"""Modules: Python objects with Variables in their attributes.

A Module is an ordinary object: attributes are set in ``__init__`` or anywhere else. Assignment
sorts values: Variables, Modules and arrays are *data*; lists and dicts become tracked containers;
tuples stay tuples, and so do classes registered with JAX that hold data; everything else is *static
configuration* and must be hashable, which is checked on assignment, where the mistake is made,
rather than at the first compiled call (``_core.stored``).

Arrays are kept in hidden Variables, in ``_array_attributes`` and not in ``__dict__``; attribute
access returns the array.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from shardax._core.containers import empty_like
from shardax._core.explain import attribute_errors as errors
from shardax._core.frames import Frame, check_structural_write, owner_here
from shardax._core.graph.definitions import ModuleDef
from shardax._core.graph.flatten import GraphWalk
from shardax._core.graph.handlers import Handler, Pairs, has_parts, register
from shardax._core.graph.paths import Path, PyTree
from shardax._core.graph.pytrees import register_graph
from shardax._core.object import Decode, Encode, Object, epoch
from shardax._core.state import bind
from shardax._core.stored import (
    copy_array_attributes,
    from_stored,
    holds_arrays,
    same_structure,
    to_stored,
    write_through,
)
from shardax._core.threads import in_one_step
from shardax._core.variable import Variable
from shardax._core.variable_types import Intermediate, Perturbation

_ABSENT = object()


def _append(sown: tuple[Any, ...], value: object) -> tuple[Any, ...]:
    return (*sown, value)


# By these names shardax walks and copies Modules; with a user's own it would silently go wrong.
_RESERVED = {
    "_allocate",
    "_array_attributes",
    "_check_objects_of_class",
    "_flat",
    "_flatten",
    "_lock",
    "_marked",
    "_owner",
    "_unflatten",
}

_OBJECTS_OF_CLASS = "_objects_of_class"


class Module(Object):
    """Base of models and layers: data and configuration as attributes.

    Subclasses write an ordinary ``__init__``; there is nothing to call or declare. A Module is also
    a pytree (``_core.graph.flatten``).

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> class Scale(sx.Module):
        ...     def __init__(self, size):
        ...         self.factor = sx.Param(jnp.ones(size), axes=("embed",))
        ...         self.calls = sx.Variable(0)
        ...     def __call__(self, x):
        ...         self.calls += 1
        ...         return self.factor * x
        >>> model = Scale(3)
        >>> sx.jit(model)(jnp.arange(3.0)).tolist(), int(model.calls)
        ([0.0, 1.0, 2.0], 1)
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_array_attributes",
        "_flat",
        "_lock",
        "_marked",
        "_owner",
    )
    _array_attributes: dict[str, Any]
    # Names of Variables, Modules and containers of such that are attributes of the class.
    _objects_of_class: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        return cls._allocate(owner_here(), None)

    def __init_subclass__(cls, **kwargs: object) -> None:
        if "__slots__" in vars(cls):
            raise errors.module_with_slots(cls)
        for name in sorted(_RESERVED):
            owner = next(each for each in cls.__mro__ if name in vars(each))
            if owner is not Module:
                raise errors.reserved_in_class(cls, name, owner)
        super().__init_subclass__(**kwargs)
        register_graph(cls)

        names = [name for name, value in vars(cls).items() if has_parts(value)]
        for base in cls.__bases__:
            names.extend(getattr(base, _OBJECTS_OF_CLASS, ()))
        if names:
            setattr(cls, _OBJECTS_OF_CLASS, tuple(dict.fromkeys(names)))

    @classmethod
    def _allocate(cls, owner: Frame | None, lock: str | None) -> Self:
        module = object.__new__(cls)
        set_slot = object.__setattr__
        set_slot(module, "_owner", owner)
        set_slot(module, "_lock", lock)
        set_slot(module, "_marked", False)
        set_slot(module, "_flat", None)
        set_slot(module, "_array_attributes", {})
        return module

    # --- attributes ------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        if name in _RESERVED:
            raise errors.reserved_name(name)
        if name == "__call__":
            raise errors.call_of_instance(type(self))

        # Properties and other descriptors of the class come first, as for any object.
        descriptor = getattr(type(self), name, None)
        if descriptor is not None and hasattr(type(descriptor), "__set__"):
            object.__setattr__(self, name, value)
            return

        # An array over an array is a write of a value: the structure stays.
        where = f"attribute {name!r} of {type(self).__name__}"
        attributes, array_attributes = self.__dict__, self._array_attributes
        old = attributes.get(name, _ABSENT)
        if name in array_attributes:
            old = array_attributes[name]
        if old is not _ABSENT and (value is old or write_through(old, value, where)):
            return

        check_structural_write(self, where)
        new = to_stored(value, where)
        if holds_arrays(new):
            attributes.pop(name, None)
            array_attributes[name] = new
        else:
            array_attributes.pop(name, None)
            attributes[name] = new

        if self._marked and (old is _ABSENT or not same_structure(old, new)):
            epoch.advance(self)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            array_attributes = object.__getattribute__(self, "_array_attributes")
            if name in array_attributes:
                return from_stored(array_attributes[name])
            if hasattr(type(self), name):  # a property that raised AttributeError: says its text
                return object.__getattribute__(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        check_structural_write(self, f"attribute {name!r} of {type(self).__name__}")
        if name in self._array_attributes:
            del self._array_attributes[name]
        else:
            object.__delattr__(self, name)
        if self._marked:
            epoch.advance(self)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._array_attributes})

    # --- walking and copying ---------------------------------------------------------------------

    def _flatten(self, encode: Encode) -> ModuleDef:
        if self._objects_of_class:
            self._check_objects_of_class()
        attributes = tuple((name, encode(value, name)) for name, value in self.__dict__.items())
        array_attributes = tuple(
            (name, encode(value, name)) for name, value in self._array_attributes.items()
        )
        return ModuleDef(type(self), attributes, array_attributes)

    def _check_objects_of_class(self) -> None:
        """Raises if an attribute that only the class has holds Variables or Modules."""
        # Not when the class is made: it may be the default of a field of a dataclass.
        for name in self._objects_of_class:
            value = inspect.getattr_static(self, name)
            is_own = name in self.__dict__ or name in self._array_attributes
            if not is_own and has_parts(value):
                raise errors.object_of_class(type(self), name, value)

    def _unflatten(self, definition: ModuleDef, decode: Decode) -> None:
        attributes = self.__dict__
        attributes.clear()
        for name, child in definition.attributes:
            attributes[name] = decode(child)
        object.__setattr__(
            self,
            "_array_attributes",
            {name: decode(child) for name, child in definition.array_attributes},
        )

    def __copy__(self) -> Self:
        """Returns a shallow copy; array attributes are copied."""
        copied = self._allocate(owner_here(), None)
        copied.__dict__.update(self.__dict__)
        where = f"a copy of {type(self).__name__}"
        for name, value in self._array_attributes.items():
            copied._array_attributes[name] = copy_array_attributes(value, where)
        return copied

    def __getstate__(self) -> Any:
        return (dict(self.__dict__), self._array_attributes)

    def __setstate__(self, state: Any) -> None:
        attributes, array_attributes = state
        self.__dict__.update(attributes)
        object.__setattr__(self, "_array_attributes", array_attributes)

    def __repr__(self) -> str:
        from shardax._core.explain.drawing import (
            module_repr,  # a drawing is of Modules: it stands above
        )

        return module_repr(self)

    # --- recording and modes ----------------------------------------------------------------------

    def sow(
        self,
        name: str,
        value: object,
        type: type[Variable] = Intermediate,
        *,
        reduce_fn: Callable[[Any, Any], object] = _append,
        init_fn: Callable[[], PyTree] = tuple,
    ) -> None:
        """Appends a value to the tuple in the Variable ``name``.

        So a function can record what it computes on the way.

        Args:
            name: Attribute of the Variable.
            value: An array or pytree of arrays.
            type: Variable type to make; ``sx.pop(model, sx.Intermediate)`` collects what was sown.
            reduce_fn: What to do instead of appending: returns what to keep, of what is there and
                the value.
            init_fn: Returns what is there before the first value.

        Raises:
            StateMismatchError: If ``name`` is already something else.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> class Square(sx.Module):
            ...     def __call__(self, x):
            ...         self.sow("seen", x)
            ...         return x**2
            >>> square = Square()
            >>> square(jnp.float32(3)).tolist(), [float(x) for x in square.seen.value]
            (9.0, [3.0])
            >>> for x in (1.0, 5.0, 2.0):
            ...     square.sow("most", x, reduce_fn=jnp.maximum, init_fn=lambda: 0.0)
            >>> float(square.most)
            5.0
        """
        with in_one_step():
            present = self.__dict__.get(name)
            if present is None:
                setattr(self, name, type(reduce_fn(init_fn(), value)))
            elif isinstance(present, type) and (
                reduce_fn is not _append or isinstance(present.value, tuple)
            ):
                present.value = reduce_fn(present.value, value)
            else:
                raise errors.sown_over(self.__class__, name, type, present)

    def perturb(self, name: str, value: Any, type: type[Variable] = Perturbation) -> Any:
        """Adds a Variable of zeros, whose gradient is that of ``value``.

        Args:
            name: Attribute of the Variable, made on first use with the shape and dtype of
                ``value``.
            value: An array.
            type: Variable type to make; differentiate with ``sx.grad(f, wrt=sx.Perturbation)``.

        Returns:
            ``value`` plus the Variable.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> class Square(sx.Module):
            ...     def __call__(self, x):
            ...         return self.perturb("inner", x) ** 2
            >>> square = Square()
            >>> _ = square(jnp.float32(3))
            >>> float(sx.grad(lambda m: m(jnp.float32(3)), wrt=sx.Perturbation)(square)["inner"])
            6.0
        """
        if name not in self.__dict__:
            setattr(self, name, type(jnp.zeros_like(value)))
        return value + getattr(self, name).value

    def stateless_call(
        self, variables: object, /, *args: object, **kwargs: object
    ) -> tuple[PyTree, PyTree]:
        """Calls this Module with frozen values for its slots.

        Args:
            variables: Frozen values for the slots; see ``shardax.stateless_call``.
            *args: Arguments of the call; slots in them are filled too.
            **kwargs: Likewise.

        Returns:
            (result, new frozen values, arranged like ``variables``).

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> slots, values = sx.unbind(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), freeze=True)
            >>> result, values = slots.stateless_call(values, jnp.ones((1, 2)))
            >>> result.shape, len(values)
            ((1, 3), 2)
        """
        return bind.stateless_call(self, variables, *args, **kwargs)

    def set_attributes(
        self, *filters: object, raise_if_not_found: bool = True, **attributes: object
    ) -> None:
        """Sets attributes on all Modules that already have them.

        That is this Module and every one below.

        Args:
            *filters: Module classes or predicates ``(path, module) -> bool``; a Module matching any
                is changed. None: all.
            raise_if_not_found: Whether an attribute that no chosen Module has is an error.
            **attributes: New values.

        Raises:
            ModuleAttributeError: If an attribute was found nowhere; nothing is changed then.

        Example:
            >>> import shardax as sx
            >>> model = sx.nn.Sequential(sx.nn.Dropout(0.5, rngs=sx.Rngs(0)))
            >>> model.set_attributes(sx.nn.Dropout, rate=0.1)
            >>> model.layers[0].rate
            0.1
        """
        targets: list[tuple[Module, str]] = []
        for path, module in modules_in(self):
            if filters and not any(_matches(each, path, module) for each in filters):
                continue
            for name in attributes:
                if name in module.__dict__ or name in module._array_attributes:
                    targets.append((module, name))

        missing = attributes.keys() - {name for _, name in targets}
        if missing and raise_if_not_found:
            raise errors.attributes_nowhere(type(self), sorted(missing))
        for module, name in targets:
            setattr(module, name, attributes[name])

    def train(self, **attributes: object) -> None:
        """Puts the model into training mode.

        That is ``deterministic=False, use_running_average=False`` where layers have them.

        Args:
            **attributes: Further attributes to set where present.

        Example:
            >>> import shardax as sx
            >>> dropout = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
            >>> dropout.eval(); dropout.deterministic
            True
            >>> dropout.train(); dropout.deterministic
            False
        """
        self.set_attributes(
            deterministic=False, use_running_average=False, raise_if_not_found=False, **attributes
        )

    def eval(self, **attributes: object) -> None:
        """Puts the model into evaluation mode: the opposite of ``train``."""
        self.set_attributes(
            deterministic=True, use_running_average=True, raise_if_not_found=False, **attributes
        )


def modules_in(root: object) -> Iterator[tuple[Path, Module]]:
    """Yields (path, Module) of each Module in an object."""
    walk = GraphWalk()
    walk.encode(root, ())
    for path, item in zip(walk.paths, walk.objects, strict=True):
        if isinstance(item, Module):
            yield path, item


def _matches(module_filter: Any, path: Path, module: Module) -> bool:
    """Whether a Module class, or a predicate of path and Module, matches."""
    if isinstance(module_filter, type):
        return isinstance(module, module_filter)
    return bool(module_filter(path, module))


def _fill(module: Module, pairs: Pairs) -> None:
    """Gives a Module other attributes, in stored form."""
    vars(module).clear()
    module._array_attributes.clear()
    for name, stored in pairs:
        attributes = module._array_attributes if holds_arrays(stored) else vars(module)
        attributes[name] = stored


register_graph(Module)
register(
    Module,
    Handler(
        "Module",
        children=lambda module: [*vars(module).items(), *module._array_attributes.items()],
        empty=empty_like,
        fill=_fill,
        mutable=True,
        is_object=True,
        in_models=True,
        size="shrinks",
    ),
)
