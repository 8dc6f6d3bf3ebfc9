# SPDX-License-Identifier: Apache-2.0
"""Rooms above the core take public names and ``shardax.extend`` from it, and nothing private.

A *private attribute* begins with one underscore. A file may read those of ``self`` and ``cls``, and
those that it defines itself; what ``namedtuple`` and ``os`` call so is public.
"""

from __future__ import annotations

import ast
import functools
import importlib
import textwrap
from pathlib import Path

import pytest

from tests.house import public_api, sources
from tests.house.sources import Source, package_files
from tests.house.test_imports import defining_modules, home
from tests.suite.rooms import ROOMS

MOST_NAMES = 60

CORE = {package.removesuffix(".py") for package in ROOMS["core"]} | {"face"}

# What rooms still import of the insides of the core, and from where, until there is a better way.
# Nothing is added.
PRIVATE_IMPORTS: dict[str, set[str]] = {
    "shardax._parallel.gradient_sums": {"shardax.partition.entries.explicit_spec"},
    "shardax._parallel.pipeline": {
        "shardax._core._jax.outside_inner_regions",
        "shardax._transforms.control.forms.abstract_eval",
    },
    "shardax.host.callback": {
        "shardax._core._jax",
        "shardax._core.array_ops.dtype_of",
        "shardax._core.graph.definitions.VariableDef",
        "shardax._core.graph.flatten.build",
        "shardax._core.variable.ArrayAttribute",
        "shardax._transforms.control.forms.vary_alike",
        "shardax._transforms.lift.arguments.join_argument",
        "shardax._transforms.lift.arguments.leaf_paths",
        "shardax._transforms.lift.engine.LiftedCall",
    },
    "shardax.host.calls": {
        "shardax._core.cross_process.PickledArray",
        "shardax._core.cross_process.name_of",
        "shardax._core.cross_process.reduced",
    },
    "shardax.host.export.exporting": {
        "shardax._core.graph.definitions.VariableDef",
        "shardax._core.graph.definitions.definition_paths",
        "shardax._transforms.grad.custom_vjp.used_inputs",
        "shardax._transforms.jit.jit.BoundJit",
        "shardax._transforms.jit.slow_call.prepare",
        "shardax._transforms.jit.specialization.Specialization",
        "shardax._transforms.lift.arguments",
        "shardax._transforms.lift.effects.Effects",
        "shardax._transforms.lift.input_graph.InputGraph",
        "shardax._transforms.lift.signatures.parameter_name",
    },
    "shardax.host.export.loading": {"shardax._core.variable"},
    "shardax.host.export.signature": {"shardax._transforms.lift.arguments.leaf_paths"},
    "shardax.host.host_function": {
        "shardax._core.array_ops.is_differentiable",
        "shardax._core.cross_process.PickledByName",
        "shardax._core.frames.local",
        "shardax._core.graph.flatten.flatten",
        "shardax._transforms.control.forms.vary_alike",
        "shardax._transforms.grad.differentiated.DiffArgument",
        "shardax._transforms.grad.tangents.Tangents",
        "shardax._transforms.lift.arguments.leaf_paths",
        "shardax._transforms.lift.arguments.static_argument",
        "shardax._transforms.lift.engine.LiftedCall",
        "shardax._transforms.lift.frames.LateFrame",
        "shardax._transforms.lift.signatures.resolve_arguments",
        "shardax._transforms.lift.transformed.takes_options",
    },
    "shardax.host.pickling": {
        "shardax._core.cross_process.landing_on",
        "shardax._core.cross_process.reduced",
        "shardax._core.graph.definitions.VariableDef",
        "shardax._core.graph.definitions.definition_paths",
        "shardax._core.graph.definitions.static_values",
        "shardax._core.graph.flatten.flatten",
    },
    "shardax.models.weights": {
        "shardax.partition.mesh.check_devices",
        "shardax.partition.placement.ABSTRACT",
    },
    "shardax.named.array": {"shardax._core.object.ShownArray"},
    "shardax.named.base": {"shardax._core.cross_process.packed"},
    "shardax.named.layout": {
        "shardax._core.graph.static.MAPPED_AXES",
        "shardax.partition.inventory.with_mapped_axes",
    },
    "shardax.nn.parameters": {"shardax._core.init.boxed.announced"},
    "shardax.nn.stack": {
        "shardax._core.graph.flatten.GraphWalk",
        "shardax._core.graph.stacked_values.stack_values",
        "shardax._core.graph.stacking.stack_objects",
        "shardax._core.graph.stacking.unstack_objects",
        "shardax._core.graph.views.part_of",
        "shardax._core.graph.views.view",
        "shardax._transforms.lift.captures.objects_in",
        "shardax._transforms.lift.captures.places_of",
    },
    "shardax.plan.inputs": {
        "shardax.partition.inventory.ArrayInfo",
        "shardax.partition.inventory.LeafInfo",
        "shardax.partition.tree_layout.TreeLayout",
    },
    "shardax.plan.searching.dimensions": {
        "shardax.partition.inventory.LeafInfo",
        "shardax.partition.rules.check_names",
    },
    "shardax.train.checkpoint": {"shardax._core.values.refuse_deleted"},
    "shardax.train.checkpoint_format": {
        "shardax._core.graph.handlers.DICT",
        "shardax._core.graph.handlers.LIST",
        "shardax._core.graph.handlers.PLAIN",
        "shardax._core.graph.handlers.handler_of",
        "shardax._core.graph.handlers.has_parts",
    },
    "shardax.train.optimizer": {"shardax._core.graph.static.BOX_ENTRY"},
    "shardax.train.optimizer_state": {"shardax.partition.reduced_states.dimensions_of_state"},
    "shardax.train.pipeline.stages": {"shardax.partition.misspelt_names.telling_once"},
    "shardax.train.run_folder": {
        "shardax._core.cross_process.PickledByName",
        "shardax._core.object.Wrapper",
    },
    "shardax.train.trainer": {"shardax.partition.misspelt_names.telling_once"},
    "shardax.view.figures": {
        "shardax._core.explain.drawing.Drawing",
        "shardax._core.explain.drawing.draw",
        "shardax._core.explain.drawing.leaf_text",
        "shardax._core.explain.drawing.parameter_count",
        "shardax._core.frames.owner_here",
        "shardax._core.graph.flatten.build",
        "shardax._core.object.Shown",
        "shardax._core.variable.ArrayAttribute",
    },
}

