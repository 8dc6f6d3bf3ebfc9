# SPDX-License-Identifier: Apache-2.0
"""Modules, and the drawings behind their ``repr``.

A Module is an ordinary object: attributes are set in ``__init__`` or anywhere else. Assignment
sorts values: Variables, Modules and arrays are *data*; lists and dicts become tracked containers;
tuples stay tuples, and so do classes registered with JAX that hold data; everything else is *static
configuration* and must be hashable, which is checked on assignment, where the mistake is made,
rather than at the first compiled call. Arrays are kept in hidden Variables
(``_core.containers``); attribute access returns the array.

A *drawing* is a tree that mirrors a value: Modules, containers and what leads to objects have
parts; everything else is a *leaf*. An object met again is a leaf that refers to the first
occurrence. ``repr`` has a line for each leaf; ``shardax.view`` draws the same tree in other ways.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from shardax._core import containers
from shardax._core.errors import ModuleAttributeError, StateMismatchError
from shardax._core.frames import Frame, check_structural_write, owner_here
from shardax._core.frozen import FrozenVariable
from shardax._core.graph.flatten import GraphWalk, ModuleDef, register_graph
from shardax._core.graph.handlers import Handler, Pairs, handler_of, has_parts, register
from shardax._core.graph.paths import Path, PyTree, format_path, line_of
from shardax._core.object import Object, epoch
from shardax._core.state import bind
from shardax._core.threads import in_one_step
from shardax._core.variable import ArrayAttribute, Intermediate, Param, Perturbation, Variable

_ABSENT = object()


def _append(seen: tuple[object, ...], value: object) -> tuple[Any, ...]:
    return (*seen, value)


# By these names shardax walks and copies Modules; with a user's own it would silently go wrong.
_RESERVED = {"_allocate", "_flatten", "_unflatten", "_array_attributes"} | {
    "_check_objects_of_class",
    *("_flat", "_lock", "_marked", "_owner"),
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
            raise ModuleAttributeError(
                f"{cls.__name__} defines __slots__, but shardax finds a Module's data in its "
                f"attributes. Remove __slots__."
            )
        for name in sorted(_RESERVED):
            owner = next(each for each in cls.__mro__ if name in vars(each))
            if owner is not Module:
                of = "" if owner is cls else f" of {owner.__name__}"
                raise ModuleAttributeError(
                    f"{cls.__name__} has the attribute {name}{of}, by which shardax itself walks "
                    f"and copies Modules. Give it another name, such as {name.lstrip('_')}."
                )
        super().__init_subclass__(**kwargs)
        register_graph(cls)
        own = [name for name, value in vars(cls).items() if has_parts(value)]
        inherited = [
            name for base in cls.__bases__ for name in getattr(base, _OBJECTS_OF_CLASS, ())
        ]
        if own or inherited:
            setattr(cls, _OBJECTS_OF_CLASS, tuple(dict.fromkeys((*own, *inherited))))

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
            raise ModuleAttributeError(
                f"The attribute name {name!r} is reserved by shardax; choose another."
            )
        descriptor = getattr(type(self), name, None)
        if descriptor is not None and hasattr(type(descriptor), "__set__"):
            object.__setattr__(self, name, value)
            return
        where = f"attribute {name!r} of {type(self).__name__}"
        attributes, boxed = self.__dict__, self._array_attributes
        old = boxed[name] if name in boxed else attributes.get(name, _ABSENT)
        if old is not _ABSENT and (value is old or containers.write_through(old, value, where)):
            return
        check_structural_write(self, where)
        new = containers.box(value, where)
        if containers.is_boxed(new):
            attributes.pop(name, None)
            boxed[name] = new
        else:
            boxed.pop(name, None)
            attributes[name] = new
        if self._marked and (old is _ABSENT or not containers.same_structure(old, new)):
            epoch.advance(self)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            boxed = object.__getattribute__(self, "_array_attributes")
            if name in boxed:
                return containers.unbox(boxed[name])
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

    def _flatten(self, encode: Any) -> ModuleDef:
        if self._objects_of_class:
            self._check_objects_of_class()
        attributes = tuple((name, encode(value, name)) for name, value in self.__dict__.items())
        boxed = tuple((name, encode(value, name)) for name, value in self._array_attributes.items())
        return ModuleDef(type(self), attributes, boxed)

    def _check_objects_of_class(self) -> None:
        """Raises if an attribute that only the class has holds Variables or Modules."""
        # Not when the class is made: it may be the default of a field of a dataclass.
        for name in self._objects_of_class:
            value = inspect.getattr_static(self, name)
            is_own = name in self.__dict__ or name in self._array_attributes
            if not is_own and has_parts(value):
                raise ModuleAttributeError(
                    f"The {type(value).__name__} {name!r} is an attribute of the class "
                    f"{type(self).__name__}, which belongs to no Module: it would be part of no "
                    f"state, gradient, optimizer or checkpoint. Set it in __init__: "
                    f"self.{name} = ...; a copy for each, sx.clone({type(self).__name__}.{name})."
                )

    def _unflatten(self, definition: ModuleDef, decode) -> None:
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
        copied._array_attributes.update(
            (name, containers.copy_boxes(value, where))
            for name, value in self._array_attributes.items()
        )
        return copied

    def __getstate__(self) -> Any:
        return (dict(self.__dict__), self._array_attributes)

    def __setstate__(self, state: Any) -> None:
        attributes, boxed = state
        self.__dict__.update(attributes)
        object.__setattr__(self, "_array_attributes", boxed)

    def __repr__(self) -> str:

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
                raise StateMismatchError(
                    f"sow({name!r}) on {self.__class__.__name__} needs a {type.__name__} holding "
                    f"a tuple, but .{name} is {present!r}. Sow under another name, or remove the "
                    f"attribute first."
                )

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
        chosen = [
            m
            for path, m in modules_in(self)
            if not filters or any(_matches(f, path, m) for f in filters)
        ]
        targets = [
            (m, name)
            for m in chosen
            for name in attributes
            if name in m.__dict__ or name in m._array_attributes
        ]
        missing = attributes.keys() - {name for _, name in targets}
        if missing and raise_if_not_found:
            raise ModuleAttributeError(
                f"No Module in this {type(self).__name__} has the attribute(s) {sorted(missing)}; "
                f"nothing was changed. Check the spelling, or pass raise_if_not_found=False."
            )
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


def _matches(chosen, path: object, module: Module) -> bool:
    if isinstance(chosen, type):
        return isinstance(module, chosen)
    predicate: Callable[[Any, Module], Any] = chosen
    return bool(predicate(path, module))


def _fill(module: Module, pairs: Pairs) -> None:
    attributes, boxed = vars(module), module._array_attributes
    attributes.clear()
    boxed.clear()
    for name, item in pairs:
        (boxed if containers.is_boxed(item) else attributes)[name] = item


register_graph(Module)
register(
    Module,
    Handler(
        "Module",
        children=lambda module: [*vars(module).items(), *module._array_attributes.items()],
        empty=containers.empty_like,
        fill=_fill,
        mutable=True,
        is_object=True,
        in_models=True,
        size="shrinks",
    ),
)


# --- drawings -------------------------------------------------------------------------------------

_INDENT = "  "
_MAX_LINES = 200


class Drawing:
    """One place of a drawing."""

    __slots__ = ("again", "code", "first", "label", "marked", "name", "parts", "path", "value")

    def __init__(self, label: str, code: str, path: Path, value: Any) -> None:
        self.label = label  # what is written before it: "kernel="
        self.code = code  # what leads here from the place above: ".kernel", "[0]"
        self.path = path
        self.value = value
        self.name = containers.title_of(value)
        self.parts: list[Drawing] | None = None  # None for a leaf
        self.first: Drawing | None = None  # of an object met again, where it was met first
        self.again: list[Path] = []  # of an object met first, where it was met again
        self.marked = False  # whether to point it out

    def places(self) -> Iterator[Drawing]:
        """Yields this place and every one below, in order."""
        yield self
        for part in self.parts or ():
            yield from part.places()

    def leaves(self) -> Iterator[Drawing]:
        """Yields every leaf, in order."""
        return (place for place in self.places() if place.parts is None)

    def lines(
        self,
        describe: Callable[[Drawing], str],
        note: Callable[[Drawing], str] = lambda drawing: "",
        depth: int = 0,
    ) -> Iterator[str]:
        """Yields the lines of the text."""
        start, end = f"{_INDENT * depth}{self.label}", "," if depth else ""
        if self.first is not None:
            yield f"{start}<same {self.name} as {format_path(self.first.path)}>{end}"
        elif self.parts is None:
            yield f"{start}{describe(self)}{end}{note(self)}"
        elif not self.parts:
            yield f"{start}{self.name}(){end}{note(self)}"
        else:
            yield f"{start}{self.name}({note(self)}"
            for part in self.parts:
                yield from part.lines(describe, note, depth + 1)
            yield f"{_INDENT * depth}){end}"


def draw(value: object) -> Drawing:
    """Draws a value and everything below it."""
    return _draw(Drawing("", "", (), value), {})


def _draw(drawing: Drawing, seen: dict[int, Drawing]) -> Drawing:
    value = drawing.value
    if isinstance(value, Object):
        first = drawing.first = seen.get(id(value))
        if first is not None:
            first.again.append(drawing.path)
            return drawing
        seen[id(value)] = drawing
    handler = handler_of(value)
    children = handler.children(value) if handler.in_models else ()
    if not isinstance(value, Module) and not any(has_parts(child) for _, child in children):
        return drawing
    if isinstance(value, types.MethodType):
        drawing.name = f"method {value.__name__}"
    drawing.parts = []
    for key, child in children:
        path = drawing.path if key is None else (*drawing.path, key)
        part = Drawing(*handler.text(value, key), path, child)
        drawing.parts.append(_draw(part, seen))
    return drawing


def module_repr(module: Module) -> str:
    """Returns the text of ``repr(module)``."""
    drawing = draw(module)
    first, *others = drawing.lines(leaf_text)
    lines = [first + parameter_count(drawing), *others]
    if len(lines) > _MAX_LINES:
        lines = [
            *lines[:_MAX_LINES],
            f"... {len(lines) - _MAX_LINES} more lines (sx.view.to_text shows all)",
        ]
    return "\n".join(lines)


def leaf_text(leaf: Drawing) -> str:
    """Returns the text of a leaf."""
    shown = line_of(leaf.value)
    if isinstance(leaf.value, ArrayAttribute):  # hidden: users see the array
        shown = shown.removeprefix(f"{leaf.name}(").removesuffix(")")
    return shown


def parameter_count(drawing: Drawing) -> str:
    """Returns a comment with the number of parameters."""
    count = sum(
        math.prod(leaf.value._value.shape)
        for leaf in drawing.leaves()
        if leaf.first is None and _is_parameter(leaf.value) and hasattr(leaf.value._value, "shape")
    )
    return f"  # {count:,} parameters" if count else ""


def _is_parameter(value: object) -> bool:
    kind = value.variable_type if isinstance(value, FrozenVariable) else type(value)
    return issubclass(kind, Param)
