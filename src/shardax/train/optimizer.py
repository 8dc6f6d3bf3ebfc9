# SPDX-License-Identifier: Apache-2.0
"""Optimizer: a gradient transformation applied to a model in place.

An optimizer refers to its model and holds the state of a transformation (any of optax's, or any
object with the same ``init`` and ``update``). That state is kept as ``OptState`` Variables, one per
array, so it is lifted, sharded and saved like the rest of a model. A leaf that belongs to a
parameter carries the parameter's axes, so the rules that lay out the parameter lay out its moments.

With ``master_dtype`` narrow parameters have a *master*, a wider copy, which is what the
transformation sees and updates; the parameter is the master rounded. An update that is too small to
change a bfloat16 number is kept in its master, and counts once there are enough of them.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from shardax import Module, OptState, Param, Quantized, State, Variable, iter_variables
from shardax import state as module_state
from shardax.errors import TransformError
from shardax.extend import (
    Options,
    Origin,
    Path,
    PyTree,
    TreeInventory,
    describe_plain_arrays,
    format_path,
    raise_if_any,
    stored_value,
    values_by_path,
    warn_user,
)
from shardax.train import errors, optimizer_state
from shardax.train.data.prefetch import in_device_memory
from shardax.train.errors import TrainError

_STEP = optimizer_state.StateLeaf(
    ("step",),
    (),
    np.dtype(np.int32),
    None,
    (),
    optimizer_state.InitialValue((), np.zeros((), np.int32)),
)


class Optimizer(Module):
    """Gradient transformation with its state and the model it updates.

    Making one computes nothing on a lazy model and allocates nothing: the state is lazy until it is
    first used, and then goes where the parameters are (or where ``sx.shard((model, optimizer),
    mesh, rules)`` puts it).

    Args:
        model: The model; referred to, not copied.
        tx: The transformation, for instance ``optax.adamw(1e-3)``. Configuration: two that were
            made the same way count as equal, so making one anew does not compile a train step
            again.
        wrt: Filter of the Variables to train; the same as given to ``grad``. None for ``sx.Param``,
            with a warning where that is hardly meant: of a model with adapters, or with quantized
            kernels.
        master_dtype: Dtype of masters, ``"float32"`` for bfloat16 parameters; None for no masters.
            Parameters that are not narrower have none. A parameter that something else has changed
            since the last update is the master's new value.

    Attributes:
        step: Number of updates so far, int32 of shape ().
        opt_state: The transformation's state as nested Dicts of ``OptState``, by the names in it:
            ``optimizer.opt_state[0]["mu"]["layers"][0]["kernel"]``.
        masters: Masters as nested Dicts of ``OptState``, by the paths of their parameters, where
            ``master_dtype`` is given: ``optimizer.masters["layers"][0]["kernel"]``.

    Raises:
        TransformError: If ``tx`` is no transformation, ``model`` is one, or ``master_dtype`` is no
            floating dtype.
        TrainError: If no Variable matches ``wrt``.

    Example:
        >>> import jax.numpy as jnp, optax, shardax as sx
        >>> from shardax.train.optimizer import Optimizer
        >>> class Line(sx.Module):
        ...     def __init__(self):
        ...         self.slope = sx.Param(jnp.zeros(()))
        ...     def __call__(self, x):
        ...         return self.slope * x
        >>> model = Line()
        >>> optimizer = Optimizer(model, optax.sgd(0.1))
        >>> @sx.jit
        ... def train_step(model, optimizer, x, y):
        ...     loss, grads = sx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        ...     optimizer.update(grads)
        ...     return loss
        >>> x = jnp.array([1.0, 2.0])
        >>> losses = [float(train_step(model, optimizer, x, 3 * x)) for _ in range(20)]
        >>> round(losses[0], 2), round(float(model.slope), 2), int(optimizer.step)
        (22.5, 3.0, 20)
    """

    masters: Any = None
    master_dtype: Any = None

    def __init__(
        self, model: PyTree, tx: object, wrt: Any = None, *, master_dtype: Any = None
    ) -> None:
        if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
            hint = "; call it first" if callable(tx) and not isinstance(tx, Module) else ""
            raise TransformError(
                f"tx is a {type(tx).__name__}, which has no init and update{hint}. Give the model, "
                "then the transformation: Optimizer(model, optax.adam(1e-3))."
            )

        self.model = model
        # Set only where given: an optimizer without masters looks as it did before there were any.
        if master_dtype is not None:
            self.master_dtype = _floating(master_dtype)
            tx = _Masters(tx, self.master_dtype)

        self._transformation = optimizer_state.Transformation(tx)
        if wrt is None:
            wrt = Param
            _warn_of_parts(model)
        self.wrt = tuple(wrt) if isinstance(wrt, list) else wrt

        variables = [variable for _, variable in self._chosen()]
        if not variables:
            filter_text = getattr(wrt, "__name__", repr(wrt))
            raise TrainError(
                f"No Variable of the {type(model).__name__} matches wrt={filter_text}, so there is "
                f"nothing to train.{describe_plain_arrays(model)} Choose others: "
                f"`Optimizer(model, tx, wrt=filter)`."
            )

        shapes = jax.tree.map(
            _shape_of, self._state_of([stored_value(variable) for variable in variables])
        )
        layout = optimizer_state.layout_of(self._transformation, shapes)
        parameters = optimizer_state.TrainedParameters(
            self._transformation, variables, jax.tree.structure(shapes)
        )

        self.step = OptState(optimizer_state.StateValue(_STEP, parameters, -1))
        state = self._make_state(layout, parameters, variables)

        if self.master_dtype is not None:
            self.masters = state.get("masters", {})
            state = state.get("inner", {})

        self.opt_state = state

    @property
    def tx(self) -> Any:
        """The transformation."""
        value = self._transformation.value
        return value.tx if isinstance(value, _Masters) else value

    def update(self, grads: object, *others: object, **extra: object) -> None:
        """Applies one update to the model's parameters, in place.

        Args:
            grads: Gradients as ``sx.grad(..., wrt=...)`` gives them, with the shapes of the
                parameters: a ``State``, a Module (``as_module=True``), a nested mapping by path, or
                containers like the model's, with None where nothing is trained.
            *others: Nothing; the optimizer has its model already.
            **extra: What the transformation takes besides (``value=loss`` for
                ``optax.contrib.reduce_on_plateau``, say); as in optax, a transformation that does
                not take them ignores them.

        Raises:
            TransformError: If a model is given.
            TrainError: If gradients are missing, unexpected or of another shape; nothing is
                changed; if the model changed since the optimizer was made, or the transformation
                changes the form of its state.
        """
        if others or grads is self.model:
            kinds = ", ".join(type(argument).__name__ for argument in (grads, *others))
            raise TransformError(
                f"Optimizer.update takes the gradients alone, but was given {kinds}. The optimizer "
                "has its model: optimizer.update(grads), after Optimizer(model, tx)."
            )
        grads = _tangents_in(grads) if isinstance(grads, Module) else grads
        chosen = self._chosen()
        params = self._state_of([variable.value for _, variable in chosen])
        layout = optimizer_state.layout_of(self._transformation, jax.tree.map(_shape_of, params))
        variables = self._state_variables(layout)
        with in_device_memory([self.step, *variables, *(variable for _, variable in chosen)]):
            self._update(grads, chosen, layout, variables, extra)
            self.step.value = self.step.value + 1

    def _update(
        self,
        grads: object,
        chosen: Sequence[tuple[Path, Variable]],
        layout: optimizer_state.StateLayout,
        variables: Sequence[Variable],
        extra: Mapping[str, object],
    ) -> None:
        """Updates parameters and state, all in the devices' memory."""
        params = self._state_of([variable.value for _, variable in chosen])
        aligned = _align(grads, params)
        state = layout.join(variable.value for variable in variables)
        update = self.tx.update
        if extra:
            import optax

            update = optax.with_extra_args_support(self.tx).update
        step = _step_of(self._transformation.value, update)
        new_params, new_state = step(aligned, state, params, **extra)
        new_leaves = _new_arrays(new_state, layout)
        new_values = new_params.flat()
        for path, variable in chosen:
            variable.value = new_values[path]
        for variable, leaf, value in zip(variables, layout.leaves, new_leaves, strict=True):
            variable.value = laid_out_as(variable.value, jnp.asarray(value, leaf.dtype))

    def _chosen(self) -> list[tuple[Path, Variable]]:
        """Returns paths and Variables of everything to train."""
        # A bare Variable as the model always is.
        if isinstance(self.model, Variable):
            return [((), self.model)]
        return list(iter_variables(self.model, self.wrt))

    def _state_of(self, values: Sequence[object]) -> State:
        chosen = self._chosen()
        paths = [path for path, _ in chosen]
        origins = {path: Origin.of(variable) for path, variable in chosen}
        return State.from_flat(dict(zip(paths, values, strict=True)), origins)

    def _make_state(
        self,
        layout: optimizer_state.StateLayout,
        parameters: optimizer_state.TrainedParameters,
        variables: Sequence[Variable],
    ) -> dict[Any, Any]:
        """Makes the nested mapping of ``OptState``, lazy if the values can wait."""
        owners = [(v, axes) for v in variables for axes in _axes_of_leaves(v)]
        values = [parameters.peek(position) for position in range(len(parameters.places))]

        traced: list[Any] | None = None
        if any(isinstance(value, Tracer) for value in values):
            params = self._state_of([variable.value for variable in variables])
            initial = self._transformation.value.init(params)
            traced = optimizer_state.separate_arrays(initial).arrays

        nested: dict[Any, Any] = {}
        for position, leaf in enumerate(layout.leaves):
            value: Any = optimizer_state.StateValue(leaf, parameters, position)
            if traced is not None:
                value = traced[position]
            elif leaf.initial.needs and all(
                isinstance(values[needed], jax.Array) for needed in leaf.initial.needs
            ):
                value = value.compute()  # of the values that the parameters have now

            mapping = nested
            for step in leaf.path[:-1]:
                mapping = mapping.setdefault(step, {})
            mapping[leaf.path[-1]] = OptState(value, **_metadata_of(leaf, owners))
        return nested

    def _state_variables(self, layout: optimizer_state.StateLayout) -> list[Variable]:
        """Returns the Variables of the state in the order of the layout."""
        present: dict[Path, Variable] = dict(iter_variables(self.opt_state))
        if self.master_dtype is not None:
            parts = {"inner": present, "masters": dict(iter_variables(self.masters))}
            present = {(n, *path): v for n, part in parts.items() for path, v in part.items()}

        wrong = [
            format_path(leaf.path)
            for leaf in layout.leaves
            if leaf.path not in present or tuple(present[leaf.path].shape) != leaf.shape
        ]
        wrong += [
            format_path(path) for path in present.keys() - {leaf.path for leaf in layout.leaves}
        ]

        raise_if_any(
            TrainError,
            sorted(wrong),
            "The optimizer's state does not fit the model any more, as parameters were added, "
            f"removed or reshaped; nothing was changed. {len(wrong)} entries differ: ",
            ". Make a new one: Optimizer(model, tx).",
        )

        return [present[leaf.path] for leaf in layout.leaves]


