# SPDX-License-Identifier: Apache-2.0
"""The architecture of a model, read off its layers.

A model can be edited after it was loaded, and its config says what it was before. So the config
that is written is made of the layers. A ``Transformer`` built of what was written is then compared
with the model, layer by layer: what differs would be lost, and is refused by path. The parameters
are those that stand where the built model has its own, whatever their type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
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
from shardax.extend import Path, format_path
from shardax.models.comparison import (
    MISSING,
    SAVE_ANY,
    SCALE_TOLERANCE,
    ArchitectureCheck,
    LayerPlace,
    ParameterPlace,
    layers_of,
    refusal,
    refuse_any,
    text_of,
)
from shardax.models.config.paths import read_field, read_fields, replace_fields
from shardax.models.config.recurrent import MIXERS
from shardax.models.config.transformer import TransformerConfig
from shardax.models.convnext import ConvNeXt, ConvNeXtConfig
from shardax.models.dual_encoder import TOWERS, DualEncoder, DualEncoderConfig
from shardax.models.encoder_decoder import HALVES, EncoderDecoder, EncoderDecoderConfig, build_model
from shardax.models.families import registry
from shardax.models.family import (
    ConfigEdit,
    DualFamily,
    EncoderDecoderFamily,
    Family,
    kind_of_target,
)
from shardax.models.kinds import (
    ACTIVATION_FIELDS,
    PretrainedError,
    activation_name,
    brief,
    published_activation,
)
from shardax.models.layers.experts import GroupedMoE, GroupedSoftmaxMoE, InputScaledMoE
from shardax.models.layers.norms import OffsetLayerNorm, OffsetRMSNorm
from shardax.models.layers.transformer_layer import SCALES
from shardax.models.transformer import Transformer
from shardax.nn.errors import LayerConfigError
from shardax.nn.moe import MoE
from shardax.nn.normalization import LayerNorm, RMSNorm

# Settings of training and of computing, which no config.json fixes.
_TRAINING = ("dropout", "attention.dropout", "embedding.dropout", "experts.load_balance_weight")
_SETTINGS = frozenset(
    [*_TRAINING, "dtype", "experts.dispatch", "param_dtype", "remat", "scan_layers", "source"]
)
# Variables that are no parameters.
_RECORDS = (Cache, Intermediate, MetricState, OptState, Perturbation, RngState)


def config_of(model: object) -> Any:
    """Returns the config of a model."""
    config = getattr(model, "config", None)
    if isinstance(model, DualEncoder) and isinstance(config, DualEncoderConfig):
        return config
    if isinstance(model, EncoderDecoder) and isinstance(config, EncoderDecoderConfig):
        return config
    if isinstance(model, ConvNeXt) and isinstance(config, ConvNeXtConfig):
        return config
    parts = getattr(config, "transformer", config)
    if not isinstance(parts, TransformerConfig) or not isinstance(model, Transformer):
        raise PretrainedError(
            f"{type(model).__name__} is of no family: sx.models.Transformer, Decoder, "
            f"DualEncoder, EncoderDecoder and ConvNeXt are saved. {SAVE_ANY}"
        )
    return parts


def _content_of(config: Any) -> dict[str, Any]:
    """Returns the ``config.json`` that a model was read with, or raises."""
    try:
        content = json.loads(config.source)
    except (TypeError, ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        return content
    raise refusal(
        [f"model.config.source is {brief(config.source)}, and not the text of a config.json"],
        " It is what from_pretrained read; without it the model is written as a new one: "
        "model.config = dataclasses.replace(model.config, source=None).",
    )


def describe(model: object) -> tuple[dict[str, Any], Family, Any]:
    """Returns a model's ``config.json``, its family, and its config read back."""
    config = config_of(model)
    if isinstance(model, DualEncoder):
        return _describe_pair(model, config)
    if isinstance(model, EncoderDecoder):
        return _describe_halves(model, config)
    if isinstance(model, ConvNeXt):
        return _describe_stages(model, config)
    facts = _facts(model, config)
    if config.source is None:
        return _describe_new(_config_with(config, facts))
    content = _content_of(config)
    family = registry.family_of(content, "config.json")
    content, config = _edited(family, content, config, facts)
    return content, family, _read_back(family, content, config)


