# SPDX-License-Identifier: Apache-2.0
"""The ``config.json`` of a model that is saved, and the check that it describes the model.

The config is the only truth of an architecture. ``describe`` writes a config as a ``config.json``,
reads that again, and refuses a config that reads back as another. ``parameter_places`` then builds
the model of what was read, without computing a parameter, and compares the model to be saved with
it, attribute by attribute and shape by shape: each difference would be lost, and is refused by its
path. Nothing is inferred from the layers. Who edited them gives the config that builds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from shardax import (
    Cache,
    Intermediate,
    MetricState,
    OptState,
    Perturbation,
    Rngs,
    RngState,
    iter_variables,
)
from shardax.extend import format_path
from shardax.models.comparison import (
    SAVE_ANY,
    SCALE_TOLERANCE,
    ArchitectureCheck,
    ParameterPlace,
    refusal,
    refuse_any,
)
from shardax.models.config.paths import is_unsaid, read_field, read_fields, replace_fields
from shardax.models.config.transformer import TransformerConfig
from shardax.models.convnext import ConvNeXt, ConvNeXtConfig
from shardax.models.dual_encoder import DualEncoder, DualEncoderConfig
from shardax.models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderConfig,
    ModelConfig,
    build_model,
    names_of_parts,
)
from shardax.models.families import registry
from shardax.models.family import DualFamily, EncoderDecoderFamily, Family
from shardax.models.kinds import PretrainedError, brief
from shardax.models.transformer import Transformer

# The class of the config of each class of models.
_CONFIGS: Mapping[type, type] = {
    Transformer: TransformerConfig,
    DualEncoder: DualEncoderConfig,
    EncoderDecoder: EncoderDecoderConfig,
    ConvNeXt: ConvNeXtConfig,
}
# Settings of training and of computing, which no config.json fixes.
_TRAINING = ("dropout", "attention.dropout", "embedding.dropout", "experts.load_balance_weight")
_SETTINGS = frozenset(
    [*_TRAINING, "dtype", "experts.dispatch", "param_dtype", "remat", "scan_layers", "source"]
)
# Fields and groups of fields that calls of a Transformer read in its config. They read
# ``activation`` too, if there is a transform before the head.
_READ_BY_CALLS = frozenset(
    {
        "attention.chunked",
        "attention.cross_attention",
        "attention.head_dim",
        "attention.latent",
        "attention.local_rope",
        "attention.query_growth",
        "attention.rope",
        "causal",
        "embedding",
        "features",
        "head",
        "image",
        "output.activation",
        "output.bias",
        "output.scale",
        "output.softcap",
        "output.transform",
        "pool",
        "positions",
    }
)
# Variables that are no parameters.
_RECORDS = (Cache, Intermediate, MetricState, OptState, Perturbation, RngState)


def describe(
    model: object, config: ModelConfig | None = None
) -> tuple[dict[str, Any], Family, ModelConfig]:
    """Returns the ``config.json`` of a model, its family, and the config that it is read back as.

    Args:
        model: The model.
        config: What builds it; None for ``model.config``.
    """
    if config is None:
        _check_parts(model)
        config = _config_of(model, None)
    else:
        config = _config_of(model, config)
        _check_read_by_calls(model, config)
    if config.source is None:
        return _describe_new(config)

    content = _content_of(config)
    family = registry.family_of(content, "config.json")
    content = _edited(family, content, content, config)
    return content, family, _read_back(family, content, config)


def parameter_places(model: object, config: ModelConfig) -> list[ParameterPlace]:
    """Returns the parameters of a model by their places in the model that a config builds.

    Raises:
        PretrainedError: If the two models differ in what changes results, by path.
    """
    has_local_rope = isinstance(config, TransformerConfig) and (
        config.attention.local_rope is not None
    )
    comparison = ArchitectureCheck(has_local_rope)

    # Parameters of the built model are initializers that nothing reads: only shapes are compared.
    built = build_model(_plain(config), {}, Rngs(0))
    comparison.compare_models(model, built)

    # Whatever stands elsewhere in the model would be left out of its files.
    placed_ids = {id(place.variable) for place in comparison.places}
    for path, variable in iter_variables(model):
        kind = getattr(variable, "variable_type", type(variable))
        is_named = any(path[: len(above)] == above for above in comparison.wrong)
        if id(variable) not in placed_ids and not is_named and not issubclass(kind, _RECORDS):
            comparison.wrong[path] = "has no tensor in its family"

    problems = [f"{format_path(path)} {reason}" for path, reason in comparison.wrong.items()]
    refuse_any(problems, comparison.advice)
    return comparison.places


# --- the config of a model ------------------------------------------------------------------------


def _config_of(model: object, config: ModelConfig | None) -> ModelConfig:
    """Returns the config of a model, or one given in its place, or raises."""
    expected = next((c for kind, c in _CONFIGS.items() if isinstance(model, kind)), None)
    chosen: Any = getattr(model, "config", None) if config is None else config
    chosen = getattr(chosen, "transformer", chosen)  # of a DecoderConfig
    if expected is not None and isinstance(chosen, expected):
        return chosen

    if expected is not None and config is not None:
        raise PretrainedError(
            f"config={brief(config)} is no {expected.__name__}, which a {type(model).__name__} is "
            f"built of."
        )
    raise PretrainedError(
        f"{type(model).__name__} is of no family: sx.models.Transformer, Decoder, "
        f"DualEncoder, EncoderDecoder and ConvNeXt are saved. {SAVE_ANY}"
    )


def _check_parts(model: object) -> None:
    """Raises for parts whose own configs, which their calls read, are not those of the model."""
    for name in names_of_parts(model):
        part, expected = getattr(model, name), getattr(getattr(model, "config", None), name, None)
        if not isinstance(part, Transformer) or not isinstance(expected, TransformerConfig):
            continue
        if differing := _differences(_config_of(part, None), expected):
            problem = f".{name}.config has {_said(differing)} in model.config.{name}"
            new = f"dataclasses.replace(model.config, {name}=model.{name}.config)"
            raise refusal([problem], f" Set both: model.config = {new}.")


def _check_read_by_calls(model: Any, config: ModelConfig) -> None:
    """Raises where calls of a model read another value in its own config than in the one given.

    Layers hold what they compute by, and are compared with those that the config builds. Calls read
    the fields of ``_READ_BY_CALLS`` in ``model.config``, so that layers say nothing of them.
    """
    parts = [
        (f".{name}", getattr(model, name, None), getattr(config, name))
        for name in names_of_parts(model)
    ]

    # Generation begins texts with it.
    start = getattr(getattr(model, "config", None), "start_token", None)
    if isinstance(config, EncoderDecoderConfig) and config.start_token != start:
        problem = f"model.config has start_token={start!r}, but config= has {config.start_token!r}"
        raise refusal([problem], " Set it where calls read it: model.config = config.")

    for place, part, given in parts or [("", model, config)]:
        own = getattr(part, "config", None)
        own = getattr(own, "transformer", own)  # of a DecoderConfig
        if not isinstance(own, TransformerConfig) or not isinstance(given, TransformerConfig):
            continue  # of a ConvNeXt calls read sizes alone; another class is refused later

        read = _READ_BY_CALLS | ({"activation"} if given.output.transform else frozenset())
        differing = {
            path: values
            for path, values in _differences(own, given).items()
            if any(path == field or path.startswith(f"{field}.") for field in read)
        }
        if differing:
            problem = f"{place}.config, which calls read, has {_said(differing)} in config="
            raise refusal([problem], " Set it where calls read it: model.config = config.")


def _content_of(config: ModelConfig) -> dict[str, Any]:
    """Returns the ``config.json`` that a model was read with, or raises."""
    try:
        content = json.loads(config.source or "")
    except (TypeError, ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        return content
    raise refusal(
        [f"model.config.source is {brief(config.source)}, and not the text of a config.json"],
        " It is what from_pretrained read; without it the model is written as a new one: "
        "model.config = dataclasses.replace(model.config, source=None).",
    )


def _plain(config: ModelConfig) -> ModelConfig:
    """Returns a config of layers in a list, without settings of training."""
    if isinstance(config, ConvNeXtConfig):
        return config
    if parts := names_of_parts(config):
        return replace(config, **{name: _plain(getattr(config, name)) for name in parts})

    plain = {"scan_layers": False, "remat": None, "experts.dispatch": "dropless"}
    rates = dict.fromkeys(("dropout", "attention.dropout", "embedding.dropout"), 0.0)
    return replace_fields(config, plain | rates)


# --- differences of configs -----------------------------------------------------------------------


def _differences(config: Any, read: Any) -> dict[str, tuple[Any, Any]]:
    """Returns differing fields of two architectures, with both values."""
    ours, theirs = _relevant(config), _relevant(read)
    return {
        name: (ours.get(name), theirs.get(name))
        for name in {**ours, **theirs}
        if not _is_equal(name, ours.get(name), theirs.get(name))
    }


def _is_equal(path: str, ours: object, theirs: object) -> bool:
    if path.endswith("attention.scale") and isinstance(ours, float) and isinstance(theirs, float):
        # Files hold its inverse square, or a factor of it, which may be one bit beside.
        return math.isclose(ours, theirs, rel_tol=SCALE_TOLERANCE)
    return ours == theirs


def _relevant(config: Any) -> dict[str, Any]:
    """Returns the fields of a config with meaning for its results."""
    if isinstance(config, TransformerConfig):
        return _relevant_of_layers(config)

    values, parts = dict[str, Any](), names_of_parts(config)
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        if name in parts:
            values |= {f"{name}.{path}": x for path, x in _relevant(value).items()}
        elif name not in _SETTINGS:
            values[name] = value
    if isinstance(config, ConvNeXtConfig) and config.head is None:
        del values["num_classes"]
    return values


def _relevant_of_layers(config: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of a config with meaning for logits, by path."""
    values = {path: x for path, x in read_fields(config).items() if path not in _SETTINGS}
    attention, layers = config.attention, range(config.num_layers)
    local = tuple(map(attention.is_local, layers))
    mixed = tuple(config.kind_of(index)[1] for index in layers)
    rotated = tuple(map(attention.has_rope, layers))
    recurrent = tuple(map(config.is_recurrent, layers))

    # Which layers have a part, instead of how a config says so.
    for path in ("attention.window", "attention.local_layers", "attention.rope_layers"):
        values.pop(path)
    for path in ("recurrence.layers", "experts.dense_layers"):
        values.pop(path)
    values["rotated_layers"] = rotated
    values["windows"] = tuple(attention.window if is_local else None for is_local in local)
    values["experts"] = mixed
    values["recurrent_layers"] = recurrent

    # What no layer has.
    values["attention.chunked"] = attention.chunked and any(local)
    if not any(recurrent):
        values["recurrence.mixer"] = None
    if not any(rotated):
        values["attention.rope"] = None
    if attention.local_rope == attention.rope or not any(local):
        values.pop("attention.local_rope")
    for path in _unread(config, any(mixed), all(mixed), all(rotated)):
        values.pop(path, None)

    # What is said as the default too.
    if config.output.activation == config.activation:
        values["output.activation"] = None
    if attention.scale == attention.head_dim**-0.5 and "attention.scale" in values:
        values["attention.scale"] = None
    return values


