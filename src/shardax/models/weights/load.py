# SPDX-License-Identifier: Apache-2.0
"""Published weights, straight into shards.

The descriptions in ``shardax.models.families`` say where each parameter stands in the files.
``from_pretrained`` has five steps:

    read     ``config.json``, and of tensors their names, shapes and dtypes
    build    the model of the config: its parameters are initializers, which nothing computes
    match    each parameter with its tensors, and names what is missing, left over or unfit
    place    a sharding for each parameter, by rules that are checked for the mesh
    fill     each parameter with the slices that the devices of this process hold

The first four raise before an array of a parameter is made. They read numbers only of the shapes of
packed weights, and where files hold one tensor under several names, to compare them, 4,096 rows at
a time. The fill has no checks of its own: in it a file may fail to be read, or memory be short.
After it ``shard`` computes what no tensor was for. It checks the same rules once more, and what the
build has settled: that values are there and may be written.

The fill goes slice by slice, and waits for a slice to be on its devices before it reads the next.
Without a mesh a slice is a whole parameter. At the most the host holds

- the slice in the dtype of the file, and once more in ``param_dtype`` if that is another one;
- of stacked layers, or of experts with a tensor each, before the slice is converted, the slice and
  two of its layers or experts, in the dtype that holds those of all its tensors; where both are
  stacked, two layers and two experts;
- of a kernel that stays quantized the slice as it is stored, of int4 with its numbers in up to four
  bytes each;
- of a quantized kernel that is read as numbers, with ``dequantize`` or because its layout has no
  ``nn.QuantizedKernel``, the slice, its scales and its zero points as numbers of float32.

``dtype`` is that of calls: no parameter is made in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardax import (
    Param,
    Quantized,
    Rngs,
    Rules,
    check,
    iter_modules,
    iter_variables,
    shard,
    shardings,
)
from shardax.errors import PartitionCheckError
from shardax.extend import AnyMesh, Options, RulesLike, ScopeSettings, mesh_axes_of, warn_user
from shardax.models.config.transformer import TransformerConfig
from shardax.models.decoder import DECODER_RULES
from shardax.models.encoder_decoder import EncoderDecoderConfig, build_model
from shardax.models.entries import quantize_as_stored
from shardax.models.families.registry import family_of
from shardax.models.family import Family
from shardax.models.files import TensorFiles, read_json
from shardax.models.generating.config import (
    GENERATION_CONFIG,
    GenerationConfig,
    read_generation_config,
)
from shardax.models.generating.errors import GenerationError
from shardax.models.kinds import PretrainedError
from shardax.models.tied import TiedNames, has_tied_head
from shardax.models.weights.hub import CONFIG, find_directory
from shardax.models.weights.slices import dtype_in_files, read_parameter
from shardax.models.weights.table import TensorTable
from shardax.models.words import refuses_other_words
from shardax.nn.attention.dot_product import AttentionKernel
from shardax.nn.attention.multi_head import MultiHeadAttention
from shardax.partition import current_rules, resolve_mesh


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
        table = TensorTable.of_built(model, family, files.names)
        tied = TiedNames(
            family, config, files, own=table.by_name, prefix=table.prefix, tied_head=tied_head
        )
        if files.quantized and not dequantize:
            quantize_as_stored(table.entries, files, dict(iter_modules(model)))
            table = TensorTable.of_built(model, family, files.names)
        if not head:
            table.pass_over_heads(family)
        unread = table.match(files, str(folder), strict, tied)
        if unread:
            warn_user(unread)
        found = [e for e in table.entries if all(name in files.names for name in e.names())]
        stored_dtypes = {entry.path: dtype_in_files(entry, files) for entry in found}

        # Place: a sharding for each parameter, by rules that fit the mesh; the last refusal.
        if rules is None and not current_rules().names:
            rules = DECODER_RULES if where is None else _dividing_rules(model, where)
        places: Mapping[Any, Any] = {}
        if where is not None:
            _check_rules(model, where, rules)
            places = shardings(model, where, rules).flat()

        # Fill: one parameter after the other; what is quantized stays in the dtypes of the files.
        for entry in found:
            stays = param_dtype is None or isinstance(entry.variable, Quantized)
            entry.variable.value = read_parameter(
                entry,
                files,
                places.get(entry.path),
                stored_dtype=stored_dtypes[entry.path],
                param_dtype=None if stays else jnp.dtype(param_dtype),
            )

    # What no tensor was for is computed in its place now, such as the state of dropout; parameters
    # that were read have their shardings, and stay. The rules are those that were checked above.
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
    """Sets the kernel of all attention layers."""
    Options(PretrainedError).choice("attention", kernel, ScopeSettings.choices("attention"))
    for _, module in iter_modules(model):
        if isinstance(module, MultiHeadAttention):
            module.implementation = kernel


def _dividing_rules(model: object, mesh: AnyMesh) -> Rules:
    """Returns ``DECODER_RULES``, by which sizes that a mesh does not divide stay whole."""
    # Names of axes with the size, the number of devices and the mesh axes that do not divide it.
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
