# SPDX-License-Identifier: Apache-2.0
"""Published weights: straight into shards, and back into files.

The descriptions in ``shardax.models.families`` say where each parameter stands in the files.
``from_pretrained`` has five steps:

    read     ``config.json``, and of tensors their names, shapes and dtypes
    build    the model of the config: its parameters are initializers, which nothing computes
    match    each parameter with its tensors, and names what is missing, left over or unfit
    place    a sharding for each parameter, by rules that are checked for the mesh
    fill     each parameter with the slices that the devices of this process hold

The first four raise before an array of a parameter is made. They read numbers only of the shapes of
packed weights, and where files hold one tensor under several names, to compare them, some rows at a
time. The fill checks nothing: in it a file may fail to be read, or memory be short. After it
``shard`` computes what no tensor was for, by the rules that were checked.

The fill goes slice by slice, and waits for a slice to be on its devices before it reads the next.
So the host holds one slice at a time; without a mesh a slice is a whole parameter. The slice has
the dtype of the file. While it is converted to ``param_dtype``, if that is given, the host holds it
in both dtypes. While a slice of stacked layers or of experts is put together, the host holds it and
two of its layers or experts, in the dtype of the file. Quantized kernels are read as they are
stored, and not converted; with ``dequantize`` the host also holds scales of the size of the slice.
``dtype`` is that of calls; no parameter has it for that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import (
    Param,
    Quantized,
    Rngs,
    Rules,
    check,
    distributed,
    iter_modules,
    iter_variables,
    shard,
    shardings,
)
from shardax._files import draft_folder, move_files, write_tensors
from shardax.errors import PartitionCheckError
from shardax.extend import (
    AnyMesh,
    Options,
    RulesLike,
    ScopeSettings,
    byte_count,
    format_path,
    join_first,
    mesh_axes_of,
    needs_package,
    raise_if_any,
    warn_user,
)
from shardax.extend import Path as VariablePath
from shardax.models.architecture import describe, parameter_places
from shardax.models.comparison import refusal
from shardax.models.config.transformer import TransformerConfig
from shardax.models.decoder import DECODER_RULES
from shardax.models.dual_encoder import TOWERS
from shardax.models.encoder_decoder import HALVES, EncoderDecoderConfig, build_model
from shardax.models.entries import (
    Entry,
    WrittenLayout,
    layout_of,
    place_of,
    quantize_as_stored,
    tensor_of_scales,
)
from shardax.models.families.registry import family_of
from shardax.models.family import Family
from shardax.models.files import DTYPES, INDEX, READ_DTYPES, SINGLE, TensorFiles, read_json
from shardax.models.generating.config import (
    GENERATION_CONFIG,
    GenerationConfig,
    config_of_texts,
    generation_content,
    read_generation_config,
)
from shardax.models.generating.errors import GenerationError
from shardax.models.kinds import PretrainedError
from shardax.models.quantized.mxfp4 import PACKING, is_packed
from shardax.models.tensors import Tensor
from shardax.models.tied import TiedNames, has_tied_head
from shardax.models.words import refuses_other_words
from shardax.nn.attention.dot_product import AttentionKernel
from shardax.nn.attention.multi_head import MultiHeadAttention
from shardax.nn.stack import Stack
from shardax.partition import current_rules, resolve_mesh

CONFIG = "config.json"
LARGEST_FILE = 5 * 2**30
_DTYPE_FIELDS = frozenset(["dtype", "torch_dtype"])
# What is fetched of a hub's model: its weights are often there in other formats too.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template*"),
    *(GENERATION_CONFIG, "vocab.json", "merges.txt", CONFIG),
)
MODEL_FILES = (*TOKENIZER_FILES, SINGLE, INDEX, "model-*.safetensors")


@refuses_other_words("from_pretrained")
def from_pretrained(
    directory: str | Path,
    *,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    param_dtype: jax.typing.DTypeLike | None = None,
    strict: bool = True,
    head: bool = True,
    scan_layers: bool = False,
    remat: str | Mapping[str, str] | None = None,
    attention: AttentionKernel | None = None,
    dequantize: bool = False,
    rngs: Rngs | None = None,
) -> Any:
    """Loads a published model, each device its own part.

    The files are those of Hugging Face: ``config.json`` and safetensors, in one file or several
    with an index. Kernels that are quantized in the files, by compressed-tensors or in fp8, are
    ``nn.QuantizedKernel`` of the same numbers and scales. Everything is checked before anything is
    made. The model is in evaluation: ``model.train()`` turns its dropout on.

    Args:
        directory: The folder of the files; or the name of a model on the hub, such as
            ``"org/name"`` or, of a branch, tag or commit, ``"org/name@revision"``, which is
            downloaded by ``huggingface_hub`` (``pip install 'shardax[hub]'``).
        mesh: The mesh; None for the one in scope, and without any one device.
        rules: Rules for the names of axes; None for the current ones, or ``DECODER_RULES``, by
            which sizes that the mesh does not divide stay whole, with a warning.
        dtype: Compute dtype; None for that of the parameters.
        param_dtype: Dtype of the parameters; None for that in the files.
        strict: Whether tensors that the model has no place for are an error, and parameters that no
            tensor is for. If not, such parameters are initialised, and a warning names both.
        head: Whether the head is read. If not, the layers alone are, such as for embeddings, also
            of files that hold a head; and the pooler where the files have one.
        scan_layers: Whether layers are stacked and run by a loop.
        remat: As for ``TransformerConfig``.
        attention: The kernel of all attention layers, as for ``sx.kernels``; None for that of the
            scope of each call.
        dequantize: Whether quantized kernels are read as numbers of ``param_dtype``, and not as
            they are stored.
        rngs: Random streams for dropout and for what is initialised; None for ``Rngs(0)``.

    Returns:
        The model, a ``Transformer``; of ``clip`` and ``siglip`` a ``DualEncoder``, of encoder-
        decoders an ``EncoderDecoder``, of ``convnext`` and ``convnextv2`` a ``ConvNeXt``.
        ``model.config`` says what it is made of, and ``model.generation_config`` what its texts
        begin and end with.

    Raises:
        PretrainedError: If there is no such model, the type of the model or a field of its config
            is unknown or unsupported, or tensors are missing, left over or of another shape; names
            them all.
        PartitionCheckError: If the rules do not fit the mesh.
        TypeError: For an option that there is not; names ours for one of ``transformers``.
        TransformError: If the mesh has no devices, or axes of type Manual.
        ImportError: If ``safetensors`` is missing, or ``huggingface_hub`` for a name.

    Example:
        >>> import tempfile, shardax as sx
        >>> model = sx.models.Decoder(sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0))
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> sx.models.save_pretrained(model, folder)
        >>> loaded = sx.models.from_pretrained(folder, scan_layers=True)
        >>> loaded.layers.stacked.mlp.up.kernel.shape
        (1, 64, 192)
    """
    where = resolve_mesh(mesh, for_arrays_of="from_pretrained")
    folder = find_directory(directory)
    source = str(folder / CONFIG)

    # Read: what the files say of the model, without the numbers of tensors.
    content = read_json(folder / CONFIG)
    family = family_of(content, source)
    with TensorFiles(folder, content, family.embeddings) as files:
        content = family.as_stored(content, files)
        tied_head = has_tied_head(family, content, source, len(files.names))
        config = _config_of_files(family, content, files, source, head)
        has_texts = isinstance(config, (TransformerConfig, EncoderDecoderConfig))
        texts = _read_generation_config(folder, content) if has_texts else None

        # Build: parameters are initializers, which a tensor replaces or ``shard`` computes.
        own_dtype = files.common_dtype() if param_dtype is None else param_dtype
        settings = {
            "dtype": own_dtype if dtype is None else dtype,
            "param_dtype": own_dtype,
            "scan_layers": scan_layers,
            "remat": remat,
        }
        model = build_model(config, settings, Rngs(0) if rngs is None else rngs)
        if attention is not None:
            _set_attention(model, attention)

        # Match: each parameter with its tensors, by name, shape and dtype. Kernels that stay
        # quantized have other parameters, numbers and scales, so that the table is made anew.
        files.set_dtype(jnp.dtype(own_dtype))
        table = _Table.of_built(model, family, files.names)
        tied = TiedNames(
            family, config, files, own=table.by_name, prefix=table.prefix, tied_head=tied_head
        )
        if files.quantized and not dequantize:
            quantize_as_stored(table.entries, files, dict(iter_modules(model)))
            table = _Table.of_built(model, family, files.names)
        if not head:
            table.pass_over_heads(family)
        unread = table.match(files, str(folder), strict, tied)
        if unread:
            warn_user(unread)
        found = [e for e in table.entries if all(name in files.names for name in e.names())]
        stored_dtypes = {entry.path: _stored_dtype(entry, files) for entry in found}

        # Place: a sharding for each parameter, by rules that fit the mesh. This is the last check.
        if rules is None and not current_rules().names:
            rules = DECODER_RULES if where is None else _dividing_rules(model, where)
        places: Mapping[Any, Any] = {}
        if where is not None:
            _check_rules(model, where, rules)
            places = shardings(model, where, rules).flat()

        # Fill: one parameter after the other; what is quantized stays in the dtypes of the files.
        converted = None if param_dtype is None else jnp.dtype(param_dtype)
        for entry in found:
            to = None if isinstance(entry.variable, Quantized) else converted
            dtypes = stored_dtypes[entry.path], to
            entry.variable.value = _read(entry, files, places.get(entry.path), *dtypes)

    # What no tensor was for is computed in its place now, such as the state of dropout; parameters
    # that were read have their shardings, and stay.
    if where is not None:
        shard(model, where, rules)
    if has_texts:
        model.generation_config = texts
    model.eval()
    return model


def _config_of_files(
    family: Family, content: Mapping[str, Any], files: TensorFiles, source: str, head: bool
) -> Any:
    """Returns the config of the model that is read, with its head or without."""
    if head:
        return family.config(content, source, len(files.names))

    content = {**content, "architectures": [family.bare]}
    config = family.config(content, source, len(files.names))
    if isinstance(config, TransformerConfig) and config.pool.dense:
        pool = replace(config.pool, dense=family.has_pooler(files.names))
        return replace(config, pool=pool)
    return config


def _check_rules(model: object, mesh: AnyMesh, rules: RulesLike | None) -> None:
    """Raises for rules that do not fit a mesh."""
    diagnostics = check(model, mesh, rules)
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    if errors:
        raise PartitionCheckError(errors)


def _read_generation_config(folder: Path, content: Mapping[str, Any]) -> GenerationConfig | None:
    """Returns what the files of a model say of its texts."""
    file = folder / GENERATION_CONFIG
    try:
        if not file.is_file():
            return read_generation_config(content)
        fields = read_json(file)
        return read_generation_config(fields, json.dumps(fields))
    except GenerationError as error:
        raise PretrainedError(f"{folder}: {error}") from error


def _set_attention(model: Any, kernel: AttentionKernel) -> None:
    Options(PretrainedError).choice("attention", kernel, ScopeSettings.choices("attention"))
    for _, module in iter_modules(model):
        if isinstance(module, MultiHeadAttention):
            module.implementation = kernel


@refuses_other_words("save_pretrained")
def save_pretrained(
    model: object, directory: str | Path, config: Any = None, *, max_file_bytes: int = LARGEST_FILE
) -> None:
    """Writes a model as it is published: ``config.json`` and safetensors.

    ``config.json`` is that which was read, with what differs in the config. A model that was not
    loaded is written as a llama, or as the first family that can say what its config says. The
    model is compared with the one that the config builds, and refused where they differ, by path,
    before a file is written: whose architecture was edited, by a head that is tied no more, fewer
    layers, a larger vocabulary, another window, epsilon or activation, is saved with the config
    that builds it. Frozen parameters are written like others, and tensors that did not change bit
    for bit. Files appear when all are complete: a disk that is full leaves what was there.

    Quantized kernels are written in a layout that ``transformers`` reads, with its
    ``quantization_config``: as compressed-tensors, or in fp8 by blocks where they were read so.
    What has none, such as a quantized embedding, is refused; ``sx.dequantize`` makes numbers.
    Kernels that were read from MXFP4 are written as the numbers that they are, with a warning.

    ``generation_config.json`` is written where ``model.generation_config`` says more than
    ``config.json``. The compute dtype and dropout are no part of what is written. In a run of
    several processes all must call it, and the first writes.

    Args:
        model: A ``Transformer``, ``DualEncoder``, ``EncoderDecoder`` or ``ConvNeXt``, such as
            ``from_pretrained`` returns, or a ``Decoder``.
        directory: The folder; made if it is not there, and without tensors if it is.
        config: Of a model whose architecture was edited the config that builds it, such as
            ``dataclasses.replace(model.config, num_layers=2)``; None for ``model.config``.
        max_file_bytes: Size above which tensors go to another file.

    Raises:
        PretrainedError: If the model is of no family or is another than its config builds, or no
            ``config.json`` of its family says what it is; a quantized kernel has no layout; or the
            folder has tensors already, or cannot be written.
        GenerationError: If ``model.generation_config`` is no ``GenerationConfig``.
        ImportError: If ``safetensors`` is missing.

    Example:
        >>> import pathlib, tempfile, shardax as sx
        >>> folder = pathlib.Path(tempfile.mkdtemp(), "model")
        >>> sx.models.save_pretrained(sx.models.Decoder(
        ...     sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0)), folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'model.safetensors']
    """
    folder = Path(directory).expanduser()

    # What config.json says, and the parameters by the tensors that they are written as.
    content, family, config = describe(model, config)
    if is_packed(content):
        content = {name: value for name, value in content.items() if name != PACKING}
        warn_user(
            "The model was read from MXFP4, which is not written: its experts are written as they "
            f"are, several times as large, and config.json has no {PACKING}."
        )
    texts = generation_content(config_of_texts(model), content)
    table = _Table.of_edited(model, family, config)

    # What config.json says of their dtypes and of quantized kernels.
    layout = table.layout(content.pop(PACKING, None))
    if layout.config is not None:
        content[PACKING] = layout.config
    floats = [e.variable for e in table.entries if not isinstance(e.variable, Quantized)]
    stored = Counter(jnp.dtype(variable.dtype).name for variable in floats)
    content |= {name: max(stored, key=stored.__getitem__) for name in _DTYPE_FIELDS & {*content}}

    if folder.is_dir() and any(folder.glob("*.safetensors")):
        raise PretrainedError(f"{folder} holds tensors already. Give another folder, or clear it.")
    distributed.barrier("save_pretrained")  # that all have looked before the first writes

    # All files are written beside the folder, and moved when they are complete.
    try:
        with draft_folder(folder) if distributed.is_main() else contextlib.nullcontext() as draft:
            _write_files(table, layout, draft, max_file_bytes)
            if draft is not None:
                _write_json(draft / CONFIG, content)
                if texts is not None:
                    _write_json(draft / GENERATION_CONFIG, texts)
                move_files(draft, folder, last=CONFIG)
    except OSError as error:
        raise PretrainedError(
            f"The model was not written to {folder}: {error}. What was there is as it was; call "
            f"save_pretrained again when it can be written, or with another folder."
        ) from error


def find_directory(directory: str | Path, wanted: Sequence[str] = MODEL_FILES) -> Path:
    """Returns the folder of a model; one of the hub is downloaded."""
    folder = Path(directory).expanduser()
    if folder.is_dir():
        return folder
    name = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", str(directory))
    if name is None or folder.is_absolute():
        raise PretrainedError(
            f"{directory} is neither a folder nor a name of the hub, org/name or org/name@revision."
        )
    with needs_package(f"{directory} is no folder here, and the hub", "shardax[hub]"):
        from huggingface_hub import errors, snapshot_download
    try:
        return Path(snapshot_download(name[1], revision=name[2], allow_patterns=list(wanted)))
    except errors.RepositoryNotFoundError as error:  # of those that ask for a login too
        why = f"there is none of this name for you: {_first_line(error)}"
        raise PretrainedError(f"{directory} is no folder here, and on the hub {why}") from error
    except errors.RevisionNotFoundError as error:
        raise PretrainedError(f"{name[1]} has no revision {name[2]} on the hub.") from error
    except errors.LocalEntryNotFoundError as error:
        raise PretrainedError(
            f"{directory} is no folder here, the hub cannot be reached, and nothing was downloaded "
            f"before: {_first_line(error)}"
        ) from error
    except (errors.HFValidationError, errors.HfHubHTTPError) as error:
        raise PretrainedError(f"{directory}: the hub says: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _dividing_rules(model: object, mesh: AnyMesh) -> Rules:
    """Returns ``DECODER_RULES`` for indivisible sizes, with a warning."""
    whole: dict[str, tuple[int, int, str]] = {}
    for _, variable in iter_variables(model, Param, Quantized):
        for name, size in zip(variable.axes or (), variable.shape, strict=False):
            if not isinstance(name, str) or name not in DECODER_RULES.names:
                continue
            axes = mesh_axes_of(DECODER_RULES.spec((name,))[0])
            count = math.prod(mesh.shape.get(axis, 1) for axis in axes)
            if size % count:
                whole[name] = (size, count, ", ".join(map(str, axes)))
    if not whole:
        return DECODER_RULES
    listed = "; ".join(
        f"{name} of size {size} over the {count} devices of {axes!r}"
        for name, (size, count, axes) in whole.items()
    )
    warn_user(
        f"The mesh does not divide sizes that the default rules split: {listed}. Each device holds "
        f"them whole. To say so without this warning, give the rules: "
        f"rules=sx.models.DECODER_RULES.override({dict.fromkeys(whole)!r})."
    )
    return DECODER_RULES.override(dict.fromkeys(whole))


def _is_tied(config: Any) -> bool:
    is_single = isinstance(config, TransformerConfig)
    return config.output.tied if is_single else config.tied_head


# --- the table ------------------------------------------------------------------------------------


class _Table:
    """Places of the parameters of a model in the files."""

    def __init__(self, config: Any, family: Family, names) -> None:
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
    def of_built(cls, model: Any, family: Family, names: object) -> _Table:
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
    def of_edited(cls, model: object, family: Family, config: Any) -> _Table:
        """Returns the table of an edited model, or raises for lost parts."""
        table = cls(config, family, None)
        for part in parameter_places(model, config):
            tower, path = _of_tower(part.path)
            place = (path[0], *path[2:]) if path[0] == "layers" else path
            stacked = part.position is not None
            name = ".".join(map(str, (*tower, *place)))
            table.add(part.path, part.variable, name, part.layers, stacked)
        table.check_complete()
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
        self,
        path: VariablePath,
        variable: object,
        place: str,
        layers: tuple[int, ...],
        stacked: bool,
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
        wrong = []
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

    def tensor(self, name: str, whole) -> np.ndarray:
        """Puts a tensor together from parameters."""
        places = self.by_name[name]
        result: np.ndarray | None = None
        for entry, layer, expert in places:
            value = whole(entry.variable)
            value = value[entry.layers.index(layer)] if entry.stacked else value
            value = value[expert] if entry.tensor.is_of_expert else value
            if result is None:
                result = np.empty(self.shape(name), value.dtype)
            _fill(result, value, entry, [self.offset(entry, layer, i) for i in range(result.ndim)])
        assert result is not None
        return result


def _is_linear(tensor: Tensor) -> bool:
    return len(tensor.axes) == 2 and not tensor.to.endswith("embedding")


def _layer_of(entry: Entry) -> tuple[Any, ...]:
    """Returns the layer of a parameter, of several the first."""
    _, path = _of_tower(entry.path)
    unrolled = entry.layers and path[0] == "layers" and isinstance(path[1], int)
    return (path[1],) if unrolled else entry.layers[:1]


def _of_tower(path: VariablePath) -> tuple[VariablePath, VariablePath]:
    """Splits a path into the part of a tower and the rest."""
    at = 1 if path[0] in (*TOWERS, *HALVES) else 0
    return path[:at], path[at:]


def _place(path: VariablePath, model, config: Any) -> tuple[str, tuple[int, ...], bool]:
    """Returns a path's name in a table, its layers, and if stacked."""
    if path[0] in (*TOWERS, *HALVES):
        name = str(path[0])
        tower = getattr(model, name), getattr(config, name)
        place, layers, stacked = _place(path[1:], *tower)
        return f"{name}.{place}", layers, stacked
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
    layers = tuple(range(int(str(path[3])), count - count % config.period, config.period))
    return ".".join(("layers", *map(str, path[4:]))), layers, True