def _unread(
    config: TransformerConfig, has_experts: bool, only_experts: bool, only_rotated: bool
) -> Iterator[str]:
    """Yields the fields that nothing of a Transformer reads."""
    has_attention = any(map(config.has_attention, range(config.num_layers)))
    experts, head = config.experts, config.head
    shared = experts is not None and experts.shared_dim
    unread = {
        "rotated_layers windows attention.num_heads attention.num_kv_heads attention.head_dim "
        "attention.qk_norm attention.qkv_bias attention.out_bias attention.rope attention.chunked "
        "attention.scale attention.softcap attention.sinks attention.gate": not has_attention,
        "attention.key_bias": not config.attention.qkv_bias,
        "attention.query_growth": only_rotated,
        "experts.num_experts experts.dim experts.top_k experts.normalise experts.shared_dim "
        "experts.scores experts.bias experts.limit experts.gate_factor": not has_experts,
        "experts.num_groups experts.top_groups experts.scale": (
            not has_experts or experts is None or experts.scores == "softmax"
        ),
        "experts.shared_gate": not has_experts or not shared,
        "mlp.dim": only_experts,
        "activation mlp.gated mlp.bias output.activation": config.mlp is None,
        "norms.shared": not config.parallel,
        "image.patch_size image.channels image.mask_patch image.patch_bias image.first_vector": (
            config.image is None
        ),
        "vocab_size": config.image is not None or config.features is not None,
        "positions.farthest_distance": config.positions.relative_buckets == 0,
        "positions.offset": config.positions.max_positions == 0,
        "output.tied output.bias": head != "tokens",
        "output.num_classes": head not in ("first", "each"),
        "output.projection_dim": head != "embedding",
        "output.activation output.transform_norm output.transform_bias": (
            not config.output.transform
        ),
        "pool.kind": head not in ("first", "embedding", None),
        "pool.end_token": config.pool.kind != "end",
        "pool.activation pool.dim": not config.pool.dense,
    }

    for paths, is_unread in unread.items():
        yield from paths.split() if is_unread else ()