def _edited(
    family: Family,
    content: dict[str, Any],
    config: TransformerConfig,
    facts: Mapping[str, Any],
    source_content: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], TransformerConfig]:
    """Returns a ``config.json`` and a config, changed to facts of the layers."""
    # The other half of a model may have changed the content before.
    source = family.config(content if source_content is None else source_content, "config.json")
    _check_applied(config, facts, source)
    config = _config_with(config, facts)
    source = source if source_content is None else family.config(content, "config.json")
    if _differences(config, source) or _settings_differ(config, source):
        content = _written(family, content, config)
    return content, config


def _check_applied(config: Any, facts: Mapping[str, Any], source: Any) -> None:
    """Raises for edits of a config that the layers do not have."""
    unapplied = [
        f"model.config has {path}={read_field(config, path)!r}, but its layers {fact!r}"
        for path, fact in facts.items()
        if read_field(config, path) not in (fact, read_field(source, path))
    ]
    refuse_any(unapplied)


def parameter_places(model: object, config: Any) -> list[ParameterPlace]:
    """Returns a model's parameters by place, or raises for lost ones."""
    has_attention = isinstance(config, TransformerConfig)
    comparison = ArchitectureCheck(has_attention and config.attention.local_rope is not None)
    names = TOWERS if isinstance(config, DualEncoderConfig) else HALVES
    if isinstance(config, (DualEncoderConfig, EncoderDecoderConfig)):
        parts = {name: _plain(getattr(config, name)) for name in names}
        built = build_model(replace(config, **parts), {}, Rngs(0))
        comparison.compare(model, built, LayerPlace(model, (), (), None), names)
        for name in names:
            comparison.compare_layers(getattr(model, name), getattr(built, name), (name,))
        if isinstance(model, EncoderDecoder) and built.decoder.embed is built.encoder.embed:
            comparison.take_shared(model)
    elif isinstance(model, ConvNeXt):
        _compare_stages(comparison, model, build_model(config, {}, Rngs(0)))
    else:
        comparison.compare_layers(model, Transformer(_plain(config), rngs=Rngs(0)), ())
    placed_ids = {id(place.variable) for place in comparison.places}
    for path, variable in iter_variables(model):
        kind = getattr(variable, "variable_type", type(variable))
        is_named = any(path[: len(above)] == above for above in comparison.wrong)
        if id(variable) not in placed_ids and not is_named and not issubclass(kind, _RECORDS):
            comparison.wrong[path] = "has no tensor in its family"
    problems = [f"{format_path(path)} {reason}" for path, reason in comparison.wrong.items()]
    refuse_any(problems, comparison.advice)
    return comparison.places


def _plain(config: TransformerConfig) -> TransformerConfig:
    """Returns a config of layers in a list, without settings of training."""
    plain = {"scan_layers": False, "remat": None, "experts.dispatch": "dropless"}
    rates = dict.fromkeys(("dropout", "attention.dropout", "embedding.dropout"), 0.0)
    return replace_fields(config, plain | rates)


# --- pairs ----------------------------------------------------------------------------------------


