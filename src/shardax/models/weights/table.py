# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model beside the tensors of its files, by the family's table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardax import Param, Quantized, iter_variables
from shardax.extend import Path, format_path, join_first, raise_if_any
from shardax.models.architecture import parameter_places
from shardax.models.comparison import refusal
from shardax.models.config.transformer import TransformerConfig
from shardax.models.dual_encoder import TOWERS
from shardax.models.encoder_decoder import HALVES
from shardax.models.entries import Entry, WrittenLayout, layout_of, place_of, tensor_of_scales
from shardax.models.family import Family
from shardax.models.files import DTYPES, READ_DTYPES, TensorFiles
from shardax.models.kinds import PretrainedError
from shardax.models.quantized.mxfp4 import PACKING
from shardax.models.tensors import Tensor
from shardax.models.tied import TiedNames
from shardax.models.weights.slices import put_parameter
from shardax.nn.stack import Stack


def _is_tied(config: Any) -> bool:
    """Whether the head is the embedding."""
    is_single = isinstance(config, TransformerConfig)
    return config.output.tied if is_single else config.tied_head


class TensorTable:
    """Places of the parameters of a model in its files.

    Attributes:
        tensors: The family's descriptions, by the parameter's name in them.
        entries: The parameters, each with its description.
        by_name: Of each tensor the parameters that it holds, each with its layer and expert.
        prefix: What the names of the family's table begin with and those of these files do not.
        unknown: Paths of parameters of which the family has no description.
        passed_over: Tensors that are not read, and are no error.
    """

    def __init__(self, config: Any, family: Family, names: Iterable[str] | None) -> None:
        """Makes the table without parameters, of files with these names or, for None, new ones."""
        head_tensors = family.head_tensors.get(config.head, ())
        tensors = (*family.tensors_for(config), *head_tensors)
        self.tensors = {tensor.to: tensor for tensor in tensors}
        ties = (name for name, field in family.fields.items() if "output.tied" in field.targets)
        self.tie_field = next(ties, None)
        self.tied = config.head == "tokens" and _is_tied(config)
        self.buffers = tuple(family.buffers)

        # Models without a head, and some old files, do without the prefix.
        bare = config.head is None
        if names is not None:
            bare = not any(name.startswith(family.prefix) for name in names)
        self.prefix = family.prefix if bare else ""

        self.entries: list[Entry] = []
        self.unknown: list[str] = []
        self.passed_over: set[str] = set()
        self.by_name: dict[str, list[tuple[Entry, int, int]]] = {}

    @classmethod
    def of_built(cls, model: Any, family: Family, names: Iterable[str]) -> TensorTable:
        """Returns the table of a new model."""
        table = cls(model.config, family, names)
        for path, variable in iter_variables(model, Param, Quantized):
            place, layers, stacked = _place(path, model, model.config)
            table.add(path, variable, place, layers, stacked)

        table.sort()
        for entry in table.entries:
            table.add_names(entry, entry.layers or (0,))
        return table

    @classmethod
    def of_edited(cls, model: object, family: Family, config: Any) -> TensorTable:
        """Returns the table of an edited model, or raises for lost parts."""
        table = cls(config, family, None)
        for part in parameter_places(model, config):
            tower, path = _of_tower(part.path)
            place = (path[0], *path[2:]) if path[0] == "layers" else path
            stacked = part.position is not None
            name = ".".join(map(str, (*tower, *place)))
            table.add(part.path, part.variable, name, part.layers, stacked)
        table.check_complete()

        # Of unrolled layers the tensor is of the layer in the path.
        table.sort()
        for entry in table.entries:
            layer = (int(str(_of_tower(entry.path)[1][1])),) if entry.layers else (0,)
            table.add_names(entry, layer)

        for name, places in table.by_name.items():
            dtypes = {str(entry.variable.dtype): format_path(entry.path) for entry, *_ in places}
            listed = ", ".join(f"{path} ({dtype})" for dtype, path in dtypes.items())
            if len(dtypes) > 1:
                raise refusal([f"{name} is one tensor of {listed}"])
        return table

    def add(
        self, path: Path, variable: object, place: str, layers: tuple[int, ...], stacked: bool
    ) -> None:
        """Adds a parameter by its path in the family's table."""
        place, is_scale = place_of(place, path, variable)
        tensor = self.tensors.get(place)
        if tensor is None:
            self.unknown.append(format_path(path))
        else:
            tensor = tensor_of_scales(tensor) if is_scale else tensor
            self.entries.append(Entry(path, variable, tensor, layers, stacked, self.prefix))

    def sort(self) -> None:
        """Puts the parameters into the order of the family's table."""
        order = {place: index for index, place in enumerate(self.tensors)}
        self.entries.sort(key=lambda entry: (_layer_of(entry), order[entry.tensor.to]))

    def add_names(self, entry: Entry, layers: Iterable[int]) -> None:
        """Notes the tensors of a parameter."""
        for layer in layers:
            for expert in range(entry.experts):
                place = (entry, layer, expert)
                self.by_name.setdefault(entry.name(layer, expert), []).append(place)

    def pass_over_heads(self, family: Family) -> None:
        """Notes the unread tensors of heads."""
        tensors = [*itertools.chain(*family.head_tensors.values())]
        heads = ("head", "decoder.head")
        tensors += [tensor for tensor in family.tensors if tensor.to.startswith(heads)]

        self.passed_over = {
            name for t in tensors for name in (t.name, t.name.removeprefix(family.prefix))
        }

    def check_complete(self) -> None:
        """Raises if there are parameters without a tensor."""
        if self.unknown:
            raise PretrainedError(
                f"The model has parameters that its family has no tensors for: "
                f"{join_first(self.unknown, most=12)}."
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, all its parts together."""
        entries = [entry for entry, _, _ in self.by_name[name]]
        sizes = [entry.axis_sizes() for entry in entries]
        return tuple(
            sum(size[i] for size in sizes) if axis.is_concatenated else sizes[0][i]
            for i, axis in enumerate(entries[0].tensor.tensor_axes)
        )

    def offset(self, entry: Entry, layer: int, axis: int) -> tuple[int, int]:
        """Returns a parameter's start on a shared axis, and the size."""
        if not entry.tensor.tensor_axes[axis].is_concatenated:
            return 0, entry.axis_sizes()[axis]
        entries = [sibling for sibling, _, _ in self.by_name[entry.name(layer)]]
        sizes = [
            sibling.axis_sizes()[axis] // math.prod(entry.outer_sizes(axis)) for sibling in entries
        ]
        return sum(sizes[: entries.index(entry)]), sum(sizes)

    def match(self, files: TensorFiles, where: str, strict: bool, tied: TiedNames) -> str | None:
        """Matches parameters with tensors, and returns a warning of those left out."""
        self.check_complete()

        missing = [name for name in self.by_name if name not in files.names]
        used = {*self.by_name, *tied.used, *self.passed_over}
        unused = [
            name
            for name in files.names
            if name not in used and not name.endswith(self.buffers or ("\0",))
        ]

        wrong: list[str] = []
        if strict and missing:
            wrong.append(f"missing are {join_first(missing, most=12)}")
        if strict:
            apart = [names for names in tied.differing if not self.passed_over & {*names}]
            wrong += [self._difference(*names) for names in apart]
            unused = [name for name in unused if not any(name in names for names in apart)]
        if strict and unused:
            wrong.append(f"the model has no place for {join_first(unused, most=12)}")
        remedy = self._remedy(missing) if wrong else ""
        wrong += self._misfits(files)
        head = f"The tensors in {where} do not fit: "
        raise_if_any(PretrainedError, wrong, head, f".{remedy}", separator="; ", most=len(wrong))

        # Where each parameter begins in a tensor that several share.
        for entry in self.entries:
            for axis in range(len(entry.tensor.tensor_axes)):
                offsets = self.offset(entry, (entry.layers or (0,))[0], axis)
                files.offsets[entry.path, axis] = offsets

        # A parameter of which a part is missing is initialised whole.
        drawn = {related for name in missing for related in self._beside(name)}
        passed = {
            "initialised at random, as no tensor is there": missing,
            "initialised with them, as they are stacked in one parameter": [
                name for name in self.by_name if name in drawn and name in files.names
            ],
            "not read, as the model has no place": unused,
        }
        parts = [
            f"{title}: {join_first(names, most=12)}" for title, names in passed.items() if names
        ]
        return f"The model is not all of {where}: {'; '.join(parts)}." if parts else None

    def _dtypes(self, name: str) -> Mapping[str, str]:
        """Returns the possible dtypes of a tensor."""
        entry = self.by_name[name][0][0]
        return READ_DTYPES if isinstance(entry.variable, Quantized) else DTYPES

    def _misfits(self, files: TensorFiles) -> Iterator[str]:
        """Yields tensors of another shape, or of an unread dtype."""
        for name in self.by_name:
            if name in files.names:
                shape, expected = files.shape(name), self.shape(name)
                if shape != expected:
                    yield f"{name} has the shape {shape}, but the config says {expected}"
                elif files.dtype(name) not in self._dtypes(name):
                    yield (
                        f"{name} has the dtype {files.dtype(name)}, and only {', '.join(DTYPES)} "
                        f"are read, without a {PACKING} that says more"
                    )

    def _remedy(self, missing: Sequence[str]) -> str:
        """Returns advice on files with missing or further tensors."""
        lenient = (
            " sx.models.from_pretrained(folder, strict=False) initialises what is missing at "
            "random and leaves out what has no place; it warns with the names."
        )
        paths = {entry.tensor.to for name in missing for entry, _, _ in self.by_name[name]}
        if not missing or not all(path.startswith(("head", "pooler")) for path in paths):
            return lenient
        return (
            " Only tensors of the head are missing: sx.models.from_pretrained(folder, head=False) "
            f"reads the layers alone.{lenient}"
        )

    def _beside(self, name: str) -> Iterator[str]:
        """Yields the tensors read into the same parameters as another."""
        for entry, _, _ in self.by_name[name]:
            yield from entry.names()

    def _difference(self, name: str, *others: str) -> str:
        """Describes names of one tensor under which there are different numbers."""
        more = ""
        if self.tie_field is not None:
            more = f' (with "{self.tie_field}": false in config.json they are two)'
        return f"{' and '.join((name, *others))} are one tensor, but differ{more}"

    def layout(self, packing: Mapping[str, Any] | None) -> WrittenLayout:
        """Returns the layout of quantized kernels, or raises by path."""
        linear = [name for name, places in self.by_name.items() if _is_linear(places[0][0].tensor)]
        if self.tied and "head.kernel" in self.tensors:
            linear.append(self.tensors["head.kernel"].name.removeprefix(self.prefix))
        names = [name.removesuffix(".weight") for name in linear if name.endswith(".weight")]
        return layout_of(self.by_name, self.shape, packing, names)

    def tensor(self, name: str, whole: Callable[[Any], np.ndarray]) -> np.ndarray:
        """Returns a tensor that is put together from the parameters that ``whole`` reads."""
        places = self.by_name[name]
        result: np.ndarray | None = None
        for entry, layer, expert in places:
            value = whole(entry.variable)
            value = value[entry.layers.index(layer)] if entry.stacked else value
            value = value[expert] if entry.tensor.is_of_expert else value

            if result is None:
                result = np.empty(self.shape(name), value.dtype)
            put_parameter(
                result, value, entry, [self.offset(entry, layer, i) for i in range(result.ndim)]
            )
        assert result is not None
        return result


def _is_linear(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix that inputs are multiplied with."""
    return len(tensor.axes) == 2 and not tensor.to.endswith("embedding")


def _layer_of(entry: Entry) -> tuple[Any, ...]:
    """Returns the layer of a parameter, of several the first."""
    _, path = _of_tower(entry.path)
    unrolled = entry.layers and path[0] == "layers" and isinstance(path[1], int)
    return (path[1],) if unrolled else entry.layers[:1]


def _of_tower(path: Path) -> tuple[Path, Path]:
    """Splits a path into the part of a tower and the rest."""
    at = 1 if path[0] in (*TOWERS, *HALVES) else 0
    return path[:at], path[at:]


def _place(path: Path, model: Any, config: Any) -> tuple[str, tuple[int, ...], bool]:
    """Returns a path's name in a table, its layers, and if stacked."""
    if path[0] in (*TOWERS, *HALVES):
        name = str(path[0])
        tower = getattr(model, name), getattr(config, name)
        place, layers, stacked = _place(path[1:], *tower)
        return f"{name}.{place}", layers, stacked

    # What a period does not divide is unrolled, after the stack.
    count = config.num_layers
    if path[0] == "rest":
        first = count - count % config.period
        return ".".join(("layers", *map(str, path[2:]))), (first + int(str(path[1])),), False
    if path[0] != "layers":
        return ".".join(map(str, path)), (), False

    if not isinstance(model.layers, Stack):
        return ".".join(("layers", *map(str, path[2:]))), (int(str(path[1])),), False
    if config.period == 1:
        return ".".join(("layers", *map(str, path[2:]))), tuple(range(count)), True

    # A period of several layers is a Sequential of them: layers.stacked.layers.POSITION.
    layers = tuple(range(int(str(path[3])), count - count % config.period, config.period))
    return ".".join(("layers", *map(str, path[4:]))), layers, True