class _MasterState(NamedTuple):
    inner: object  # of the transformation, for the masters
    masters: object  # None for a parameter that is not narrower


class _Masters(NamedTuple):
    """Transformation of wider copies of the parameters."""

    tx: Any
    dtype: np.dtype

    def init(self, params: object) -> _MasterState:
        """Returns the masters, and the state of the transformation for them."""
        masters = jax.tree.map(self._master, params)
        return _MasterState(self.tx.init(jax.tree.map(_either, params, masters)), masters)

    def step(self, update, grads, state: _MasterState, params, **extra) -> PyTree:
        """Returns new parameters and the new state."""
        wide = jax.tree.map(_current, params, state.masters)
        grads = jax.tree.map(_as_wide, wide, grads)
        updates, inner = _updated(update, grads, state.inner, wide, **extra)
        wide = jax.tree.map(_apply, updates, wide, is_leaf=lambda leaf: leaf is None)
        new_params = jax.tree.map(lambda p, w: laid_out_as(p, w.astype(p.dtype)), params, wide)
        masters = jax.tree.map(
            lambda p, w, old: None if old is None else w, params, wide, state.masters
        )
        return new_params, _MasterState(inner, masters)

    def _master(self, param):
        is_float = jnp.issubdtype(param.dtype, jnp.floating)
        is_narrow = is_float and jnp.dtype(param.dtype).itemsize < self.dtype.itemsize
        return param.astype(self.dtype) if is_narrow else None


