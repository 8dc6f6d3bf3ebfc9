# SPDX-License-Identifier: Apache-2.0
"""Errors about what stands in attributes of Modules and in tracked containers.

Each function returns the error of one mistake, and its name says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardax._core.errors import ModuleAttributeError, StateMismatchError, StaticAttributeError

if TYPE_CHECKING:
    from shardax._core.variable import Variable

# --- static values --------------------------------------------------------------------------------


def no_array_dtype(value: object, where: str) -> StaticAttributeError:
    """Returns the error of an array of a dtype that JAX does not have."""
    return StaticAttributeError(
        f"Cannot use an array of dtype {getattr(value, 'dtype', 'object')} as {where}: JAX has "
        f"no such dtype. Encode it as numbers; or, if "
        f"it is configuration, keep it as a tuple: tuple(array.tolist())."
    )


def untracked_data(value: object, where: str, reason: str) -> StaticAttributeError:
    """Returns the error of arrays in a set, an iterator or the like."""
    return StaticAttributeError(
        f"Cannot use {value!r} of type {type(value).__name__} as {where}: {reason}, so it "
        f"would be part of no state, gradient or checkpoint. Ways out: use a list, dict or "
        f"tuple, such as list(value)."
    )


def not_hashable(value: object, where: str, error: TypeError) -> StaticAttributeError:
    """Returns the error of what is neither data nor hashable configuration."""
    return StaticAttributeError(
        f"Cannot use {value!r} of type {type(value).__name__} as {where}: it is neither data "
        f"(an array, Variable, Module, or list, dict, tuple of these) nor hashable "
        f"configuration ({error}). Ways out: wrap arrays that live inside it in "
        f"sx.Variable(...); use a tuple or frozenset instead of a set; make a class of your "
        f"own a frozen dataclass, a sx.Module, or give it __hash__ and __eq__."
    )


def of_flax(value: object, where: str) -> StaticAttributeError:
    """Returns the error of a Module, Variable or other object of Flax NNX."""
    return StaticAttributeError(
        f"Cannot use a {type(value).__name__} of Flax as {where}: no transform, optimizer or "
        f"checkpoint of shardax would see its arrays. Ways out: take a module of Flax as a part "
        f"of the model, sx.bridge.from_nnx(module); take the value of a Variable, "
        f"sx.Param(variable[...]); streams are sx.Rngs(0). The command shardax migrate translates "
        f"programs."
    )


# --- arrays over Variables ------------------------------------------------------------------------


def array_over_frozen(form: str, variable_type: type[Variable], where: str) -> StaticAttributeError:
    """Returns the error of an array assigned over a slot or frozen value (``form``)."""
    return StaticAttributeError(
        f"Cannot assign an array over the {form} of a {variable_type.__name__} in {where}: "
        f"the Variable with its type and metadata would be lost. Put Variables in first, "
        f"sx.bind(model, variables) or sx.thaw(model); or assign a new one: "
        f"sx.{variable_type.__name__}(array)."
    )


def array_over_variable(variable_type: type[Variable], where: str) -> StaticAttributeError:
    """Returns the error of an array assigned over a Variable."""
    return StaticAttributeError(
        f"Cannot assign an array over the {variable_type.__name__} in {where}: the Variable with "
        f"its type and metadata would be lost. Write into it instead (name[...] = array, or "
        f"name.value = array); to really replace it, assign a new Variable: "
        f"sx.{variable_type.__name__}(array)."
    )


# --- Modules --------------------------------------------------------------------------------------


def module_with_slots(module_type: type) -> ModuleAttributeError:
    """Returns the error of a Module class that defines ``__slots__``."""
    return ModuleAttributeError(
        f"{module_type.__name__} defines __slots__, but shardax finds a Module's data in its "
        f"attributes. Remove __slots__."
    )


def reserved_in_class(module_type: type, name: str, owner: type) -> ModuleAttributeError:
    """Returns the error of a class attribute with a name of shardax's own."""
    of_owner = "" if owner is module_type else f" of {owner.__name__}"
    return ModuleAttributeError(
        f"{module_type.__name__} has the attribute {name}{of_owner}, by which shardax itself walks "
        f"and copies Modules. Give it another name, such as {name.lstrip('_')}."
    )


def reserved_name(name: str) -> ModuleAttributeError:
    """Returns the error of an assignment to a name of shardax's own."""
    return ModuleAttributeError(
        f"The attribute name {name!r} is reserved by shardax; choose another."
    )


def call_of_instance(module_type: type) -> ModuleAttributeError:
    """Returns the error of an assignment to ``__call__`` of one Module."""
    name = module_type.__name__
    return ModuleAttributeError(
        f"Python looks __call__ up on the class: this {name} would be called as before. Give the "
        f"class another one, or wrap the Module: in a Module that holds it and has its own "
        f"__call__; or, for a function of its result, in model = sx.nn.Sequential(model, function)."
    )


def object_of_class(module_type: type, name: str, value: object) -> ModuleAttributeError:
    """Returns the error of a Variable or Module that is an attribute of the class."""
    return ModuleAttributeError(
        f"The {type(value).__name__} {name!r} is an attribute of the class "
        f"{module_type.__name__}, which belongs to no Module: it would be part of no "
        f"state, gradient, optimizer or checkpoint. Set it in __init__: "
        f"self.{name} = ...; a copy for each, sx.clone({module_type.__name__}.{name})."
    )


def sown_over(
    module_type: type, name: str, variable_type: type[Variable], present: object
) -> StateMismatchError:
    """Returns the error of ``sow`` where something else has the name."""
    return StateMismatchError(
        f"sow({name!r}) on {module_type.__name__} needs a {variable_type.__name__} holding "
        f"a tuple, but .{name} is {present!r}. Sow under another name, or remove the "
        f"attribute first."
    )


def attributes_nowhere(module_type: type, names: list[str]) -> ModuleAttributeError:
    """Returns the error of ``set_attributes`` with names that no Module has."""
    return ModuleAttributeError(
        f"No Module in this {module_type.__name__} has the attribute(s) {names}; "
        f"nothing was changed. Check the spelling, or pass raise_if_not_found=False."
    )