def _describe_pair(
    model: DualEncoder, config: DualEncoderConfig
) -> tuple[dict[str, Any], Family, DualEncoderConfig]:
    """Describes a dual encoder, its towers as models of their own."""
    _check_parts(model, config, TOWERS)
    facts = {name: _facts(getattr(model, name), getattr(config, name)) for name in TOWERS}
    size = _attempt(lambda pair: int(pair.text_projection.kernel.shape[-1]), model)
    size = 0 if size is MISSING else size
    if config.source is None:
        towers = {name: _config_with(getattr(config, name), facts[name]) for name in TOWERS}
        new = replace(config, **towers, projection_dim=size)
        return _describe_new_parts(new, DualFamily, _new_pair_content)
    content = _content_of(config)
    family = registry.family_of(content, "config.json")
    assert isinstance(family, DualFamily)
    source, towers = family.config(content, "config.json"), dict[str, Any]()
    for name, tower in family.towers.items():
        fields = tower.content(content)
        written, towers[name] = _edited(tower.family, fields, getattr(config, name), facts[name])
        if written != fields:
            content[tower.field] = written
            content.pop(tower.older_field, None)
    if size != source.projection_dim:
        content["projection_dim"] = size
    new = replace(config, **towers, projection_dim=size)
    return content, family, _read_back(family, content, new)


def _check_parts(model: object, config: Any, names: Sequence[str]) -> None:
    """Raises for parts that are not those of the config."""
    for name in names:
        part = getattr(model, name)
        if not isinstance(part, Transformer):
            raise refusal([f".{name} is {text_of(part)}, not a Transformer"])
        if differing := _differences(config_of(part), getattr(config, name)):
            problem = f".{name}.config has {_said(differing)} in model.config.{name}"
            new = f"dataclasses.replace(model.config, {name}=model.{name}.config)"
            raise refusal([problem], f" Set both: model.config = {new}.")


def _describe_new_parts(
    config: Any, kind_of_family: type, make_content: Callable[..., dict[str, Any]]
) -> tuple[dict[str, Any], Family, Any]:
    """Finds the family of a model of two parts without a file."""
    contents = (
        (kind, family, partial(make_content, kind, family, config))
        for kind, family in registry.FAMILIES.items()
        if isinstance(family, kind_of_family)
    )
    return _fitting(contents, config)


def _new_pair_content(kind: str, family: DualFamily, config: DualEncoderConfig) -> dict[str, Any]:
    """Returns a family's ``config.json`` nearest to a config."""
    content: dict[str, Any] = {
        "architectures": [next(iter(family.architectures))],
        "model_type": kind,
        "dtype": config.text.param_dtype,
    }
    content |= {name: getattr(config, field.targets[0]) for name, field in family.fields.items()}
    for name, tower in family.towers.items():
        content[tower.field] = _new_content(tower.model_type, tower.family, getattr(config, name))
    return content


# --- encoder-decoders -----------------------------------------------------------------------------


def _describe_halves(
    model: EncoderDecoder, config: EncoderDecoderConfig
) -> tuple[dict[str, Any], Family, EncoderDecoderConfig]:
    """Describes an encoder-decoder, whose halves have one table of fields."""
    _check_parts(model, config, HALVES)
    facts = {name: _facts(getattr(model, name), getattr(config, name)) for name in HALVES}
    if config.source is None:
        halves = {name: _config_with(getattr(config, name), facts[name]) for name in HALVES}
        new = replace(config, **halves)
        return _describe_new_parts(new, EncoderDecoderFamily, _new_halves)
    content, halves = _content_of(config), dict[str, Any]()
    family = registry.family_of(content, "config.json")
    assert isinstance(family, EncoderDecoderFamily)
    for name, half in family.halves.items():
        parts = (getattr(config, name), facts[name], _content_of(config))
        content, halves[name] = _edited(half, content, *parts)
    if config.start_token != content.get("decoder_start_token_id"):
        content["decoder_start_token_id"] = config.start_token
    return content, family, _read_back(family, content, replace(config, **halves))


def _new_halves(
    kind: str, family: EncoderDecoderFamily, config: EncoderDecoderConfig
) -> dict[str, Any]:
    """Returns a family's ``config.json`` nearest to a config."""
    content: dict[str, Any] = {
        "decoder_start_token_id": config.start_token,
        "is_encoder_decoder": True,
    }
    for name, half in family.halves.items():
        content |= _new_content(kind, half, getattr(config, name))
    return content


# --- stages ---------------------------------------------------------------------------------------