def _warn_of_parts(model: PyTree) -> None:
    """Warns where a filter was probably forgotten: of adapters and of quantized kernels."""
    variables = list(iter_variables(model, Param))
    adapters = {id(variable) for _, variable in iter_variables(model, "lora")}
    sizes = {True: 0, False: 0}
    for _, variable in variables:
        sizes[id(variable) in adapters] += _parameter_count(variable)
    if adapters and sizes[False]:
        warn_user(errors.trained_beside_adapters(sizes[True], sizes[False]))
        return

    quantized = [path for path, _ in iter_variables(model, Quantized)]
    kernels = list(dict.fromkeys(path[:-1] for path in quantized))
    if kernels and not adapters:
        first = format_path(kernels[0])
        warn_user(errors.quantized_are_not_trained(first, len(kernels), sizes[False]))


def _parameter_count(variable: Variable) -> int:
    """Returns the number of elements of a Variable's arrays; a lazy one stays lazy."""
    leaves = jax.tree.leaves(stored_value(variable))
    return sum(math.prod(getattr(leaf, "shape", ())) for leaf in leaves)


def _tangents_in(module: Module) -> State:
    """Returns the gradients in a Module; None stands for none."""
    present = module_state(module)
    values = {path: value for path, value in present.flat().items() if jax.tree.leaves(value)}
    return State.from_flat(values, present.origins())