def _settings_differ(config: Any, read: Any) -> bool:
    """Whether settings of training differ, which a Transformer alone has."""
    return isinstance(config, TransformerConfig) and any(
        read_field(config, path) != read_field(read, path) for path in _TRAINING
    )


def _said(differing: Mapping[str, tuple[object, object]]) -> str:
    return ", ".join(
        f"{name}={ours!r} (but {theirs!r})" for name, (ours, theirs) in differing.items()
    )


# --- config.json ----------------------------------------------------------------------------------


def _edited(
    family: Family, content: dict[str, Any], source: Mapping[str, Any], config: Any
) -> dict[str, Any]:
    """Returns a ``config.json``, changed where a config differs from its source.

    Args:
        family: The family.
        content: The ``config.json``, which the other half of a model may have changed.
        source: The ``config.json`` as it was read.
        config: What it is to say.
    """
    if isinstance(family, DualFamily):
        return _edited_pair(family, content, config)
    if isinstance(family, EncoderDecoderFamily):
        return _edited_halves(family, content, config)

    # Raises where the source itself is not of the family, whatever the other half changed in it.
    if source is not content:
        family.config(source, "config.json")

    # An unchanged model keeps its file to the letter, fields at their defaults left out or not.
    read = family.config(content, "config.json")
    if _differences(config, read) or _settings_differ(config, read):
        return _written(family, content, config)
    return content