def _describe_stages(
    model: ConvNeXt, config: ConvNeXtConfig
) -> tuple[dict[str, Any], Family, ConvNeXtConfig]:
    """Describes a ConvNeXt by its stages."""
    facts = _stage_facts(model)
    if config.source is None:
        new = _config_with(config, facts)
        contents = (
            (kind, family, partial(_new_content, kind, family, new))
            for kind, family in registry.FAMILIES.items()
            if family.config_class is ConvNeXtConfig
        )
        return _fitting(contents, new)
    content = _content_of(config)
    family = registry.family_of(content, "config.json")
    source = family.config(content, "config.json")
    _check_applied(config, facts, source)
    new = _config_with(config, facts)
    if _differences(new, source):
        content = _written(family, content, new)
    return content, family, _read_back(family, content, new)


def _stage_facts(model: ConvNeXt) -> dict[str, Any]:
    """Returns fields of a config as the stages have them."""

    def of_blocks(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def of_all(model: Any) -> Any:
            values = {read(block) for stage in model.stages for block in stage.blocks}
            # Blocks that differ are refused by path, later, like an activation without a name.
            return MISSING if len(values) != 1 or None in values else values.pop()

        return of_all

    readers: dict[str, Callable[[Any], Any]] = {
        "channels": lambda model: _size(model.patches.kernel, 2),
        "patch_size": lambda model: _size(model.patches.kernel, 0),
        "widths": lambda model: tuple(_size(x.blocks[0].conv.kernel, 3) for x in model.stages),
        "depths": lambda model: tuple(len(stage.blocks) for stage in model.stages),
        "activation": of_blocks(lambda block: activation_name(block.activation)),
        "layer_scale": of_blocks(lambda block: block.scale is not None),
        "response_norm": of_blocks(lambda block: block.responses is not None),
        "norm_epsilon": lambda model: model.final_norm.epsilon,
        "head": lambda model: None if model.head is None else "classes",
        "num_classes": lambda model: _size(model.head.kernel, 1),
    }
    facts = {name: _attempt(read, model) for name, read in readers.items()}
    return {name: fact for name, fact in facts.items() if fact is not MISSING}


def _compare_stages(comparison: ArchitectureCheck, model: ConvNeXt, built: ConvNeXt) -> None:
    """Compares stages and their blocks with the built ones."""

    def compare(part: Any, expected: Any, path: Path, *parts_of: str) -> None:
        comparison.compare(part, expected, LayerPlace(part, path, (), None), parts_of, path)

    compare(model, built, (), "stages")
    for index, (stage, expected) in enumerate(zip(model.stages, built.stages, strict=False)):
        path = ("stages", index)
        compare(stage, expected, path, "blocks")
        pairs = zip(getattr(stage, "blocks", ()), expected.blocks, strict=False)
        for number, (block, expected_block) in enumerate(pairs):
            compare(block, expected_block, (*path, "blocks", number))


# --- the config of a model ------------------------------------------------------------------------


def _facts(model: object, config: TransformerConfig) -> dict[str, Any]:
    """Returns fields of a config as the layers have them."""
    places = layers_of(model)
    if not places:
        raise refusal(["it has no layers"])
    has_experts = [isinstance(getattr(place.module, "mlp", None), MoE) for place in places]
    dense = [place for place, experts in zip(places, has_experts, strict=True) if not experts]
    mixed = [place for place, experts in zip(places, has_experts, strict=True) if experts]
    readers: list[tuple[Sequence[Any], Mapping[str, Callable[[Any], Any]]]] = [
        ([model], _model_readers(config)),
        (places, _ANY_LAYER),
        ([place for place in places if _attention(place) is not None], _LAYER),
        (dense, _DENSE),
        (mixed, _MIXED),
    ]
    facts: dict[str, Any] = {"num_layers": len(places)}
    for parts, table in readers:
        for name, read in table.items():
            values = [_attempt(read, part) for part in parts]
            # Layers that differ where no config says so are refused by path, later.
            if values and all(value == values[0] for value in values) and values[0] is not MISSING:
                facts[name] = values[0]
    facts |= _windows(places) | _recurrent(places)
    if config.attention.rope is not None:
        facts |= _rotated_layers(places)
    if mixed:
        dense_layers = (i for i, experts in enumerate(has_experts) if not experts)
        facts["experts.dense_layers"] = tuple(dense_layers)
    elif config.experts is not None:
        facts["experts.num_experts"] = 0
    return facts


def _config_with(config: Any, facts: Mapping[str, Any]) -> Any:
    """Returns a config with facts of the layers, or raises."""
    try:
        return replace_fields(config, facts)
    except LayerConfigError as error:
        problem = f"its layers were edited, and no config has them: {error}"
        raise refusal([problem.removesuffix(".")]) from error


def _attempt(read: Callable[[Any], object], part: object):
    """Reads a part; MISSING if it or its sizes do not fit."""
    try:
        value = read(part)
    except (AttributeError, IndexError, LayerConfigError, TypeError):
        return MISSING
    return MISSING if value is None and read in _NEVER_NONE else value


def _size(variable, axis: int, place: object = None) -> int:
    stacked = isinstance(place, LayerPlace) and place.position is not None
    return int(variable.shape[axis + stacked if axis >= 0 else axis])


def _activation(place) -> str | None:
    return activation_name(place.module.mlp.activation)


def _norm_kind(model: object) -> str | None:
    norm = next(_norms(model))
    if type(norm) is LayerNorm and norm.bias is None:
        return "layer_unbiased"
    kinds = {
        OffsetRMSNorm: "rms_offset",
        RMSNorm: "rms",
        LayerNorm: "layer",
        OffsetLayerNorm: "layer_offset",
    }
    return kinds.get(type(norm))


_NEVER_NONE = (_activation, _norm_kind)


def _norms(model: object) -> Iterator[Any]:
    layer = layers_of(model)[0].module
    for holder, name in (
        (model, "final_norm"),
        *((layer, f"{part}_norm") for part in ("attn", "attn_post", "mlp", "mlp_post")),
    ):
        if getattr(holder, name, None) is not None:
            yield getattr(holder, name)


def _model_readers(config: TransformerConfig) -> dict[str, Callable[[Any], Any]]:
    readers: dict[str, Callable[[Any], Any]] = {
        "norms.kind": _norm_kind,
        "norms.epsilon": lambda model: next(_norms(model)).epsilon,
    }
    if config.image is None and config.features is None:
        readers |= {
            "vocab_size": lambda model: _size(model.embed.embedding, 0),
            _width(config): lambda model: _size(model.embed.embedding, 1),
        }
    if config.embedding.dim:
        readers["embed_dim"] = lambda model: _size(model.embed_projection.kernel, 1)
    if config.positions.max_positions:
        readers["positions.max_positions"] = lambda model: _size(model.positions.embedding, 0)
    if config.embedding.token_types:
        readers["embedding.token_types"] = lambda model: _size(model.types.embedding, 0)
    if config.head == "embedding":
        readers["output.projection_dim"] = lambda model: _size(model.head.kernel, -1)
    if config.pool.dim:
        readers["pool.dim"] = lambda model: _size(model.pooler.kernel, -1)
    if config.head in ("first", "each"):
        readers["output.num_classes"] = lambda model: _size(model.head.kernel, -1)
    if config.head == "tokens":
        readers["output.tied"] = lambda model: model.head is None
        readers["output.bias"] = lambda model: (
            config.output.bias if model.head is None else model.head.bias is not None
        )
    return readers


def _width(config: TransformerConfig) -> str:
    return "embedding.dim" if config.embedding.dim else "embed_dim"


_LAYER: dict[str, Callable[[Any], Any]] = {
    "attention.num_heads": lambda place: _size(_queries(place).kernel, 1, place),
    "attention.head_dim": lambda place: _size(_queries(place).kernel, 2, place),
    "attention.num_kv_heads": lambda place: _size(place.module.attn.k.kernel, 1, place),
    "causal": lambda place: place.module.attn.causal,
    "attention.qkv_bias": lambda place: _with_bias(place).bias is not None,
    "attention.out_bias": lambda place: place.module.attn.out.bias is not None,
    "attention.key_bias": lambda place: (
        place.module.attn.q.bias is None or place.module.attn.k.bias is not None
    ),
    "attention.scale": lambda place: place.module.attn.scale,
    "attention.softcap": lambda place: place.module.attn.softcap,
    "attention.sinks": lambda place: place.module.attn.sinks is not None,
    "attention.gate": lambda place: place.module.attn.gate is not None,
}


def _reader(name: str) -> Callable[[Any], Any]:
    return lambda place: getattr(place.module, name)


_ANY_LAYER: dict[str, Callable[[Any], Any]] = {
    "parallel": lambda place: place.module.parallel,
    "residual_scale": lambda place: place.module.residual_scale,
    **{path: _reader(name) for name, path in SCALES.items()},
}
_DENSE: dict[str, Callable[[Any], Any]] = {
    "mlp.dim": lambda place: _size(place.module.mlp.up.kernel, -1, place),
    "mlp.bias": lambda place: place.module.mlp.up.bias is not None,
    "mlp.gated": lambda place: place.module.mlp.gate is not None,
    "mlp.gate_scale": lambda place: getattr(place.module.mlp, "gate_scale", 1.0),
    "activation": _activation,
}
_MIXED: dict[str, Callable[[Any], Any]] = {
    "experts.num_experts": lambda place: _size(place.module.mlp.router.kernel, -1, place),
    "experts.top_k": lambda place: place.module.mlp.top_k,
    "experts.dim": lambda place: _size(place.module.mlp.up, -1, place),
    "experts.shared_dim": lambda place: _size(place.module.shared_mlp.up.kernel, -1, place),
    "experts.scores": lambda place: _SCORES.get(type(place.module.mlp), "softmax"),
    "experts.num_groups": lambda place: place.module.mlp.num_groups,
    "experts.top_groups": lambda place: place.module.mlp.top_groups,
    "experts.scale": lambda place: place.module.mlp.scale,
    "experts.bias": lambda place: place.module.mlp.router.bias is not None,
    "experts.limit": lambda place: getattr(place.module.mlp, "limit", None),
    "experts.gate_factor": lambda place: getattr(place.module.mlp, "gate_factor", None),
    "experts.normalise": lambda place: place.module.mlp.normalise,
    "activation": _activation,
}


_SCORES = {
    GroupedMoE: "sigmoid",
    GroupedSoftmaxMoE: "grouped_softmax",
    InputScaledMoE: "input_sigmoid",
}


def _queries(place: LayerPlace) -> Any:
    attention = place.module.attn
    return getattr(attention, "q_up", None) or attention.q


def _with_bias(place: LayerPlace) -> Any:
    attention = place.module.attn
    return getattr(attention, "kv_down", None) or attention.q


def _windows(places: Sequence[LayerPlace]) -> dict[str, Any]:
    windows = [getattr(_attention(place), "window", None) for place in places]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:  # refused by path, later
        return {}
    local = tuple(window is not None for window in windows)
    if not sizes:
        return {"attention.window": None, "attention.local_layers": None}
    layers = None if all(local) else local
    return {"attention.window": sizes.pop(), "attention.local_layers": layers}


def _attention(place: LayerPlace) -> Any:
    return getattr(place.module, "attn", None)


def _mixer(place: LayerPlace) -> Any:
    return getattr(place.module, "mixer", None)


def _recurrent(places: Sequence[LayerPlace]) -> dict[str, Any]:
    mixers = list(map(_mixer, places))
    chosen = tuple(mixer is not None for mixer in mixers)
    if not any(chosen):
        return {"recurrence.mixer": None}
    kinds: set[Any] = {
        _attempt(MIXERS[type(mixer)].of, mixer) for mixer in mixers if type(mixer) in MIXERS
    }
    if len(kinds) != 1 or MISSING in kinds:  # refused by path, later
        return {}
    beside = any(_mixer(place) is not None and _attention(place) is not None for place in places)
    chosen = None if all(chosen) else chosen
    options = {"mixer": kinds.pop(), "layers": chosen, "beside": beside}
    return {f"recurrence.{name}": value for name, value in options.items()}


def _rotated_layers(places: Sequence[LayerPlace]) -> dict[str, Any]:
    rotated = tuple(getattr(place.module, "has_rope", True) for place in places)
    return {"attention.rope_layers": None if all(rotated) else rotated}


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
    own = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _SETTINGS}
    if isinstance(config, ConvNeXtConfig) and config.head is None:
        del own["num_classes"]
    values = dict[str, Any]()
    for name, value in own.items():
        is_part = isinstance(value, TransformerConfig)
        of_part = {f"{name}.{key}": x for key, x in _relevant(value).items()} if is_part else {}
        values |= of_part if is_part else {name: value}
    return values