def _updated(update, *args, **extra):
    """Runs a transformation of optax, with promotion of counts to floats."""
    # Also where a user forbids promotion in the own code.
    with jax.numpy_dtype_promotion("standard"):
        return update(*args, **extra)


def _step_of(transformation: object, update: object):
    """Returns the function from gradients to new parameters and state."""
    if isinstance(transformation, _Masters):
        return functools.partial(transformation.step, update)

    def step(grads, state, params, **extra) -> PyTree:
        updates, new_state = _updated(update, grads, state, params, **extra)
        new_params = jax.tree.map(_apply, updates, params, is_leaf=lambda leaf: leaf is None)
        return new_params, new_state

    return step


def trained_variables(optimizer: Optimizer) -> list[tuple[Path, Variable]]:
    """Returns path and Variable of an optimizer's parameters, in its order."""
    return optimizer._chosen()


def gradient_layout(optimizer: Optimizer, places: State) -> State:
    """Returns shardings for gradients, as of the state following each parameter."""
    chosen = optimizer._chosen()
    shapes = jax.tree.map(
        _shape_of, optimizer._state_of([stored_value(variable) for _, variable in chosen])
    )

    layout = optimizer_state.layout_of(optimizer._transformation, shapes)
    owners = [path for path, variable in chosen for _ in jax.tree.leaves(stored_value(variable))]

    parts = {"inner": ("opt_state",), "masters": ("masters",)}
    of_gradients: dict[Path, Any] = {}
    for leaf in layout.leaves:
        if leaf.follows is not None and leaf.dims == tuple(range(len(leaf.shape))):
            path = ("opt_state", *leaf.path)
            if optimizer.master_dtype is not None:
                path = (*parts[str(leaf.path[0])], *leaf.path[1:])
            of_gradients.setdefault(owners[leaf.follows], places.flat()[path])

    return State.from_flat(of_gradients)


def _either(param: object, master: object):
    return param if master is None else master


def _current(param, master):
    """Returns a master, or a parameter changed since."""
    if master is None:
        return param
    # Rounded in a way that the compiler keeps: it may leave out a cast there and back. What is
    # too small to be normal is rounded to zero then, so that is compared by distance.
    finfo, param = jnp.finfo(param.dtype), laid_out_as(master, param)
    value = param.astype(master.dtype)
    rounded = jax.lax.reduce_precision(master, finfo.nexp, finfo.nmant)
    is_small = jnp.abs(value) <= finfo.smallest_normal.astype(master.dtype)
    is_near = jnp.abs(master - value) <= finfo.smallest_subnormal.astype(master.dtype)
    return jnp.where((rounded == value) | (is_small & is_near), master, value)


def _as_wide(wide, grad):
    """Returns a gradient as wide as the master, laid out alike."""
    grad = jnp.asarray(grad)
    return laid_out_as(wide, grad.astype(optimizer_state.wider_dtype(grad.dtype, wide.dtype)))


