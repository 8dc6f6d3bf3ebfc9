# SPDX-License-Identifier: Apache-2.0
"""Activations of selected layers beside the result of a call.

Selected layers are wrapped for the time of one call, in a copy of the model that shares its
Variables. The layers of a ``nn.Stack`` compute their activations in one scan; these are cut by
layer, so that paths and values do not depend on how a model runs its layers.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax import Module, Selection, iter_modules, jit, select
from shardax.extend import ModuleWrapper, Path, PyTree, attributes_of, has_objects
from shardax.models.generating.generation import generate
from shardax.surgery import errors
from shardax.surgery.edits import TransparentWrapper, checked_selection, wrap_selected
from shardax.surgery.unrolled import StackSteps, unrolled_path


class _Recording(TransparentWrapper):
    """A layer whose results are saved, or its inputs."""

    _own = frozenset({"body", "activation", "inputs"})

    def __init__(self, layer: Callable[..., PyTree], inputs: bool) -> None:
        super().__init__(layer)
        self.inputs = inputs

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if self.inputs:
            self.sow("activation", first_argument("record", self.body, args, kwargs))
            return self.body(*args, **kwargs)

        result = self.body(*args, **kwargs)
        self.sow("activation", result)
        return result


def first_argument(
    edit: str, layer: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> PyTree:
    """Returns the first argument of a call of a layer.

    Raises:
        SelectionError: If it is not made of arrays alone.
    """
    if args:
        first = args[0]
    else:
        keyword = first_keyword(layer, kwargs)
        first = None if keyword is None else kwargs[keyword]

    leaves = [] if has_objects(first) else jax.tree.leaves(first)
    if not leaves or not all(isinstance(leaf, ARRAY_TYPES) for leaf in leaves):
        raise errors.no_input(edit, layer, first)
    return first


def first_keyword(layer: Callable[..., PyTree], kwargs: Mapping[str, PyTree]) -> str | None:
    """Returns the keyword by which a call without positions gives a layer's first parameter.

    Args:
        layer: What is called.
        kwargs: Its keywords, in any order.

    Returns:
        The keyword; None if the first parameter is not given, or is not known.
    """
    try:
        parameters = inspect.signature(layer).parameters.values()
    except (TypeError, ValueError):  # a function of C without a signature
        parameters = ()
    first = next(iter(parameters), None)

    if first is not None and first.kind not in (first.VAR_POSITIONAL, first.VAR_KEYWORD):
        return first.name if first.name in kwargs else None

    # A wrapper hands on what it is given. Any other callable says nothing of an order.
    if isinstance(layer, ModuleWrapper):
        return first_keyword(layer.body, kwargs)
    return next(iter(kwargs)) if len(kwargs) == 1 else None


ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)

# What selects layers to record.
Choice = Selection | Callable[[Selection], Selection] | type[Module]


def record(model: PyTree, *selections: Choice, inputs: bool = False) -> Recording:
    """Makes a call of a model also return activations of selected layers.

    Args:
        model: A Module that can be called.
        *selections: Layers of it, or functions that it calls; layers of one selection may be inside
            those of another. Each is a class of layers, a selection of the model, or a function of
            ``sx.select(model)`` that returns one.
        inputs: Whether to return what the layers were given, their first argument, in place of
            what they returned.

    Returns:
        A ``Recording``, which is called with the model's arguments and returns (result,
        activations). These are a dict of path to what was returned there, or to a tuple for a layer
        that was called more than once; layers that were not called are absent. Layers of a
        ``nn.Stack`` have the paths and values of unrolled ones, as have those of a layer of yours
        with a method ``unrolled_paths``. What the call writes into the model remains, without the
        activations.

    Raises:
        SelectionError: If a selection is of another tree, if something selected is not called, or
            if nothing is selected; when called, if the model has no such places any more, or, with
            ``inputs``, if the first argument of a layer is no array and no pytree of arrays.
        TransformError: When called, if a selected layer is called in a branch of ``sx.cond``; when
            called, if it is called in a loop other than ``sx.scan``.
        ForeignMutationError: Likewise, if it is reached through a closure.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> model = sx.nn.Stack(lambda: sx.nn.MLP(2, 4, rngs=rngs), 3)
        >>> y, activations = sx.surgery.record(model, sx.nn.MLP)(jnp.ones((1, 2)))
        >>> list(activations), bool((activations[2,] == y).all())
        ([(0,), (1,), (2,)], True)
        >>> down = lambda model: model.at_instances_of(sx.nn.MLP).at(lambda mlp: mlp.down)
        >>> y, hidden = sx.surgery.record(model, down, inputs=True)(jnp.ones((1, 2)))
        >>> list(hidden)[:2], hidden[1, "down"].shape
        ([(0, 'down'), (1, 'down')], (1, 4))
    """
    paths: dict[Path, None] = {}
    for item in selections:
        selection = _as_selection(model, item)
        if selection.tree is not model:
            raise errors.selection_of_another_tree()
        for path in selection.keypaths():
            paths[_recorded_path(model, path, inputs)] = None
    if not paths:
        raise errors.nothing_to_record()
    _recording(model, paths, inputs)  # refuses what is not called
    return Recording(model, paths, inputs)


class Recording(Module):
    """A model whose call also returns activations; made by ``record``.

    Args:
        model: The model.
        paths: Where the recorded layers are.
        inputs: Whether the inputs of layers are recorded, and not their results.

    Attributes:
        model: The model.
        paths: Where the recorded layers are.
        inputs: Whether the inputs of layers are recorded.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> recording = sx.surgery.record(sx.nn.MLP(2, 4, rngs=sx.Rngs(0)), sx.nn.Linear)
        >>> type(recording) is sx.surgery.Recording, recording.paths
        (True, (('gate',), ('up',), ('down',)))
        >>> y, activations = sx.jit(recording)(jnp.ones((1, 2)))
        >>> bool((activations["down",] == y).all())
        True
    """

    def __init__(self, model: PyTree, paths: Iterable[Path], inputs: bool = False) -> None:
        self.model = model
        self.paths = tuple(paths)
        self.inputs = inputs

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> tuple[Any, dict[Path, Any]]:
        """Calls the model.

        Args:
            *args: What the model takes.
            **kwargs: Likewise.

        Returns:
            The model's result, and the activations by path.
        """
        recording = _recording(self.model, self.paths, self.inputs)
        copies = [
            (copy, original, dict(vars(copy))) for copy, original in _copies(recording, self.model)
        ]

        result = recording(*args, **kwargs)

        for copy, original, before in copies:
            _take_over(copy, original, before)
        return result, _activations(recording)

    def generate(
        self, prompts: Sequence[Sequence[int]] | None = None, **options: Any
    ) -> tuple[list[np.ndarray], dict[Path, Any]]:
        """Continues prompts, and returns activations for each token of the texts.

        The finished texts are read in one call, without a cache. A causal model computes in it what
        it computed token by token, but for rounding. Layers that draw random numbers in training
        mode (dropout) draw others: call ``model.eval()`` first.

        Args:
            prompts: As for ``sx.models.generate``; of a causal model, so they are needed.
            **options: Likewise; without ``stream`` and ``inputs``.

        Returns:
            The texts as ``sx.models.generate`` returns them, and the activations by path: an array
            for the tokens of all texts, of shape (texts, longest text, ...). After the end of a
            shorter text it has no meaning.

        Raises:
            GenerationError: As ``sx.models.generate``; without prompts; for ``stream`` and
                ``inputs``.

        Example:
            >>> import shardax as sx
            >>> config = sx.models.DecoderConfig(num_layers=2, embed_dim=8)
            >>> model = sx.models.Decoder(config, rngs=sx.Rngs(0))
            >>> recording = sx.surgery.record(model, sx.nn.MLP)
            >>> rows, activations = recording.generate([[7], [1, 2, 3]], max_new_tokens=4)
            >>> [len(row) for row in rows], activations["layers", 1, "mlp"].shape
            ([5, 7], (2, 7, 8))
        """
        if prompts is None or not {"stream", "inputs"}.isdisjoint(options):
            raise errors.not_recorded()
        rows = generate(self.model, prompts, **options)

        # A causal model knows nothing of what stands behind a token, so the padding needs no mask.
        tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for row, text in zip(tokens, rows, strict=True):
            row[: len(text)] = text
        return rows, _call_compiled(self, tokens)[1]


@jit
def _call_compiled(recording: Recording, tokens: jax.Array) -> tuple[Any, dict[Path, Any]]:
    return recording(tokens)


def _as_selection(model: PyTree, item: Choice) -> Selection:
    """Returns the selection that a class, a function or a selection stands for."""
    if isinstance(item, type) and issubclass(item, Module):
        return select(model).at_instances_of(item)

    if isinstance(item, Module):
        paths = [path for path, module in iter_modules(model) if module is item and path]
        raise errors.layer_as_selection(item, paths[0] if paths else None)
    if callable(item) and not isinstance(item, (Selection, type)):
        return checked_selection("record", item(select(model)))
    return checked_selection("record", item)


def _recorded_path(model: PyTree, path: Path, inputs: bool) -> Path:
    """Returns where a selected layer is recorded, if it is patched.

    Its result is that of the patch, which is around it. Its input is what the patch gives it.
    """
    patches = {
        place for place, module in iter_modules(model) if isinstance(module, TransparentWrapper)
    }
    if inputs:
        while path in patches:
            path = (*path, "body")
        return path

    while path[-1:] == ("body",) and path[:-1] in patches:
        path = path[:-1]
    return path


def _recording(model: object, paths: Iterable[Path], inputs: bool) -> Any:
    """Returns a copy with recorders at paths, and the model's Variables."""
    # What is inside another selected layer is wrapped before the path to it becomes longer.
    for _, group in itertools.groupby(sorted(paths, key=len, reverse=True), key=len):
        inner = select(model).at_keypaths(*group)
        model = wrap_selected("record", inner, lambda _, layer: _Recording(layer, inputs))
    return model


