# SPDX-License-Identifier: Apache-2.0
"""Comparing layouts that someone has in mind: rule sets times meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardax.core.errors import PlanInputError
from shardax.partition.assignment import UNCONSTRAINED
from shardax.partition.mesh import mesh_text
from shardax.partition.rules import Rules, RulesLike
from shardax.plan.inputs import Inputs
from shardax.plan.progress import progress_for
from shardax.plan.records import Layout, LayoutReport
from shardax.plan.result import Plan
from shardax.plan.search_here import asker
from shardax.plan.searching import search
from shardax.plan.targets import Target


def compare(
    step: Callable[..., Any],
    args: Sequence[Any],
    rules: Mapping[str, RulesLike],
    meshes: Sequence[Mapping[str, int]] | Mapping[str, int],
    target: str | Target,
    *,
    effort: str = "full",
    compiler: str = "auto",
    processes: int | None = None,
    cache: Any = "default",
    progress: bool = False,
) -> Plan:
    """Asks what each of some layouts costs: every rule set over every mesh.

    Args:
        step: What is planned: a function made by ``sx.jit`` or ``jax.jit``, or one to be compiled.
        args: Its positional arguments, none of which needs to hold an array: lazy Modules and
            optimizers, boxes, ``NamedShape`` for a batch.
        rules: Rules by name.
        meshes: Sizes of the mesh axes by name; one mesh or several.
        target: The hardware, such as ``"tpu:v5e:4x4"``.
        effort: ``"full"``: as the target's compiler would for a run. ``"screen"``: faster, with the
            same operations and wire bytes, and a peak of memory that is up to a fifth too low.
        compiler: ``"auto"``: the target's own if it is installed, else the CPU's as an estimate;
            ``"target"`` or ``"estimate"``: that one.
        processes: How many processes compile; None for one per core, at most one per layout.
        cache: Folder in which reports are remembered by program; None for none.
        progress: Whether to show what is being compiled.

    Returns:
        The plan, best layout first.

    Raises:
        PlanInputError: If arguments have no names, the step needs values, or rules are malformed.
        TargetError: If there is no such target, or a mesh does not have its devices.
        CompilerMissingError: If ``compiler="target"`` and it is not installed; names the extra.

    Example:
        >>> import jax, shardax as sx
        >>> from shardax import plan
        >>> @sx.jit
        ... def apply(weight, x):
        ...     return x @ weight.value
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
        >>> x = plan.NamedShape((32, 64), "float32", ("batch", "embed"))
        >>> rules = {"tp": {"mlp": "model"}, "row": {"embed": "model"}}
        >>> found = plan.compare(apply, (weight, x), rules, {"model": 4}, "cpu:4")
        >>> [(each.layout.name, round(each.total_wire_bytes)) for each in found]
        [('tp', 0), ('row', 49152)]
    """
    target = Target.parse(target)
    inputs = Inputs(step, args)
    layouts = _layouts(rules, [meshes] if isinstance(meshes, Mapping) else list(meshes))
    for layout in layouts:
        target.check_mesh(layout.sizes)
    reports = reports_of(
        inputs,
        layouts,
        target,
        effort,
        compiler=compiler,
        processes=processes,
        cache=cache,
        progress=progress,
    )
    return Plan(target.text, tuple(reports))


def reports_of(
    inputs: Inputs,
    layouts: Sequence[Layout],
    target: Target,
    effort: str,
    *,
    compiler: str = "auto",
    processes: int | None = None,
    cache: Any = "default",
    progress: bool = False,
) -> Iterator[LayoutReport]:
    """Yields a report per layout, as they are done; see ``compare``.

    Args:
        inputs: The step and its arguments.
        layouts: The layouts.
        target: The hardware.
        effort: As for ``compare``.
        compiler: Likewise.
        processes: Likewise.
        cache: Likewise.
        progress: Likewise.
    """
    with (
        progress_for(progress) as shown,
        asker(inputs, target, compiler, processes, cache) as who,
    ):
        shown.expect(len(layouts), "compiling")
        for answer in who.answers(layouts, effort, begun=shown.begin):
            shown.end(answer.report, answer.kept)
            yield answer.report


def layout_of(name: str, rules: RulesLike, mesh: Mapping[str, int]) -> Layout:
    """Returns rules and the sizes of mesh axes as a layout.

    Args:
        name: Its name.
        rules: Rules, pairs or a mapping.
        mesh: Sizes of the mesh axes by name.

    Raises:
        PlanInputError: If the rules leave a choice to the compiler.

    Example:
        >>> layout_of("tp", {"mlp": "model"}, {"data": 2, "model": 4}).sizes
        {'data': 2, 'model': 4}
    """
    made = rules if isinstance(rules, Rules) else Rules(rules)
    free = [logical for logical, axes in made.pairs if axes is UNCONSTRAINED]
    if free:
        raise PlanInputError(
            f"The rules {name!r} leave {', '.join(map(repr, free))} UNCONSTRAINED, so the layout "
            "would be the compiler's choice, which can differ from one version to the next. Say a "
            "mesh axis or None."
        )
    policies = (made.on_conflict, made.on_unmapped)
    return Layout(name, tuple(made.pairs), tuple(mesh.items()), policies)


def layouts_over(name: str, rules: RulesLike, meshes: Sequence[Mapping[str, int]]) -> list[Layout]:
    """Returns rules over each of some meshes; of several, the mesh is in the layout's name.

    Args:
        name: Of the rules.
        rules: Rules, pairs or a mapping.
        meshes: Sizes of the mesh axes by name.

    Raises:
        PlanInputError: If the rules leave a choice to the compiler.

    Example:
        >>> found = layouts_over("dp", {"batch": "data"}, [{"data": 8}, {"data": 4, "model": 2}])
        >>> [layout.name for layout in found]
        ['dp data=8', 'dp data=4,model=2']
    """
    if len(meshes) == 1:
        return [layout_of(name, rules, meshes[0])]
    return [layout_of(f"{name} {mesh_text(mesh, ',')}", rules, mesh) for mesh in meshes]


def _layouts(rules: Mapping[str, RulesLike], meshes: Sequence[Mapping[str, int]]) -> list[Layout]:
    if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules):
        raise PlanInputError(
            f"rules is {rules!r}; give a mapping from names to rules, as in "
            'rules={"fsdp": {"embed": "data"}, "tp": {"mlp": "model"}}.'
        )
    if not rules or not meshes:
        raise PlanInputError("There is nothing to compare: give at least one rule set and mesh.")
    return [each for name, pairs in rules.items() for each in layouts_over(name, pairs, meshes)]


def plan(
    step: Callable[..., Any],
    args: Sequence[Any],
    target: str | Target,
    *,
    rules: Mapping[str, RulesLike] | None = None,
    meshes: Sequence[Mapping[str, int]] | None = None,
    **options: Any,
) -> Plan:
    """Plans a step: compares the rules that are given, or searches for the best.

    Args:
        step: What is planned; see ``compare``.
        args: Its positional arguments.
        target: The hardware, such as ``"tpu:v5e:4x4"``.
        rules: Rules by name, to be compared; None to search.
        meshes: Sizes of mesh axes by name, one mapping per mesh; needed with ``rules``.
        **options: As for ``compare`` or ``search``.

    Returns:
        The plan, best layout first.

    Raises:
        PlanInputError: As ``compare`` and ``search``; or if there are rules and no mesh.

    Example:
        >>> import jax, shardax as sx
        >>> def apply(weight, x):
        ...     return x @ weight.value
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
        >>> x = sx.plan.NamedShape((32, 64), "float32", ("batch", "embed"))
        >>> rules = {"tp": {"mlp": "model"}}
        >>> found = sx.plan.plan(apply, (weight, x), "cpu:4", rules=rules, meshes=[{"model": 4}])
        >>> found.best().layout.name
        'tp'
    """
    if rules is None:
        return search(step, args, target, meshes=meshes, **options)
    if meshes is None:
        raise PlanInputError(
            "There are rules but no meshes to compare them over: give meshes=[{'data': 4, "
            "'model': 2}], or leave rules out to search for both."
        )
    return compare(step, args, rules, meshes, target, **options)
