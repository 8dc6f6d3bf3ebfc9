# SPDX-License-Identifier: Apache-2.0
"""Gradients of data-parallel devices, each of its own rows, summed once.

A device computes its gradient in a *region*, a ``jax.shard_map`` over the data axes; the other mesh
axes are left to the compiler there. A second region, over all axes, sums the gradients.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardax import (
    Intermediate,
    Param,
    RngState,
    State,
    Variable,
    iter_variables,
    merge,
    split,
    value_and_grad,
)
from shardax._parallel.microbatches import indivisible
from shardax.errors import PartitionError
from shardax.extend import (
    Options,
    Path,
    PyTree,
    RulesLike,
    format_path,
    has_objects,
    is_prng_key,
    mesh_text,
    raise_if_any,
    varying_axes,
)
from shardax.nn.arithmetic import at_least_float32
from shardax.train.accumulation import accumulate, split_batch
from shardax.train.gradients.sums import GradientPlan, Region, plan_of, sum_over
from shardax.train.metrics import target_weights, weighted
from shardax.train.optimizer import laid_out_as
from shardax.train.step_numbers import count_targets

_WIRE_DTYPES = ("bfloat16", "float32")


def data_parallel_value_and_grad(
    function: Callable[..., PyTree],
    over: str | Sequence[str],
    *,
    steps: int = 1,
    layout: RulesLike | State | None = None,
    reduce_dtype: Any = None,
    has_aux: bool = False,
    wrt: Any = Param,
    count: Callable[[PyTree], PyTree] | None = None,
) -> Callable[..., Any]:
    """Makes ``sx.value_and_grad(function)`` sum gradients of devices once.

    Every device has the rows that the mesh axes ``over`` give it. The result is that of the whole
    batch, up to rounding: the loss of a device, a mean, is weighted by its number of targets, which
    are those that a ``mask`` in the batch and ``ignore_index`` leave, else rows. Random streams
    give every device numbers of its own. What the function writes must be the same on all devices,
    as counts are; statistics of a device's own rows are refused.

    Axes that ``over`` does not name are left to the compiler, and split the model by rules as
    everywhere. Parameters are whole along those that it names.

    Args:
        function: As for ``accumulated_value_and_grad``: a mean over rows, or over targets.
        over: The data axes of the mesh, the slowest link first: ``("slice", "data")`` sums within
            slices, then 1/n of it across them, where n is the size of ``"data"``.
        steps: Number of microbatches of each device. Their sum is in float32, and it is reduced
            once; with ``layout``, each is split along the last axis of ``over`` at once, so that
            the sum is never whole.
        layout: Rules for gradients, before those in scope: ``{"embed": "data"}``, as in the
            overrides of the optimizer's state, leaves them split like it. Or a State of shardings
            or specs by path. None, or a path that it has not: as the parameter.
        reduce_dtype: Dtype on the wire, ``"bfloat16"`` or ``"float32"``; None: that of the
            gradients. Of bfloat16, each device's gradient is rounded before each exchange, and the
            sum once more where it is gathered. Arrays that cannot be divided are summed as they
            are.
        has_aux: As for ``accumulated_value_and_grad``. The new first dimension of aux has an entry
            for each microbatch of each device.
        wrt: Filter of the Variables to differentiate.
        count: As for ``accumulated_value_and_grad``: called on a microbatch of a device; returns
            its number of targets.

    Returns:
        A function of ``(model, batch, *args)``, as ``accumulated_value_and_grad`` returns it.

    Raises:
        PartitionError: Here if an argument has no such meaning. When called, if the mesh lacks an
            axis, rows cannot be divided, a parameter is split over these axes, a gradient cannot be
            laid out, or devices write different values, or if ``steps`` is no number of
            microbatches, or ``count`` is no function or returns no real number.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> auto = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.make_mesh((1, 1), ("slice", "data"), axis_types=auto)
        >>> layer = sx.nn.Linear(4, 4, rngs=sx.Rngs(0))
        >>> loss = lambda layer, x: jnp.mean(layer(x) ** 2)
        >>> reduced = data_parallel_value_and_grad(
        ...     loss, ("slice", "data"), layout={"in": "data"}, reduce_dtype="bfloat16")
        >>> with jax.set_mesh(mesh):
        ...     value, gradients = sx.jit(reduced)(layer, jnp.ones((8, 4)))
        >>> bool(jnp.allclose(value, loss(layer, jnp.ones((8, 4)))))
        True
    """
    axes = (over,) if isinstance(over, str) else tuple(over)
    options = Options(PartitionError)
    are_names = bool(axes) and len(set(axes)) == len(axes)
    are_names = are_names and all(isinstance(axis, str) for axis in axes)
    expected = "data axes of a mesh, one or several, each once, the slowest link first"
    options.check("over", over, are_names, expected, 'For instance over=("slice", "data").')
    wire = None if reduce_dtype is None else np.dtype(reduce_dtype)
    options.check(
        "reduce_dtype",
        reduce_dtype,
        wire is None or str(wire) in _WIRE_DTYPES,
        f"{', '.join(map(repr, _WIRE_DTYPES))} or None",
        "float16 overflows.",
    )
    accumulate(_nothing, steps, count=count)  # checks them
    differentiated = value_and_grad(function, has_aux=has_aux, wrt=wrt)

    @functools.wraps(function)
    def reduced(model, batch, *args):
        region = Region.find(axes)
        call = _DeviceCall(region, differentiated, steps, has_aux, wire, model, args, count)
        call.plans = {
            path: plan_of(path, variable, region, layout)
            for path, variable in _trained(model, wrt).items()
        }
        value, aux, gradients = call.run(batch)
        return ((value, aux) if has_aux else value), gradients

    return reduced


def _nothing(*_: object) -> None:
    """Stands for a function."""


def _trained(model: object, wrt: object) -> dict[Path, Variable]:
    if isinstance(model, Variable):
        return {(): model}
    if not has_objects(model):
        raise PartitionError(
            f"The model is a {type(model).__name__} without Variables, so nothing says how it is "
            "laid out. Pass a Module or a Variable: data_parallel_value_and_grad(loss, over)"
            "(model, batch)."
        )
    return dict(iter_variables(model, wrt))


# --- One call ---


class _DeviceCall:
    """Gradients of one batch."""

    def __init__(
        self,
        region: Region,
        differentiated: Callable[..., PyTree],
        steps: int,
        has_aux: bool,
        wire: np.dtype | None,
        model,
        args: Sequence[PyTree],
        count: Callable[[PyTree], PyTree] | None,
    ) -> None:
        self.region = region
        self.differentiated = differentiated
        self.steps = steps
        self.has_aux = has_aux
        self.wire = wire
        self.count = count

        self.plans: dict[Path, GradientPlan] = {}

        # Arguments with Variables are split; of the others, arrays enter, and texts stay.
        self.objects = (model, *(arg for arg in args if has_objects(arg)))
        plain = [None if has_objects(arg) else arg for arg in args]
        self.is_object = [has_objects(arg) for arg in args]
        leaves, self.treedef = jax.tree.flatten(plain)
        self.arrays = {
            i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))
        }
        self.static = {i: leaf for i, leaf in enumerate(leaves) if i not in self.arrays}

        self.graphdef, state = split(self.objects)
        self.values: dict[Path, Any] = state.flat()
        self.origins = state.origins()
        self.variables: dict[Path, Variable] = dict(iter_variables(self.objects))
        self.random = {p for p, v in self.variables.items() if isinstance(v, RngState)}
        self.structure: Any = None  # of the gradients, found by tracing

    def run(self, batch) -> tuple[PyTree, PyTree, PyTree]:
        """Returns value, aux and gradients; writes the function's new state."""
        self._check_rows(batch)
        replicated, rows = PartitionSpec(), PartitionSpec(self.region.over)
        outputs = {path: plan.final for path, plan in self.plans.items()}
        compute = self.region.with_auto_axes(self._compute, (replicated, rows, outputs, replicated))
        value, aux, gradients, written = compute(self.values, batch, self.arrays)
        for path, new_value in written.items():
            self.variables[path].value = laid_out_as(self.variables[path].value, new_value)
        treedef, paths = self.structure
        return value, aux, treedef.unflatten([gradients[path] for path in paths])

    def _check_rows(self, batch: object) -> None:
        region, parts = self.region, self.region.count * self.steps
        split_batch(batch, 1)
        sizes = mesh_text({axis: region.mesh.shape[axis] for axis in region.over})
        raise_if_any(
            PartitionError,
            indivisible("batch", batch, parts),
            f"Rows cannot be divided over {sizes}, in {self.steps} microbatches: ",
            f". Use a multiple of {parts} rows, or pass what has no rows after the batch.",
        )

    def _compute(self, values, batch, arrays) -> tuple[Any, Any, Any, Any]:
        region = self.region
        replicated, rows = PartitionSpec(), PartitionSpec(region.over)
        local = jax.shard_map(
            self._local,
            mesh=region.shard_map_mesh,
            in_specs=(replicated, rows, replicated),
            out_specs=(replicated, rows, rows, replicated, replicated),
            axis_names=set(region.over),
        )

        value, aux, gradients, count, written = local(values, batch, arrays)

        plans = {path: self.plans[path] for path in gradients}
        add = jax.shard_map(
            functools.partial(self._add, plans),
            mesh=region.shard_map_mesh,
            in_specs=({path: plan.spec(region.over) for path, plan in plans.items()}, replicated),
            out_specs={path: plan.spec(leaving=True) for path, plan in plans.items()},
            axis_names={*region.over, *region.other_axes},
            check_vma=False,  # JAX does not know that gathered arrays are the same everywhere
        )

        return value, aux, add(gradients, count), written

    def _local(self, values: dict[Path, Any], batch, arrays):
        """Sums of one device, and the values written."""
        region = self.region
        entering = dict(values)
        for path, value in values.items():
            if path in self.random and is_prng_key(value):
                shard = jax.lax.axis_index(region.over)
                fold = functools.partial(jax.random.fold_in, data=shard)
                for _ in range(value.ndim):
                    fold = jax.vmap(fold)
                entering[path] = fold(value)
            elif path[0] == 0 and path[1:] in self.plans:
                # Otherwise JAX sums the gradient at each use of the parameter.
                entering[path] = region.varying(value)

        model, *objects = merge(self.graphdef, State.from_flat(entering, self.origins))
        by_index = {**self.static, **arrays}
        plain = self.treedef.unflatten([by_index[i] for i in range(len(by_index))])

        waiting = iter(objects)
        args = [
            next(waiting) if is_object else arg
            for is_object, arg in zip(self.is_object, plain, strict=True)
        ]

        has_counts = self.count is not None or target_weights(batch) is not None

        def counted(model, microbatch, *args):
            value, gradients = self.differentiated(model, microbatch, *args)
            value, aux = value if self.has_aux else (value, None)
            count = jnp.float32(1)
            if has_counts:
                count = count_targets(microbatch, self.count).astype(jnp.float32)
                value, gradients = weighted((value, gradients), count)
            if self.steps > 1:
                gradients = self._split_at_once(gradients)
            count = region.varying(count) if has_counts else count
            return ((value, count), aux), region.varying(gradients)

        summed = accumulate(counted, self.steps, has_aux=True, reduce="sum")
        ((value, count), aux), gradients = summed(model, batch, *args)

        written = self._written(entering, (model, *objects))
        # Without a mask, every microbatch counts as one.
        total = jax.lax.psum(count, region.over) if has_counts else count * region.count
        value = jax.lax.psum(region.varying(value), region.over) / total.astype(value.dtype)
        return value, region.varying(aux), self._by_path(gradients), total, written

    def _by_path(self, gradients: object) -> dict[Path, Any]:
        """Gradients by path, of the device as the first of its row."""
        pairs = gradients.flat() if isinstance(gradients, State) else {(): gradients}
        leaves, treedef = jax.tree.flatten(gradients)
        paths = [path for path, value in pairs.items() if value is not None]
        self.structure = treedef, paths
        return {path: leaf[None] for path, leaf in zip(paths, leaves, strict=True)}

    def _written(self, entering: Mapping[Path, object], objects: object) -> dict[Path, Any]:
        """Values written by the function, the same on all devices, or raises."""
        leaving = {path: variable.value for path, variable in iter_variables(objects)}
        problems = [
            f"{self._shown(path)}: was {'added' if path in leaving else 'taken away'}"
            for path in leaving.keys() ^ entering.keys()
        ]

        written = {}
        for path in leaving.keys() & entering.keys():
            old_leaves, leaves = (jax.tree.leaves(tree[path]) for tree in (entering, leaving))
            if len(old_leaves) == len(leaves) and all(map(operator.is_, old_leaves, leaves)):
                continue

            if path in self.random and is_prng_key(leaving[path]):
                continue  # a device's own keys; the stream goes on by its count

            written[path] = leaving[path]
            if not any(set(self.region.over) & varying_axes(leaf) for leaf in leaves):
                continue

            kind = type(self.variables[path])
            shapes = [[np.shape(leaf) for leaf in tree] for tree in (old_leaves, leaves)]
            if issubclass(kind, Intermediate) and shapes[0] == shapes[1]:
                # A number that layers sow, not rows of the batch.
                written[path] = jax.tree.map(
                    lambda x: jax.lax.pmean(self.region.varying(x), self.region.over), leaving[path]
                )
                continue
            problems.append(f"{self._shown(path)}: {kind.__name__} of a device's own rows")

        raise_if_any(
            PartitionError,
            sorted(problems),
            "Data-parallel devices cannot write these together:\n  ",
            "\nAverage over the devices where it is computed, jax.lax.pmean(statistic, "
            f"{self.region.over}) (BatchNorm: axis_name={self.region.over}); or use "
            "sx.value_and_grad, which sees the whole batch.",
            separator="\n  ",
        )
        return written

    def _shown(self, path: Path) -> str:
        return format_path(path[1:] if len(self.objects) == 1 else path)

    def _split_at_once(self, gradients):
        """Leaves a microbatch's gradient split along the last data axis."""
        region, last_axis = self.region, self.region.over[-1]
        pairs = gradients.flat() if isinstance(gradients, State) else {(): gradients}
        by_path: dict[Path, Any] = {}
        for path, gradient in pairs.items():
            plan = self.plans[path]
            wire = self.wire or gradient.dtype
            gradient = gradient.astype(at_least_float32(gradient.dtype))

            if any(last_axis in axes for axes in plan.leaving):
                split_now = functools.partial(
                    sum_over, plan=plan, over=(last_axis,), wire=wire, sizes=region.mesh.shape
                )
                if region.other_axes:
                    spec = plan.spec()
                    split_now = jax.shard_map(
                        split_now, in_specs=spec, out_specs=spec, axis_names=set(region.other_axes)
                    )
                gradient = split_now(region.varying(gradient))

            by_path[path] = gradient

        if not isinstance(gradients, State):
            return by_path[()]
        return State.from_flat(by_path, gradients.origins())

    def _add(self, plans: dict[Path, GradientPlan], gradients: dict[Path, PyTree], count):
        """Adds the gradients of all devices, with all mesh axes manual."""
        over, by_path = self.region.over, {}
        for path, gradient in gradients.items():
            plan, dtype = plans[path], self.variables[(0, *path)].dtype

            # What each microbatch was split along at once is summed already.
            done = over[-1:] if self.steps > 1 else ()
            done = tuple(axis for axis in done if any(axis in axes for axes in plan.leaving))

            by_path[path] = sum_over(
                gradient[0],
                plan=plan,
                over=tuple(axis for axis in over if axis not in done),
                wire=self.wire or dtype,
                sizes=self.region.mesh.shape,
                scale=1 / count,
                done=done,
            ).astype(dtype)
        return by_path
