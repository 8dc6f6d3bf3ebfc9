# SPDX-License-Identifier: Apache-2.0
"""Modules: mutable Python objects that hold a model's Variables and configuration.

A Module is an ordinary object: attributes are set in ``__init__`` or anywhere else. Assigning sorts
the value. Variables, Modules and arrays are *data*; lists and dicts become tracked containers;
tuples stay tuples; everything else is *static configuration* and must be hashable, which is checked
here, where the mistake is made, rather than at the first compiled call.

Arrays are kept in hidden Variables (*boxed*), so that they too can be read through closures,
written inside transforms and saved. Attribute access shows the array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax.numpy as jnp

from shardax.core import epoch
from shardax.core.containers import (
    box,
    is_boxed,
    reboxed,
    same_structure,
    unbox,
    write_through,
)
from shardax.core.errors import (
    MissingAttributeError,
    ReservedNameError,
    StateMismatchError,
)
from shardax.core.frames import Frame, check_structural_write, owner_here
from shardax.core.node import Object
from shardax.core.pytree import register_graph
from shardax.core.structure import ModuleDef
from shardax.core.variables import Intermediate, Perturbation, Variable

_ABSENT = object()
_RESERVED = frozenset({"_boxed", "_flat", "_lock", "_marked", "_owner"})


class Module(Object):
    """Base of models and layers: a mutable object with data and configuration as attributes.

    Subclasses write an ordinary ``__init__``; there is nothing to call or declare. A Module is also
    a pytree (``core.pytree``).

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

    __slots__ = ("__dict__", "__weakref__", "_boxed", "_flat", "_lock", "_marked", "_owner")
    _boxed: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return cls._allocate(owner_here(), None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "__slots__" in vars(cls):
            raise ReservedNameError(
                f"{cls.__name__} defines __slots__, but shardax finds a Module's data in its "
                f"attributes. Remove __slots__."
            )
        super().__init_subclass__(**kwargs)
        register_graph(cls)

    @classmethod
    def _allocate(cls, owner: Frame | None, lock: str | None) -> Self:
        module = object.__new__(cls)
        set_slot = object.__setattr__
        set_slot(module, "_owner", owner)
        set_slot(module, "_lock", lock)
        set_slot(module, "_marked", False)
        set_slot(module, "_flat", None)
        set_slot(module, "_boxed", {})
        return module

    # --- attributes ------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _RESERVED:
            _set_reserved(self, name, value)
            return
        descriptor = getattr(type(self), name, None)
        if descriptor is not None and hasattr(type(descriptor), "__set__"):
            object.__setattr__(self, name, value)
            return
        where = f"attribute {name!r} of {type(self).__name__}"
        attributes, boxed = self.__dict__, self._boxed
        old = boxed[name] if name in boxed else attributes.get(name, _ABSENT)
        if old is not _ABSENT and (value is old or write_through(old, value, where)):
            return
        check_structural_write(self, where)
        new = box(value, where)
        if is_boxed(new):
            attributes.pop(name, None)
            boxed[name] = new
        else:
            boxed.pop(name, None)
            attributes[name] = new
        if self._marked and (old is _ABSENT or not same_structure(old, new)):
            epoch.advance()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            boxed = object.__getattribute__(self, "_boxed")
            if name in boxed:
                return unbox(boxed[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        check_structural_write(self, f"attribute {name!r} of {type(self).__name__}")
        if name in self._boxed:
            del self._boxed[name]
        else:
            object.__delattr__(self, name)
        if self._marked:
            epoch.advance()

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._boxed})

    # --- walking and copying ---------------------------------------------------------------------

    def _describe(self, encode: Any) -> ModuleDef:
        attributes = tuple((name, encode(value, name)) for name, value in self.__dict__.items())
        boxed = tuple((name, encode(value, name)) for name, value in self._boxed.items())
        return ModuleDef(type(self), attributes, boxed)

    def _fill(self, definition: ModuleDef, decode: Any) -> None:
        attributes = self.__dict__
        attributes.clear()
        for name, child in definition.attributes:
            attributes[name] = decode(child)
        object.__setattr__(
            self, "_boxed", {name: decode(child) for name, child in definition.boxed}
        )

    def __copy__(self) -> Self:
        """Returns a Module with attributes of its own that share what they hold, but for arrays."""
        copied = self._allocate(owner_here(), None)
        copied.__dict__.update(self.__dict__)
        where = f"a copy of {type(self).__name__}"
        copied._boxed.update((name, reboxed(value, where)) for name, value in self._boxed.items())
        return copied

    def __getstate__(self) -> Any:
        return (dict(self.__dict__), self._boxed)

    def __setstate__(self, state: Any) -> None:
        attributes, boxed = state
        self.__dict__.update(attributes)
        object.__setattr__(self, "_boxed", boxed)

    def __repr__(self) -> str:
        from shardax.core.printing import (
            module_repr,
        )  # printing walks Modules, so it stands above them

        return module_repr(self)

    # --- recording and modes
    # -----------------------------------------------------------------------

    def sow(self, name: str, value: Any, type: type[Variable[Any]] = Intermediate) -> None:
        """Records a value under ``name``: appends it to the tuple in the Variable of that name.

        Args:
            name: Attribute of the Variable.
            value: An array or pytree of arrays.
            type: Variable type to make; ``sx.pop(model, sx.Intermediate)`` collects what was sown.

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
        """
        present = self.__dict__.get(name)
        if present is None:
            setattr(self, name, type((value,)))
        elif isinstance(present, type) and isinstance(present.value, tuple):
            present.value = (*present.value, value)
        else:
            raise StateMismatchError(
                f"sow({name!r}) on {self.__class__.__name__} needs a {type.__name__} holding a "
                f"tuple, but .{name} is {present!r}. Sow under "
                f"another name, or remove the attribute first."
            )

    def perturb(self, name: str, value: Any, type: type[Variable[Any]] = Perturbation) -> Any:
        """Adds a Variable of zeros to ``value``, so that the gradient there can be read.

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

    def stateless_call(self, variables: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Calls this Module, which has slots, as a function of the values that belong there.

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
        from shardax.core.stateless import (
            stateless_call,
        )  # functional calls stand above Modules

        return stateless_call(self, variables, *args, **kwargs)

    def set_attributes(
        self, *filters: Any, raise_if_not_found: bool = True, **attributes: Any
    ) -> None:
        """Sets attributes on this Module and every Module below that already has them.

        Args:
            *filters: Module classes or predicates ``(path, module) -> bool``; a Module matching any
                is changed. None: all.
            raise_if_not_found: Whether an attribute that no chosen Module has is an error.
            **attributes: New values.

        Raises:
            MissingAttributeError: If an attribute was found nowhere; nothing is changed then.

        Example:
            >>> import shardax as sx
            >>> model = sx.nn.Sequential(sx.nn.Dropout(0.5, rngs=sx.Rngs(0)))
            >>> model.set_attributes(sx.nn.Dropout, rate=0.1)
            >>> model.layers[0].rate
            0.1
        """
        from shardax.core.functional import (
            iter_modules,
        )  # the functional interface stands above Modules

        chosen = [
            m
            for path, m in iter_modules(self)
            if not filters or any(_matches(f, path, m) for f in filters)
        ]
        targets = [
            (m, name)
            for m in chosen
            for name in attributes
            if name in m.__dict__ or name in m._boxed
        ]
        missing = attributes.keys() - {name for _, name in targets}
        if missing and raise_if_not_found:
            raise MissingAttributeError(
                f"No Module in this {type(self).__name__} has the attribute(s) {sorted(missing)}; "
                f"nothing was changed. Check the spelling, or "
                f"pass raise_if_not_found=False."
            )
        for module, name in targets:
            setattr(module, name, attributes[name])

    def train(self, **attributes: Any) -> None:
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
            deterministic=False,
            use_running_average=False,
            raise_if_not_found=False,
            **attributes,
        )

    def eval(self, **attributes: Any) -> None:
        """Puts the model into evaluation mode: the opposite of ``train``."""
        self.set_attributes(
            deterministic=True,
            use_running_average=True,
            raise_if_not_found=False,
            **attributes,
        )


def _matches(chosen: Any, path: Any, module: Module) -> bool:
    if isinstance(chosen, type):
        return isinstance(module, chosen)
    predicate: Callable[[Any, Module], Any] = chosen
    return bool(predicate(path, module))


def _set_reserved(module: Module, name: str, value: Any) -> None:
    """Lets the core set its slots and refuses everyone else's attempt to use the names."""
    if name in {"_marked", "_lock"} and (value is None or isinstance(value, (bool, str))):
        object.__setattr__(module, name, value)
        return
    raise ReservedNameError(f"The attribute name {name!r} is reserved by shardax; choose another.")


register_graph(Module)