def _edited_pair(
    family: DualFamily, content: dict[str, Any], config: DualEncoderConfig
) -> dict[str, Any]:
    """Returns the ``config.json`` of a pair, each tower's table changed like one of its own."""
    written = _fields_written(family, content, family.config(content, "config.json"), config)
    for name, tower in family.towers.items():
        table = tower.content(content)
        edited = _edited(tower.family, table, table, getattr(config, name))
        if edited != table:
            written[tower.field] = edited
            written.pop(tower.older_field, None)
    return written


def _edited_halves(
    family: EncoderDecoderFamily, content: dict[str, Any], config: EncoderDecoderConfig
) -> dict[str, Any]:
    """Returns the ``config.json`` of an encoder-decoder, whose halves have one table of fields."""
    written = _fields_written(family, content, family.config(content, "config.json"), config)
    for name, half in family.halves.items():
        written = _edited(half, written, content, getattr(config, name))
    return written


def _written(family: Family, content: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Returns a ``config.json``, changed to a config."""
    # Fields that cannot say it stay as they are: callers read the result back and compare.
    read = family.config(content, "config.json")
    written = _fields_written(family, content, read, config)
    architecture = _architecture(family, config, written)
    if architecture != (content.get("architectures") or list(family.architectures))[0]:
        written["architectures"] = [architecture]

    # A group is written whole: one of its fields may have another meaning beside the others.
    for group in family.groups:
        fields_of_group = group.back(config)
        if fields_of_group != group.back(read):
            for name in group.older:
                written.pop(name, None)
            written |= fields_of_group
    return written


def _fields_written(
    family: Family, content: Mapping[str, Any], read: Any, config: Any
) -> dict[str, Any]:
    """Returns a ``config.json``, with the fields changed in which a config differs from it."""
    written = dict(content)
    for name, field in family.fields.items():
        for target in field.targets:
            # Where a part is absent, the field that says so tells it, and its others stay.
            value = field.back(config, target)
            is_said = not is_unsaid(config, target) and value != field.back(read, target)
            if is_said and field.fits(family.config_class, value):
                written[name] = value
    return written


def _architecture(family: Family, config: Any, content: Mapping[str, Any]) -> str:
    """Returns the architecture with the head of a config."""
    parts = sorted({name for names in family.architectures.values() for name in names} | {"head"})
    defaults = read_fields(type(config)())

    # Whether a head is tied is of heads of tokens alone, and said by a field where there is one.
    if config.head != "tokens" or "tie_word_embeddings" in family.fields:
        parts = [part for part in parts if part != "output.tied"]

    def fits(name: str) -> bool:
        says = {**defaults, **family.fixed, **family.architectures[name]}
        return all(says[part] == read_field(config, part) for part in parts)

    # Of several that fit, that which the file names already.
    names = [*(content.get("architectures") or ()), *family.architectures]
    return next((name for name in names if name in family.architectures and fits(name)), names[0])


def _read_back(family: Family, content: Mapping[str, Any], config: Any) -> Any:
    """Returns the config of a ``config.json``, or raises for another."""
    try:
        read = family.config(content, "The config.json of the model as it is")
    except PretrainedError as error:
        raise refusal([str(error)]) from error

    differing = _differences(config, read)
    if not differing:
        return read

    advice = ""
    other_type = _other_type(config) if isinstance(config, TransformerConfig) else None
    if other_type is not None:
        new = "dataclasses.replace(model.config, source=None)"
        advice = f" As a {other_type} it can be written: model.config = {new}."
    problem = f"a {content['model_type']}'s config.json has no way to say {_said(differing)}"
    raise refusal([problem], advice)


# --- models without a file ------------------------------------------------------------------------


def _describe_new(config: ModelConfig) -> tuple[dict[str, Any], Family, Any]:
    """Returns the first ``config.json`` that reads back as a config, with its family, or raises."""
    is_plain = isinstance(config, TransformerConfig)
    kinds = registry.NEW_MODEL_TYPES if is_plain else tuple(registry.FAMILIES)
    closest: dict[str, Any] | None = None
    nearest, reasons = "", list[str]()
    for kind in kinds:
        family = registry.FAMILIES[kind]
        if not isinstance(config, family.config_class):
            continue
        if family.has_parts is not None and not family.has_parts(config):
            continue

        try:
            content = _new_content(kind, family, config)
            read = family.config(content, "config.json")
        except PretrainedError as error:
            if family.has_parts is not None:
                reasons.append(f"a {kind}'s {error}")
            continue

        differing = _differences(config, read)
        if not differing:
            return content, family, read
        if closest is None or len(differing) < len(closest):
            closest, nearest = differing, kind

    # Of parts that one family alone has, its own reason says more than the nearest other family.
    if reasons:
        raise refusal([reason.removesuffix(".") for reason in reasons])
    if closest is None:
        raise refusal(["no family of config.json has such parts"])
    problem = f"no family of config.json has {_said(closest)}"
    raise refusal([f"{problem}, where a {nearest} is the nearest, with the values in parentheses"])


def _other_type(config: TransformerConfig) -> str | None:
    """Returns the type of models that can say a config, None if there is none."""
    try:
        return _describe_new(replace(config, source=None))[0]["model_type"]
    except PretrainedError:
        return None


def _new_content(kind: str, family: Family, config: Any) -> dict[str, Any]:
    """Returns a family's ``config.json`` nearest to a config."""
    if isinstance(family, DualFamily):
        return _new_pair_content(kind, family, config)
    if isinstance(family, EncoderDecoderFamily):
        return _new_halves_content(kind, family, config)

    content: dict[str, Any] = {
        "architectures": [next(iter(family.architectures))],
        "model_type": kind,
        "dtype": config.param_dtype,
    }
    content |= _special_tokens(kind, family, config)
    if getattr(config, "attention", None) is not None and config.attention.rope is not None:
        content["max_position_embeddings"] = 2048  # which other readers need

    # Fields that this config does not use have their defaults.
    for name, field in family.fields.items():
        value = field.back(config, field.targets[0])
        is_used = value is not None and field.fits(type(config), value)
        content[name] = value if is_used else family.default_or_none(name)
    for group in family.groups:
        content |= group.back(config)

    # What several fields or the architecture say may differ from this still.
    return _written(family, content, config)


def _new_pair_content(kind: str, family: DualFamily, config: DualEncoderConfig) -> dict[str, Any]:
    """Returns a family's ``config.json`` nearest to the config of a pair."""
    content: dict[str, Any] = {
        "architectures": [next(iter(family.architectures))],
        "model_type": kind,
        "dtype": config.text.param_dtype,
    }
    content |= {name: getattr(config, field.targets[0]) for name, field in family.fields.items()}
    for name, tower in family.towers.items():
        content[tower.field] = _new_content(tower.model_type, tower.family, getattr(config, name))
    return content


def _new_halves_content(
    kind: str, family: EncoderDecoderFamily, config: EncoderDecoderConfig
) -> dict[str, Any]:
    """Returns a family's ``config.json`` nearest to the config of an encoder-decoder."""
    content: dict[str, Any] = {
        "decoder_start_token_id": config.start_token,
        "is_encoder_decoder": True,
    }
    for name, half in family.halves.items():
        content |= _new_content(kind, half, getattr(config, name))
    return content


# Where transformers' own token of padding is beyond a small vocabulary.
_FAR_PADDING = ("modernbert", "whisper")


def _special_tokens(kind: str, family: Family, config: Any) -> dict[str, None]:
    """Returns the tokens that a new model has no meaning for, which are not those of its family."""
    # Left out they would be the defaults of the family in transformers, such as 128,004 for
    # padding: beyond a small vocabulary, where the model cannot be made. And a text of one's own
    # tokens would end at a 2 of llama's.
    if (
        isinstance(config, TransformerConfig)
        and config.causal
        and not config.attention.cross_attention
    ):
        names = {"bos_token_id", "eos_token_id", "pad_token_id"}
    else:
        names = {"pad_token_id"} if kind in _FAR_PADDING else set()
    return dict.fromkeys(sorted(names - {*family.fields, *family.group_fields}))