def _relevant_of_layers(config: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of a config with meaning for logits, by path."""
    values = {path: x for path, x in read_fields(config).items() if path not in _SETTINGS}
    attention, layers = config.attention, range(config.num_layers)
    local = tuple(map(attention.is_local, layers))
    mixed = tuple(config.kind_of(index)[1] for index in layers)
    rotated = tuple(map(attention.has_rope, layers))
    # Which layers have a part, instead of how a config says so.
    for path in ("attention.window", "attention.local_layers", "attention.rope_layers"):
        values.pop(path)
    for path in ("recurrence.layers", "experts.dense_layers"):
        values.pop(path)
    values["rotated_layers"] = rotated
    values["windows"] = tuple(attention.window if is_local else None for is_local in local)
    values["experts"] = mixed
    values["recurrent_layers"] = tuple(map(config.is_recurrent, layers))
    values["attention.chunked"] = attention.chunked and any(local)
    if not any(values["recurrent_layers"]):
        values["recurrence.mixer"] = None
    if not any(rotated):
        values["attention.rope"] = None
    if attention.local_rope == attention.rope or not any(local):
        values.pop("attention.local_rope")
    for path in _unread(config, any(mixed), all(mixed), all(rotated)):
        values.pop(path, None)
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


def _settings_differ(config: TransformerConfig, source: TransformerConfig) -> bool:
    return any(read_field(config, path) != read_field(source, path) for path in _TRAINING)


def _said(differing: Mapping[str, tuple[object, object]]) -> str:
    return ", ".join(
        f"{name}={ours!r} (but {theirs!r})" for name, (ours, theirs) in differing.items()
    )


# --- config.json ----------------------------------------------------------------------------------


def _written(
    family: Family, content: Mapping[str, Any], config: TransformerConfig
) -> dict[str, Any]:
    """Returns a ``config.json``, changed to a config."""
    # Fields that cannot say it stay as they are: callers read the result back and compare.
    edit = ConfigEdit(family, dict(content), config, family.config(content, "config.json"))
    for name, field in family.fields.items():
        for target in filter(edit.changes, field.targets):
            value = edit.value(target)
            if target in ACTIVATION_FIELDS:
                value = published_activation(value or config.activation)
            # What this config does not use may be no value of the field.
            if kind_of_target(family.config_class, target).problem(name, value) is None:
                edit.content[name] = value
    architecture = _architecture(family, config, edit.content)
    if architecture != (content.get("architectures") or list(family.architectures))[0]:
        edit.content["architectures"] = [architecture]
    for group in family.groups:
        group.write(edit)
    return edit.content


def _architecture(family: Family, config: TransformerConfig, content: Mapping[str, Any]) -> str:
    """Returns the architecture with the head of a config."""
    parts = sorted({name for names in family.architectures.values() for name in names} | {"head"})
    defaults = read_fields(type(config)())

    def fits(name: str) -> bool:
        says = {**defaults, **family.fixed, **family.architectures[name]}
        required = [part for part in parts if part != "output.tied" or config.head == "tokens"]
        if "tie_word_embeddings" in family.fields:
            required = [part for part in required if part != "output.tied"]
        return all(says[part] == read_field(config, part) for part in required)

    names = [*(content.get("architectures") or ()), *family.architectures]
    return next((name for name in names if name in family.architectures and fits(name)), names[0])


def _read_back(family: Family, content: Mapping[str, object], config: Any) -> Any:
    """Returns the config of a ``config.json``, or raises for another."""
    try:
        read = family.config(content, "The config.json of the model as it is")
    except PretrainedError as error:
        raise refusal([str(error)]) from error
    if differing := _differences(config, read):
        other_family = _other_family(config) if isinstance(config, TransformerConfig) else None
        new = "dataclasses.replace(model.config, source=None)"
        advice = f" As a {other_family} it can be written: model.config = {new}."
        problem = f"a {content['model_type']}'s config.json has no way to say {_said(differing)}"
        raise refusal([problem], "" if other_family is None else advice)
    return read


def _describe_new(config: TransformerConfig) -> tuple[dict[str, Any], Family, TransformerConfig]:
    """Finds the family of a config without a file."""
    families = {kind: registry.FAMILIES[kind] for kind in registry.NEW_MODEL_TYPES}
    contents = (
        (kind, family, partial(_new_content, kind, family, config))
        for kind, family in families.items()
        if not isinstance(family, (DualFamily, EncoderDecoderFamily))
        and family.config_class is TransformerConfig
    )
    return _fitting(contents, config)


def _fitting(
    contents: Iterable[tuple[str, Family, Callable[[], dict[str, Any]]]], config: Any
) -> tuple[dict[str, Any], Family, Any]:
    """Returns the first content that reads back without differences, or raises."""
    closest: dict[str, Any] | None = None
    nearest, reasons = "", list[str]()
    for kind, family, make_content in contents:
        try:
            content = make_content()
            read = family.config(content, "config.json")
        except PretrainedError as error:
            if any(group.begin(config) for group in family.groups):  # of its own parts
                reasons.append(f"a {kind}'s {error}")
            continue
        differing = _differences(config, read)
        if not differing:
            return content, family, read
        if closest is None or len(differing) < len(closest):
            closest, nearest = differing, kind
    if reasons:
        raise refusal([reason.removesuffix(".") for reason in reasons])
    if closest is None:
        raise refusal(["no family of config.json has such parts"])
    problem = f"no family of config.json has {_said(closest)}"
    raise refusal([f"{problem}, where a {nearest} is the nearest, with the values in parentheses"])


def _other_family(config: TransformerConfig) -> str | None:
    try:
        return _describe_new(replace(config, source=None))[0]["model_type"]
    except PretrainedError:
        return None


def _new_content(kind: str, family: Family, config: TransformerConfig) -> dict[str, Any]:
    """Returns a family's ``config.json`` nearest to a config."""
    content: dict[str, Any] = {
        "architectures": [next(iter(family.architectures))],
        "model_type": kind,
        "dtype": config.param_dtype,
    }
    content |= _special_tokens(kind, family, config)
    for name, field in family.fields.items():
        value = read_field(config, field.targets[0])
        if field.targets[0] in ACTIVATION_FIELDS:
            value = published_activation(value or config.activation)
        kind_of_value = kind_of_target(type(config), field.targets[0])
        is_unused = kind_of_value.problem(name, value) is not None
        content[name] = field.default_or_none() if value is None or is_unused else value
    for group in family.groups:
        content |= group.begin(config)
    content = _written(family, content, config)
    edit = ConfigEdit(family, content, config, config)
    for group in family.groups:
        group.complete(edit)
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


# --- the comparison -------------------------------------------------------------------------------


# Classes that compute something else than the ones that they are made of.