def _floating(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Returns a dtype, or raises if it is not floating."""
    try:
        np_dtype = jnp.dtype(dtype)
    except TypeError:
        np_dtype = np.dtype(bool)
    Options(TransformError).check(
        "master_dtype",
        dtype,
        jnp.issubdtype(np_dtype, jnp.floating),
        "a floating dtype",
        "Wider copies of bfloat16 parameters are mostly float32: "
        "Optimizer(model, tx, master_dtype=jnp.float32).",
    )
    return jax.dtypes.canonicalize_dtype(np_dtype)


def _axes_of_leaves(variable: Variable) -> Sequence[Any]:
    """Returns the names of the dimensions of each array of a parameter."""
    if variable.axes is not None:
        return [variable.axes] * len(jax.tree.leaves(stored_value(variable)))
    (leaf,) = TreeInventory(variable).leaves
    return [array.axes for array in leaf.arrays]


def _metadata_of(
    leaf: optimizer_state.StateLeaf, owners: Sequence[tuple[Variable, Any]]
) -> dict[str, Any]:
    """Returns the axes of a leaf, and the box of its parameter."""
    if leaf.follows is None:
        return {}
    owner, axes = owners[leaf.follows]
    if axes is None or any(d is not None and d >= len(axes) for d in leaf.dims):
        return {}
    names = tuple(None if dimension is None else axes[dimension] for dimension in leaf.dims)
    return Origin.of(owner).layout_metadata(names)


def _shape_of(value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(value.shape), value.dtype)


def _apply(update, param):
    return param if update is None else laid_out_as(param, (param + update).astype(param.dtype))


def laid_out_as(old: Any, new: Any) -> Any:
    """Returns a new value laid out as the old one, if known."""
    # A state that is split further than its parameter would otherwise hand its layout on to the
    # parameter. Over Auto axes inside a program nothing is known; there in_shardings says it.
    if not isinstance(old, jax.Array):
        return new
    if not isinstance(old, Tracer) and not isinstance(new, Tracer):
        same = new.sharding.is_equivalent_to(old.sharding, old.ndim)
        return new if same else jax.device_put(new, old.sharding)
    place = jax.typeof(old).sharding
    is_explicit = AxisType.Explicit in place.mesh.axis_types
    same = not is_explicit or jax.typeof(new).sharding == place
    return new if same else jax.sharding.reshard(new, place)


def _align(grads: object, params: State) -> State:
    """Returns gradients in the order of the parameters, or raises TrainError."""
    expected = params.flat()
    gradients = values_by_path(grads, expected)
    names = [format_path(path) for path in expected]

    lines = []
    for path in gradients.keys() - expected.keys():
        matches = difflib.get_close_matches(format_path(path), names, n=1)
        hint = f" (did you mean {matches[0]}?)" if matches else ""
        lines.append(f"  {format_path(path)}: has a gradient but is not trained{hint}")

    for path, param in expected.items():
        if path not in gradients:
            lines.append(f"  {format_path(path)}: is trained but has no gradient")
        elif _shapes(gradients[path]) != _shapes(param):
            lines.append(
                f"  {format_path(path)}: has shape {_shown(param)}, its gradient "
                f"{_shown(gradients[path])}"
            )

    raise_if_any(
        TrainError,
        sorted(lines),
        "The gradients do not fit the trained parameters; nothing was changed:\n",
        "\nTake them with the optimizer's own filter and of the same model: "
        "sx.grad(loss, wrt=optimizer.wrt)(optimizer.model, ...).",
        separator="\n",
        most=len(lines),  # all: each is a parameter
    )

    return State.from_flat({path: gradients[path] for path in expected}, params.origins())


def _shapes(value: object):
    leaves, treedef = jax.tree.flatten(value)
    return treedef, [np.shape(leaf) for leaf in leaves]


def _shown(value) -> str:
    shapes = [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(value)]
    return str(shapes[0] if len(shapes) == 1 else shapes)


def _new_arrays(state: object, layout: optimizer_state.StateLayout) -> list[Any]:
    """Returns the arrays of a new state, or raises TrainError."""
    separated = optimizer_state.separate_arrays(state)
    if separated.treedef != layout.treedef or separated.static.keys() != layout.static.keys():
        raise TrainError(
            "The transformation's update returned a state of another structure than its init (use "
            f"zeros for what is not known yet): {separated.treedef} instead of {layout.treedef}."
        )
    wrong = [
        f"{format_path(leaf.path)} from {leaf.shape} to {tuple(np.shape(value))}"
        for leaf, value in zip(layout.leaves, separated.arrays, strict=True)
        if tuple(np.shape(value)) != leaf.shape
    ]
    head = "The transformation's update changed the shapes of its state: "
    raise_if_any(TrainError, sorted(wrong), head, ".")
    return separated.arrays