# Private attributes of other files' classes that rooms still read. Nothing is added.
PRIVATE_ATTRIBUTES: dict[str, set[str]] = {
    "shardax.host.export.exporting": {"_source", "_stage"},
    "shardax.host.host_function": {"_value"},
    "shardax.host.worker": {"_fail", "_lose", "_retries"},
    "shardax.surgery.edits": {"_convolve", "_out_names", "_routed"},
    "shardax.train.optimizer_state": {"_read", "_value"},
    "shardax.view.figures": {"_make", "_places"},
}

PUBLIC_UNDERSCORES = {
    *("_asdict", "_field_defaults", "_fields", "_replace"),  # of named tuples
    "_exit",  # of os
    "_repr_html_",  # of notebooks
}


def room_files() -> list[Source]:
    """The files of packages above the core."""
    # The processes of a program stand below the transforms, and so below ``extend``.
    below = CORE | {"distributed"}
    return [source for source in package_files() if home(f"{source.module}.") not in below]


def is_public_name(name: str) -> bool:
    """Whether a name of the core is one that users and rooms may import."""
    return name in face_modules() or name in public_api.remembered_names() or is_error(name)


@functools.cache
def face_modules() -> set[str]:
    """The packages that list public names."""
    return {face.module for face in public_api.faces()}


def is_error(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return module == "shardax.errors" and hasattr(importlib.import_module(module), attribute)


def private_imports(source: Source) -> set[str]:
    """The names that a file imports from the insides of the core."""
    return {
        found.name
        for found in source.imports
        if found.name.split(".")[0] == "shardax"
        and home(found.name) in CORE
        and not is_public_name(found.name)
    }


def own_names(tree: ast.Module) -> set[str]:
    """The names that a file defines: functions, classes, variables, attributes, slots."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                texts = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
                names.update(text for text in texts if isinstance(text, str))
    return names


def private_attributes(source: Source) -> set[str]:
    """The private attributes that a file reads of other files' classes."""
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        is_dunder = node.attr.startswith("__")
        if not (is_own or is_super or is_dunder):
            found.add(node.attr)
    return found - own_names(source.tree) - PUBLIC_UNDERSCORES


def test_rooms_import_public_names_and_those_of_extend() -> None:
    found = {source.module: private_imports(source) for source in room_files()}
    assert {module: names for module, names in found.items() if names} == PRIVATE_IMPORTS


def test_rooms_read_no_private_attributes_of_other_files() -> None:
    found = {source.module: private_attributes(source) for source in room_files()}
    assert {module: names for module, names in found.items() if names} == PRIVATE_ATTRIBUTES


def test_extend_has_at_most_60_names_each_with_an_example() -> None:
    names = [name for name in public_api.public_names() if name.startswith("shardax.extend.")]
    assert len(names) <= MOST_NAMES
    # Aliases and constants have no docstring of their own: that of their module shows them.
    files = [source for source in package_files() if source.module.startswith("shardax.extend.")]
    examples = "".join(source.outline.docstring for source in files)
    without = [
        name for name in names if not has_example(name) and f"extend.{name[15:]}" not in examples
    ]
    assert without == []


def has_example(name: str) -> bool:
    """Whether the docstring of a name of ``shardax.extend`` has an example."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    is_own = getattr(value, "__module__", "").startswith("shardax.")
    return is_own and ">>> " in (value.__doc__ or "")


# --- The tests above can fail ---


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    # Of the package itself, which is found by the names below.
    defining_modules()
    face_modules()
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "shardax")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    path = tmp_path / "shardax" / "nn" / "layer.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        textwrap.dedent(
            """
            from shardax import Module, partition
            from shardax.errors import ModuleError
            from shardax.extend import Options
            from shardax.partition import Rules
            from shardax._core.frames import local
            from shardax.partition.rules import assign
            from shardax._files import flush

            class Layer(Module):
                def __init__(self):
                    self._own = local._frame
                def __call__(self, other):
                    return other._own, other._value, self._value, other._replace(x=1)
            """
        )
    )
    return Source(path)


def test_private_imports_are_found(source: Source) -> None:
    assert private_imports(source) == {
        "shardax._core.frames.local",
        "shardax.partition.rules.assign",
    }


def test_private_attributes_are_found(source: Source) -> None:
    assert private_attributes(source) == {"_frame", "_value"}