def _copies(recording: object, model: object) -> Iterator[tuple[Module, Module]]:
    """Yields copied Modules of a recording with the originals."""
    originals = dict(iter_modules(model))
    modules = dict(iter_modules(recording))
    for path, module in modules.items():
        original = originals.get(_path_in_model(path, modules))
        if not isinstance(module, _Recording) and original not in (None, module):
            yield module, original


def _path_in_model(place: Path, modules: Mapping[Path, Module]) -> Path:
    """Returns a path without the steps into bodies of recorders."""
    return tuple(
        key
        for position, key in enumerate(place)
        if not (key == "body" and isinstance(modules.get(place[:position]), _Recording))
    )


def _attributes(module: Module) -> dict[str, object]:
    """Returns the attributes of a Module, those of arrays by value."""
    own = vars(module)
    return {
        name: value if name in own else value.value for name, value in attributes_of(module).items()
    }


def _take_over(copy: Module, original: Module, before: Mapping[str, object]) -> None:
    """Gives a Module the attributes that a call gave its copy."""
    after = _attributes(copy)
    for name in before.keys() - after.keys():
        delattr(original, name)
    for name, value in after.items():
        if name not in before or before[name] is not value:
            setattr(original, name, value)


class _Recorded(NamedTuple):
    """What one recorder saw, and the stacks that it is in."""

    path: Path  # in an unrolled model, up to the outermost stack
    stacks: tuple[StackSteps, ...]
    calls: tuple[PyTree, ...]

    def check_number_of_layers(self) -> None:
        """Raises if the outermost stack has another number of layers than paths."""
        count = len(self.stacks[0].layers)
        for array in jax.tree.leaves(self.calls):
            if array.shape[0] != count:
                raise errors.wrong_number_of_paths(self.path, count, array.shape[0])

    def layer(self, index: int) -> _Recorded:
        """Returns what was seen of one layer of the outermost stack."""
        (layers, after), *inner = self.stacks
        calls = jax.tree.map(operator.itemgetter(index), self.calls)
        return _Recorded((*self.path, *layers[index], *after), tuple(inner), calls)