# --- reading --------------------------------------------------------------------------------------


def _stored_dtype(entry: Entry, files: TensorFiles) -> np.dtype:
    """Returns the dtype that holds all tensors of a parameter, such as layers of a stack."""
    dtypes = {np.dtype(READ_DTYPES[files.dtype(name)]) for name in entry.names()}
    return functools.reduce(jnp.promote_types, dtypes)


def _read(
    entry: Entry,
    files: TensorFiles,
    sharding: jax.sharding.Sharding | None,
    stored_dtype: np.dtype,
    param_dtype: np.dtype | None,
) -> jax.Array:
    """Returns a parameter in its sharding, None for one device; each device reads its own part.

    Args:
        entry: The parameter, and where it stands in the files.
        files: The tensors.
        sharding: Where it is to be.
        stored_dtype: The dtype of its tensors in the files.
        param_dtype: What its numbers are converted to; None for as they are stored.
    """
    shape = tuple(entry.variable.shape)

    def read_slice(bounds: Sequence[tuple[int, int]]) -> np.ndarray:
        numbers = _read_block(entry, files, bounds, stored_dtype)
        return numbers if param_dtype is None else numbers.astype(param_dtype)

    if sharding is None:
        return jax.block_until_ready(jax.device_put(read_slice([(0, size) for size in shape])))

    # Devices that hold the same slice, as replicas do, share one reading of it.
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        spans = zip(index, shape, strict=True)
        bounds = tuple(part.indices(size)[:2] for part, size in spans)
        devices_of.setdefault(bounds, []).append(device)

    # The slice before is on its devices, and no more on the host, when the next one is read.
    arrays: list[jax.Array] = []
    for bounds, devices in devices_of.items():
        numbers = read_slice(bounds)
        arrays += [jax.device_put(numbers, device) for device in devices]
        del numbers
        jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_block(
    entry: Entry, files: TensorFiles, bounds: Sequence[tuple[int, int]], dtype: np.dtype
) -> np.ndarray:
    if entry.stacked:
        layers, bounds = entry.layers[slice(*bounds[0])], bounds[1:]
        blocks = (_read_layer(entry, files, bounds, layer, dtype) for layer in layers)
        return _stacked(blocks, len(layers), bounds, dtype)
    return _read_layer(entry, files, bounds, (entry.layers or (0,))[0], dtype)


