# SPDX-License-Identifier: Apache-2.0
"""Imports go down only, the lower floors stand on JAX alone, and on its public names."""

from __future__ import annotations

import ast
import functools
import sys
import textwrap
from pathlib import Path

import pytest

from tests.house import sources
from tests.house.sources import Import, Source, package_files

# From the ground up. A floor may import the ones before it, and itself; packages that share a floor
# may not import one another. The face (`shardax/__init__.py`) re-exports from all but the command;
# `shardax/errors.py` collects the errors of all packages, the command's too. A name that is
# imported from one of these two belongs to the package that defines it.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("_core",),
    ("distributed",),
    ("_select",),
    ("_transforms",),
    ("partition",),
    ("random",),
    ("numpy",),
    ("config",),
    ("extend",),
    ("_terminal", "_tables", "_charts", "_files", "_module_scopes"),
    ("_parallel",),
    ("nn",),
    ("bridge",),
    ("named",),
    ("models",),
    ("surgery",),
    ("hlo",),
    ("host",),
    ("view",),
    ("plan",),
    ("train",),
    ("errors",),
    ("face",),
    ("_migrate",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# What these two import may come from nowhere else.
GROUND = ("_core", "_select", "_transforms")
GROUND_MAY_USE = {"jax", "numpy", "shardax", *sys.stdlib_module_names}

# Imported inside the functions that need them, so that no face brings them in.
IMPORTED_WHERE_USED = {
    "cloudpickle",
    "equinox",
    "flax",
    "huggingface_hub",
    "matplotlib",
    "optax",
    "orbax",
    "rich",
    "safetensors",
    "scipy",
    "tokamax",
    "tokenizers",
    "torch",
    "treescope",
    "tyro",
}

# Parts of JAX that are not of its documented public face, and the files that lean on them. To grow
# this table needs a reason in the file itself; the aim is that it is empty of underscores for good.
BEYOND_PUBLIC_JAX: dict[str, set[str]] = {
    "src/shardax/_core/_jax.py": {
        "jax.extend.core.ClosedJaxpr",
        "jax.extend.core.Jaxpr",
        "jax.extend.core.JaxprEqn",
        "jax.extend.core.Literal",
        "jax.extend.core.Var",
        "jax.extend.core.get_opaque_trace_state",
        "jax.extend.core.jaxpr_as_fun",
    }
}
NOT_PUBLIC = ("jax.extend", "jax.interpreters", "jax.lib", "jaxlib")


@functools.cache
def defining_modules() -> dict[str, str]:
    """Maps names of the face and of ``shardax.errors`` to the modules that define them."""
    files = package_files()
    face = next(source for source in files if source.module == "shardax")
    modules = {
        f"shardax.{alias.asname}": f"{statement.module}.{alias.name}"
        for statement, _ in face.outline.statements
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname == alias.name
    }
    for source in files:
        for name, _ in source.outline.classes:
            if name.endswith(("Error", "Warning", "Interrupted")):
                modules[f"shardax.errors.{name}"] = f"{source.module}.{name}"
    return modules


def home(name: str) -> str:
    """The package on a floor that a dotted name under ``shardax`` belongs to."""
    below = defining_modules().get(name, name).split(".")[1:2]
    return below[0] if below and below[0] in FLOOR_OF else "face"


def goes_down(importer: str, imported: str) -> bool:
    return importer == imported or FLOOR_OF[imported] < FLOOR_OF[importer]


def upward_imports(source: Source) -> list[str]:
    here = home(source.module)
    return [
        f"{source.place}:{found.line} ({here}) imports {found.name} ({home(found.name)})"
        for found in source.imports
        if found.name.split(".")[0] == "shardax" and not goes_down(here, home(found.name))
        if here != "errors"  # it collects what all packages define
    ]


def is_beyond_public_jax(name: str) -> bool:
    parts = name.split(".")
    if parts[0] not in ("jax", "jaxlib"):
        return False
    private = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return private or name.startswith(tuple(f"{prefix}." for prefix in NOT_PUBLIC))


def test_packages_have_a_level() -> None:
    standing = {source.module.split(".")[1] for source in package_files() if "." in source.module}
    assert standing <= FLOOR_OF.keys()


def test_imports_go_down_only() -> None:
    assert [line for source in package_files() for line in upward_imports(source)] == []


def test_engine_imports_only_jax_numpy_and_stdlib() -> None:
    foreign = [
        f"{source.place}:{found.line} imports {found.name}"
        for source in package_files()
        if home(source.module) in GROUND
        for found in source.imports
        if found.name.split(".")[0] not in GROUND_MAY_USE
    ]
    assert foreign == []


def test_optional_packages_are_imported_where_they_are_used() -> None:
    early = [
        f"{source.place}:{found.line} imports {found.name} when it is imported itself"
        for source in package_files()
        if home(source.module) not in ("cli", "__main__")
        for found in source.imports
        if found.at_module_level and found.name.split(".")[0] in IMPORTED_WHERE_USED
    ]
    assert early == []


def test_jax_is_used_by_public_names_except_where_listed() -> None:
    used = {
        source.place: names
        for source in package_files()
        if (
            names := {
                name
                for name in {found.name for found in source.imports} | source.jax_paths
                if is_beyond_public_jax(name)
            }
        )
    }
    assert used == BEYOND_PUBLIC_JAX


# --- The tests above can fail ---


@pytest.fixture
def write_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that puts one file into a package of its own."""
    defining_modules()  # of the package itself, which is found by the names below
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "shardax")
    monkeypatch.setattr(sources, "ROOT", tmp_path)

    def write(place: str, text: str) -> Source:
        path = tmp_path / "shardax" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return Source(path)

    return write


def test_upward_imports_are_found_in_every_form(write_source) -> None:
    source = write_source(
        "_core/state.py",
        """
        from typing import TYPE_CHECKING
        from ..nn import linear
        from . import paths
        if TYPE_CHECKING:
            from shardax import train
        def late():
            import shardax.view.parameter_table
            import shardax as sx
        """,
    )
    assert upward_imports(source) == [
        "shardax/_core/state.py:3 (_core) imports shardax.nn.linear (nn)",
        "shardax/_core/state.py:6 (_core) imports shardax.train (train)",
        "shardax/_core/state.py:8 (_core) imports shardax.view.parameter_table (view)",
        "shardax/_core/state.py:9 (_core) imports shardax (face)",
    ]


def test_packages_of_one_level_stay_independent() -> None:
    assert not goes_down("view", "plan")
    assert goes_down("view", "view")
    assert goes_down("train", "plan")


def test_module_level_imports_are_told_apart(write_source) -> None:
    source = write_source(
        "train/log.py",
        """
        import optax
        try:
            import rich
        except ImportError:
            pass
        if typing.TYPE_CHECKING:
            import tyro
        class Late:
            import orbax.checkpoint
            def method(self):
                import treescope
        """,
    )
    assert list(source.imports) == [
        Import("optax", 2, at_module_level=True),
        Import("rich", 4, at_module_level=True),
        Import("tyro", 8, at_module_level=False),
        Import("orbax.checkpoint", 10, at_module_level=True),
        Import("treescope", 12, at_module_level=False),
    ]


@pytest.mark.parametrize(
    ("name", "beyond"),
    [
        ("jax._src.core.Tracer", True),
        ("jax.interpreters.mlir", True),
        ("jax.extend.core.primitives", True),
        ("jaxlib.xla_client", True),
        ("jax.tree_util.tree_flatten", False),
        ("jax.__version__", False),
        ("json._private", False),
    ],
)
def test_private_jax_is_told_from_public(name: str, beyond: bool) -> None:
    assert is_beyond_public_jax(name) is beyond