def _activations(recording: object) -> dict[Path, PyTree]:
    """Returns what recorders saw by path in the model, cut by layer."""
    modules = dict(iter_modules(recording))
    entries: list[_Recorded] = []
    for place, module in modules.items():
        saved = module.__dict__.get("activation") if isinstance(module, _Recording) else None
        if saved is not None:
            path, stacks = unrolled_path(place, modules)
            entries.append(_Recorded(path, tuple(stacks), saved.value))
    return dict(_by_layer(entries))


def _by_layer(entries: Iterable[_Recorded]) -> Iterator[tuple[Path, PyTree]]:
    """Yields (path, activation) in the order of unrolled layers."""
    for stack, group in itertools.groupby(entries, key=_outermost_stack):
        if stack is None:
            for entry in group:
                yield entry.path, entry.calls[0] if len(entry.calls) == 1 else entry.calls
            continue

        inside = list(group)
        for entry in inside:
            entry.check_number_of_layers()

        _, length = stack
        for index in range(length):
            yield from _by_layer([entry.layer(index) for entry in inside])


def _outermost_stack(entry: _Recorded) -> tuple[Path, int] | None:
    """Returns where the outermost stack is, and its number of layers; None without one."""
    return (entry.path, len(entry.stacks[0].layers)) if entry.stacks else None