def _stacked(
    blocks: Iterator[np.ndarray], count: int, bounds: Sequence[tuple[int, int]], dtype: np.dtype
) -> np.ndarray:
    """Stacks blocks as they are read, in their order in memory."""
    first = next(blocks, None)
    if first is None:
        return np.empty((0, *(b - a for a, b in bounds)), dtype)

    # Blocks are views of tensors with other axes: copied as they lie, they are copied fast.
    strides = first.strides
    stored = sorted(range(first.ndim), key=lambda axis: -strides[axis])
    stack = np.empty((count, *(first.shape[axis] for axis in stored)), dtype)
    stack[0] = first.transpose(stored)
    del first
    for index, block in enumerate(blocks, start=1):
        stack[index] = block.transpose(stored)
    return stack.transpose(0, *(1 + stored.index(axis) for axis in range(len(stored))))


def _read_layer(
    entry: Entry, files: TensorFiles, bounds: Sequence[tuple[int, int]], layer: int, dtype: np.dtype
) -> np.ndarray:
    if not entry.tensor.is_of_expert:
        return _read_tensor(entry, files, entry.name(layer), bounds)
    experts = range(*bounds[0])
    names = (entry.name(layer, expert) for expert in experts)
    blocks = (_read_tensor(entry, files, name, bounds) for name in names)
    return _stacked(blocks, len(experts), bounds[1:], dtype)


def _read_tensor(
    entry: Entry, files: TensorFiles, name: str, bounds: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Reads part of a tensor, with its axes in order."""
    offsets = [files.offsets[entry.path, axis] for axis in range(len(entry.tensor.tensor_axes))]
    runs, sizes, order = _cut(entry, bounds, offsets)
    spans = [span for span in map(_span, runs) if span is not None]
    if len(spans) == len(runs):
        array = files.read(name, spans)
    else:
        ends = [list(itertools.accumulate(b - a for a, b in axis_runs)) for axis_runs in runs]
        array = np.empty([end[-1] if end else 0 for end in ends], READ_DTYPES[files.dtype(name)])
        for places in itertools.product(*(range(len(axis_runs)) for axis_runs in runs)):
            part = [runs[i][k] for i, k in enumerate(places)]
            to = tuple(
                slice(ends[i][k] - (runs[i][k][1] - runs[i][k][0]), ends[i][k])
                for i, k in enumerate(places)
            )
            array[to] = files.read(name, [slice(*span) for span in part])
    return array.reshape(sizes).transpose(order)  # a view, which JAX copies much faster than NumPy


def _span(runs: Sequence[tuple[int, int]]) -> slice | None:
    """Returns the slice that parts of an axis make up, if any."""
    if len(runs) == 1:
        return slice(*runs[0])
    starts = [start for start, _ in runs]
    steps = {b - a for a, b in itertools.pairwise(starts)}
    is_even = len(steps) == 1 and all(end - start == 1 for start, end in runs)
    return slice(starts[0], runs[-1][1], steps.pop()) if is_even else None


def _cut(
    entry: Entry, bounds: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]
) -> tuple[list[list[tuple[int, int]]], list[int], list[int]]:
    """Returns the parts to read of each axis, sizes, and their order."""
    tensor, sizes = entry.tensor, entry.sizes
    ranges = {
        name: (sizes[name], *bound)
        for name, bound in zip(tensor.parameter_axes, bounds, strict=True)
    }
    runs, shape, names = [], [], []
    for axis, (offset, size) in zip(tensor.tensor_axes, offsets, strict=True):
        factors = axis.factors(ranges)
        inner = [(a + offset, b + offset) for a, b in _runs(factors[axis.outer :])]
        runs.append(_runs(factors[: axis.outer], inner, size))
        for part, (_, first, end) in zip(axis.parts, factors, strict=True):
            if isinstance(part, str):
                shape.append(end - first)
                names.append(part)
    axis_names = [name for name in tensor.parameter_axes if name in names]
    return runs, shape, [names.index(name) for name in axis_names]


def _runs(
    factors: Sequence[tuple[int, int, int]],
    inner: Sequence[tuple[int, int]] = ((0, 1),),
    size: int = 1,
) -> list[tuple[int, int]]:
    """Returns the contiguous parts of an axis made of several."""
    runs = list(inner)  # within the innermost of the factors, of this size
    for count, first, end in reversed(factors):
        if runs == [(0, size)]:
            runs = [(first * size, end * size)]
        else:
            runs = [(k * size + a, k * size + b) for k in range(first, end) for a, b in runs]
        size *= count
    return runs


# --- writing --------------------------------------------------------------------------------------


def _fill(
    result: np.ndarray, value: np.ndarray, entry: Entry, offsets: Sequence[tuple[int, int]]
) -> None:
    """Writes a parameter to its place in a tensor."""
    own_axes = (
        entry.tensor.parameter_axes[1:]
        if entry.tensor.is_of_expert
        else entry.tensor.parameter_axes
    )
    whole, index, shape, names = [], [], [], []
    for number, (axis, (offset, total), size) in enumerate(
        zip(entry.tensor.tensor_axes, offsets, entry.axis_sizes(), strict=True)
    ):
        outer = entry.outer_sizes(number)
        whole += [*outer, total]
        index += [slice(None)] * len(outer)
        index.append(slice(offset, offset + size // math.prod(outer)))
        for part in axis.parts:
            shape.append(entry.sizes[part] if isinstance(part, str) else part.count)
            names.append(part)
    place = tuple(slice(None) if isinstance(part, str) else part.index for part in names)
    axis_names = [part for part in names if isinstance(part, str)]
    result = result.reshape(whole)  # a view, as it is contiguous
    block = np.asarray(result[tuple(index)])  # of no axes it is a number
    view = block.reshape(shape)  # a copy where a concatenated axis is cut
    view[place] = value.transpose([own_axes.index(name) for name in axis_names])
    if not np.shares_memory(view, result):
        result[tuple(index)] = view.reshape(block.shape)


def _whole(variable) -> np.ndarray:
    value = variable.value
    if not getattr(value, "is_fully_addressable", True):
        value = distributed.gather(value)
    return np.asarray(value)


def _bytes_of(place: tuple[Entry, int, int]) -> int:
    entry = place[0]
    return byte_count(entry.axis_sizes(), jnp.dtype(entry.variable.dtype))


def _write_files(
    table: _Table, layout: WrittenLayout, draft: Path | None, max_file_bytes: int
) -> None:
    """Gathers tensors file by file, and writes them into the draft."""
    sizes = {name: sum(map(_bytes_of, places)) for name, places in table.by_name.items()}
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    titles = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    titles = [SINGLE] if len(files) == 1 else titles
    whole = functools.lru_cache(maxsize=8)(_whole)  # fused tensors ask for one another's parts
    failure: OSError | None = None
    by_name, total = dict[str, str](), 0
    for title, names in zip(titles, files, strict=True):
        tensors = (layout.stored(name, table.tensor(name, whole)) for name in names)
        arrays = {name: array for parts in tensors for name, array in parts.items()}
        by_name |= dict.fromkeys(arrays, title)
        total += sum(array.nbytes for array in arrays.values())
        if draft is not None and failure is None:
            try:
                write_tensors(draft / title, arrays, {"format": "pt"})
            except OSError as error:
                failure = error
                if jax.process_count() == 1:
                    break  # else the others wait for this one's parts
    if failure is not None:
        raise failure
    if draft is not None and len(files) > 1:
        _write_json(draft / INDEX, {"metadata": {"total_size": total}, "weight_map": by_name})


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
