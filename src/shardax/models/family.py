# SPDX-License-Identifier: Apache-2.0
"""A type of published models, and the reading of its ``config.json``.

What a ``config.json`` says and its family does not know is refused by name: a field either changes
the model, is known to change nothing, or may only have the value that changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from shardax.models import kinds
from shardax.models.config import common_fields
from shardax.models.config.paths import make_config, part_class, parts_of, paths_of, read_field
from shardax.models.config.transformer import TransformerConfig
from shardax.models.dual_encoder import DualEncoderConfig
from shardax.models.encoder_decoder import EncoderDecoderConfig
from shardax.models.kinds import PretrainedError, brief
from shardax.models.tensors import Tensors
from shardax.nn.errors import LayerConfigError

if TYPE_CHECKING:
    from typing import Self

# --- fields of any config.json ---

# Fields that change nothing in what a model computes, beside those of all configs.
_HARMLESS = """
_attn_implementation_autoset _flash_attn_2_enabled _num_labels auto_map classifier_dropout
gradient_checkpointing initializer_range is_llama_config keys_to_ignore_at_inference mask_token_id
max_position_embeddings max_sequence_length max_window_layers model_max_length model_type
output_past output_router_logits pad_token sentence_transformers tokenizer_model_max_length
tokenizer_padding_side transformers.js_config unk_token_id unsloth_fixed unsloth_version
"""
HARMLESS = common_fields.HARMLESS | {*_HARMLESS.split()}
# Fields that change nothing at these values, where a family does not read them itself.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **common_fields.NEUTRAL,
    "attention_bias": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "qk_layernorm": (False, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False, None),
    "use_qk_norm": (False, None),
    "use_sliding_window": (False, None),
}

# --- types ---

# Fields that follow from the number of heads where they are left out.
_BY_HEADS = ("attention.num_kv_heads", "attention.head_dim")

_KINDS = {"bool": kinds.BOOLEAN, "float": kinds.NUMBER, "int": kinds.INTEGER, "str": kinds.TEXT}
_POSITIVE = frozenset(
    [
        *("vocab_size", "num_layers", "embed_dim", "mlp.dim", "features.size"),
        *("attention.num_heads", "attention.num_kv_heads", "attention.head_dim"),
        *("attention.window", "attention.latent.dim", "attention.latent.query_dim"),
        *("attention.latent.rope_dim", "attention.latent.value_dim"),
        *("experts.dim", "experts.top_k", "experts.num_groups", "experts.top_groups"),
        *("experts.limit", "experts.shared_dim", "output.projection_dim"),
        # Of a table without rows transformers stores none.
        "embedding.token_types",
        *("image.size", "image.patch_size", "image.channels", "patch_size", "channels"),
    ]
)


def kind_of_target(config_class: type, target: str) -> kinds.Kind:
    """Returns the type of a field, by its target's path."""
    if target in kinds.ACTIVATION_FIELDS:
        return kinds.TEXT
    name, _, null = paths_of(config_class)[target].partition(" | ")
    kind = replace(_KINDS.get(name, kinds.ANYTHING), is_positive=target in _POSITIVE)
    # Null is as if the field were left out, or false.
    may_be_null = null == "None" or name == "bool" or target in _BY_HEADS
    return kind.or_null if may_be_null else kind


def is_neutral(name: str, value: object, neutral: Mapping[str, tuple[object, ...]]) -> bool | None:
    """Whether a field is neutral at its value, None if never."""
    if name == "layer_types":  # of a family without kinds of layers
        return value is None or (
            isinstance(value, list) and all(kind == "full_attention" for kind in value)
        )
    if name == "quantization_config" and isinstance(value, dict):  # which the files read
        return value.get("quant_method") not in (None, "mxfp4")
    return value in neutral[name] if name in neutral else None


# --- families ---

# Defaults of a field: none, as it must be there, and that which it has in transformers.
REQUIRED, PUBLISHED = object(), object()


class Field:
    """A field of ``config.json``, and its targets in a config by path.

    Args:
        *targets: What the field sets.
        default: Its value where it is left out: by default that of the type in ``transformers``.
        kind: Its type; None for that of the targets.
        to: Returns the value of the targets of its value; None for the value itself.
        back: Returns its value of a config, None for no value; None for that of the targets.
    """

    def __init__(
        self,
        *targets: str,
        default: object = PUBLISHED,
        kind: kinds.Kind | None = None,
        to: Callable[[Any], Any] | None = None,
        back: Callable[[Any], Any] | None = None,
    ) -> None:
        self.targets, self.default = targets, default
        self.kind, self.to, self.convert_back = kind, to, back

    def kinds_of(self, config_class: type) -> Iterator[kinds.Kind]:
        """Yields the types that its value must be of."""
        if self.kind is not None:
            yield self.kind
        else:
            for target in self.targets:
                yield kind_of_target(config_class, target)

    def fits(self, config_class: type, value: Any) -> bool:
        """Whether a value may stand in ``config.json``."""
        return all(kind.problem("", value) is None for kind in self.kinds_of(config_class))

    def back(self, config: Any, target: str) -> Any:
        """Returns its value of a config, as one of the targets has it."""
        if self.convert_back is not None:
            return self.convert_back(config)

        value = read_field(config, target)
        if target in kinds.ACTIVATION_FIELDS:
            return kinds.published_activation(value or config.activation)
        return value


class Taker(Protocol):
    """The function by which a group of fields takes one, by name."""

    def __call__(
        self, name: str, default: Any = REQUIRED, kind: kinds.Kind = kinds.ANYTHING
    ) -> Any:
        """Returns the value of a field, or its default."""
        ...


class FieldGroup:
    """Fields of ``config.json`` that have a meaning together.

    Attributes:
        older: Other names for the same, which ``back`` does without.
    """

    older: Sequence[str] = ()

    def to(self, take: Taker) -> Mapping[str, Any]:
        """Returns the fields of a config that they set, by path."""
        return {}

    def back(self, config: Any) -> Mapping[str, Any]:
        """Returns the fields of ``config.json`` that say a config, none for what others say."""
        return {}


class DerivedFields(FieldGroup):
    """Fields read by a function, which nothing says back."""

    def __init__(self, derive: Callable[[Taker], Mapping[str, Any]]) -> None:
        self.derive = derive

    def to(self, take: Taker) -> Mapping[str, Any]:
        return self.derive(take)


@dataclass(frozen=True)
class Family:
    """A type of published models."""

    # The fields of ``config.json`` with a meaning of their own.
    fields: Mapping[str, Field]
    tensors: Tensors
    # Those of the head, by its kind in ``TransformerConfig``.
    head_tensors: Mapping[str | None, Tensors] = dataclasses.field(default_factory=dict)
    # Fields of ``config.json`` with a meaning together.
    groups: Sequence[FieldGroup] = ()
    # Fields of the config, by path, that all models of the family share.
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Values of fields of ``config.json`` that may be left out, before those of fields and groups.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # By name of the class the fields of the config that it sets.
    architectures: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # Fields of ``config.json`` that may only have one of these values.
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    # Fields that change nothing.
    harmless: Iterable[str] = ()
    # The class of its configs.
    config_class: ClassVar[type] = TransformerConfig
    # Whether all fields of ``config.json`` are of the family.
    is_whole: ClassVar[bool] = True
    # Of the names of tensors, in all models but those without a head.
    prefix: str = "model."
    # Ends of the names of tensors that are no parameters.
    buffers: Iterable[str] = ("rotary_emb.inv_freq",)
    # The fields that groups read, of families that are towers of others.
    group_fields: Iterable[str] = ()
    # Tensors that files may repeat, by the names of the copies.
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The type whose defaults in transformers are those of fields and groups.
    model_type: str = ""
    # Whether it computes what that type does where the fields that it does not read are at their
    # defaults. Not known of a registered family with groups of its own.
    computes_defaults: bool = True
    # Whether a config has the parts that all models of the family have; None for common ones.
    has_parts: Callable[[Any], bool] | None = None

    def of_type(self, model_type: str) -> Self:
        """Returns the family with the defaults of a type in ``transformers``."""
        return replace(self, model_type=model_type)

    @property
    def published(self) -> Mapping[str, Any]:
        """The defaults of all fields in ``transformers``, but those that are null."""
        return common_fields.DEFAULTS.get(self.model_type, {})

    def default_of(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns what a field is that is left out: ``REQUIRED`` if it may not be.

        Args:
            name: The field.
            default: What it is where the family does not say.
        """
        if name in self.defaults:
            return self.defaults[name]
        if name in self.fields and self.fields[name].default is not REQUIRED:
            default = self.fields[name].default
        if default is not PUBLISHED:
            return default
        return self.published.get(name) if self.model_type else REQUIRED

    def default_or_none(self, name: str) -> Any:
        """Returns what a field is that is left out, None if it may not be."""
        default = self.default_of(name)
        return None if default is REQUIRED else default

    def tensors_for(self, config: Any) -> Tensors:
        """Returns the tensors of a model of a config."""
        return self.tensors

    def as_stored(self, content: dict[str, Any], files: Any) -> dict[str, Any]:
        """Returns a ``config.json`` with what only the tensors say."""
        return content

    def config(
        self, content: Mapping[str, Any], where: str, tensor_count: int | None = None
    ) -> Any:
        """Reads a ``config.json``, or raises with all problems of it."""
        # The number of tensors in the files bounds layers and experts.
        return Reading(self, content, where, tensor_count).config()

    def read_parts(self, reading: Reading) -> dict[str, TransformerConfig]:
        """Returns the configs of the Transformers that a model is made of, by name."""
        return {}

    @property
    def embeddings(self) -> set[str]:
        """The names of its tensors that are embeddings, also without the prefix."""
        names = {tensor.name for tensor in self.tensors if tensor.to.endswith(".embedding")}
        return names | {name.removeprefix(self.prefix) for name in names}

    def has_pooler(self, names: Iterable[str]) -> bool:
        """Whether files have the pooler of the architecture without a head."""
        tensors = [t for t in self.head_tensors.get(None, self.tensors) if "pooler." in t.to]
        stored = {name.removeprefix(self.prefix) for name in names}
        return all(tensor.name.removeprefix(self.prefix) in stored for tensor in tensors)

    @property
    def bare(self) -> str:
        """The architecture without a head."""
        return next(
            (name for name, parts in self.architectures.items() if parts.get("head", "") is None),
            next(iter(self.architectures)),
        )


@dataclass(frozen=True)
class Tower:
    """An encoder of a pair, by its place in ``config.json``."""

    field: str  # with the table of its fields
    older_field: str  # with a table that goes before it
    model_type: str
    family: Family

    def content(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns its fields in a ``config.json``, or raises."""
        tables = [content.get(name) or {} for name in (self.field, self.older_field)]
        for name, table in zip((self.field, self.older_field), tables, strict=True):
            if not isinstance(table, dict):
                raise PretrainedError(f"{name}={brief(table)} is not a table of fields")
        if not tables[1]:
            return dict(tables[0])
        # What the older table leaves out has its default, whatever the other one says.
        known = {*self.family.fields, *self.family.group_fields}
        return {k: v for k, v in tables[0].items() if k not in known} | tables[1]

    def config(self, content: Mapping[str, Any], tensor_count: int | None) -> TransformerConfig:
        """Reads its config, or raises with all problems of it."""
        fields = {"model_type": self.model_type, **self.content(content)}
        model_type = fields["model_type"]
        fits, limits = model_type == self.model_type, f", only {self.model_type!r}"
        kinds.check_supported(f"{self.field}.model_type", model_type, fits, limits)
        return self.family.config(fields, self.field, tensor_count)


@dataclass(frozen=True)
class DualFamily(Family):
    """A type of published dual encoders."""

    config_class: ClassVar[type] = DualEncoderConfig
    # By the names of the encoders in ``DualEncoder``. Tensors of them are beside those of the pair.
    towers: Mapping[str, Tower] = dataclasses.field(default_factory=dict)

    def with_tower(self, model_type: str, family: Family) -> DualFamily:
        """Returns the pair whose encoder of a type is of another family."""
        towers, tensors = dict(self.towers), self.tensors
        for name, tower in self.towers.items():
            if tower.model_type == model_type:
                towers[name] = replace(tower, family=family)
                tensors = tuple(t for t in tensors if not t.to.startswith(f"{name}."))
                tensors += tensors_of(name, family)
        return replace(self, towers=towers, tensors=tensors)

    def read_parts(self, reading: Reading) -> dict[str, TransformerConfig]:
        configs = dict[str, TransformerConfig]()
        for name, tower in self.towers.items():
            reading.read_names |= {tower.field, tower.older_field}
            try:
                configs[name] = tower.config(reading.content, reading.tensor_count)
            except PretrainedError as error:
                reading.note(str(error).removesuffix("."))
        return configs


def tensors_of(tower: str, family: Family) -> Tensors:
    """Returns the tensors of an encoder, by paths in the pair."""
    return tuple(replace(tensor, to=f"{tower}.{tensor.to}") for tensor in family.tensors)


@dataclass(frozen=True)
class HalfFamily(Family):
    """One half of a type of encoder-decoders, with its fields."""

    is_whole: ClassVar[bool] = False


@dataclass(frozen=True)
class EncoderDecoderFamily(Family):
    """A type of published encoder-decoders, whose halves have one table of fields."""

    config_class: ClassVar[type] = EncoderDecoderConfig
    # By their names in ``EncoderDecoder``.
    halves: Mapping[str, HalfFamily] = dataclasses.field(default_factory=dict)

    def of_type(self, model_type: str) -> Self:
        """Returns the family, and its halves, with the defaults of a type in ``transformers``."""
        halves = {name: half.of_type(model_type) for name, half in self.halves.items()}
        return replace(self, model_type=model_type, halves=halves)

    def read_parts(self, reading: Reading) -> dict[str, TransformerConfig]:
        configs = dict[str, TransformerConfig]()
        for name, half in self.halves.items():
            of_half = Reading(half, reading.content, reading.where, reading.tensor_count)
            try:
                configs[name] = of_half.config()
            except PretrainedError as error:
                for problem in of_half.problems or [str(error).removesuffix(".")]:
                    reading.note(problem)
            reading.read_names |= of_half.read_names
        return configs


# Fewer layers, and experts of all layers, are read whatever the files have: the check of the
# tensors names what is missing.
_FEW_LAYERS, _FEW_EXPERTS = 256, 4096


class Reading:
    """One ``config.json``, read field by field."""

    def __init__(
        self, family: Family, content: Mapping[str, Any], where: str, tensor_count: int | None
    ) -> None:
        self.family, self.content, self.where = family, content, where
        self.tensor_count = tensor_count
        self.read_names: set[str] = set()
        self.problems: list[str] = []
        self.advice: list[str] = []

    def config(self) -> Any:
        """Returns the config that it says, or raises with all problems."""
        family = self.family
        of_head = self._of_architecture()
        of_fields: dict[str, Any] = {}
        for name, field in family.fields.items():
            of_fields |= self._of_field(name, field)

        # Before groups make a tuple for each layer, and of both halves one by one.
        values: dict[str, Any] = {**family.fixed, **of_head, **of_fields}
        self._check_counts(values)
        parts: dict[str, Any] = dict(family.read_parts(self))
        if parts:  # the head is that of one of them
            values = parts | of_fields | dict(family.fixed)

        is_all_read = True
        for group in family.groups:
            try:
                values.update(group.to(self.take))
            except PretrainedError as error:
                self.note(str(error))
                is_all_read = False

        # Of a group that failed fields would be called unknown.
        if is_all_read and family.is_whole:
            self._note_unread()
        if self.problems:
            raise self.error()

        # Several fields together may make too much.
        self._check_counts(values)
        large = [f"{path} is {x}" for path, x in values.items() if kinds.is_too_large(x)]
        if large:
            self.problems += [f"{text}, which is too large" for text in large]
            raise self.error()

        if heads := values.get("attention.num_heads"):
            by_heads = zip(_BY_HEADS, (heads, values["embed_dim"] // heads), strict=True)
            values |= {path: size for path, size in by_heads if values.get(path) is None}
        self._check_known(values)
        values["source"] = json.dumps(self.content)
        try:
            return make_config(family.config_class, values)
        except (LayerConfigError, ValueError) as error:
            self.note(self._named(str(error).removesuffix(".")))
            raise self.error() from error

    def take(self, name: str, default: Any = REQUIRED, kind: kinds.Kind = kinds.ANYTHING) -> Any:
        """Returns the value of a field, or its default."""
        self.read_names.add(name)
        if name in self.content:
            problem = kind.problem(name, self.content[name])
            if problem is None:
                return self.content[name]
            self.note(problem)

        value = self.family.default_of(name, default)
        if value is not REQUIRED:
            return value
        if name not in self.content:
            self.note(f"{name} is missing")
        return 1  # with which others are read, for their problems

    def note(self, problem: str) -> None:
        """Adds a problem, unless it is known already."""
        if problem not in self.problems:
            self.problems.append(problem)

    def _named(self, problem: str) -> str:
        """Returns the problem of a config behind its field of ``config.json``."""
        kind = self.family.config_class
        for name, field in self.family.fields.items():
            for target in field.targets:
                part, _, field_of_part = target.rpartition(".")
                owners = ((kind, target), (part_class(kind, part), field_of_part))
                starts = tuple(f"{owner.__name__} needs {path} to" for owner, path in owners)
                if name in self.content and problem.startswith(starts):
                    return f"{name}={brief(self.content[name])}: {problem}"
        return problem

    def _of_field(self, name: str, field: Field) -> dict[str, Any]:
        value = self.take(name)
        if name in self.content:
            own_kinds = field.kinds_of(self.family.config_class)
            problems = [kind.problem(name, value) for kind in own_kinds]
            for problem in filter(None, problems):
                self.note(problem)
                return {}

        if field.targets[0] in kinds.ACTIVATION_FIELDS:
            if value not in kinds.ACTIVATION_NAMES:
                self.note(f"{name}={brief(value)} is none of {', '.join(kinds.ACTIVATION_NAMES)}")
            value = kinds.ACTIVATION_NAMES.get(value, "silu")
        if value is None and isinstance(self.family.default_of(name), bool):
            value = False
        return dict.fromkeys(field.targets, value if field.to is None else field.to(value))

    def _check_counts(self, values: Mapping[str, Any]) -> None:
        """Raises for more layers or experts than the files have."""
        if self.tensor_count is None:
            return
        layers, experts = values.get("num_layers", 0), values.get("experts.num_experts", 0)
        if not any(tensor.is_of_expert for tensor in self.family.tensors):
            experts = 0  # all of a layer are in one tensor
        for count, least, counts in (
            (layers, _FEW_LAYERS, f"{layers} layers"),
            (layers * experts, _FEW_EXPERTS, f"{layers} layers of {experts} experts"),
        ):
            if type(count) is int and count > max(self.tensor_count, least):
                raise PretrainedError(
                    f"{self.where} says that the model has {counts}, but its files have "
                    f"{self.tensor_count} tensors in all. Download or save the model again."
                )

    def _check_known(self, values: Mapping[str, Any]) -> None:
        """Raises for fields that the config does not have, as a registered family may set."""
        config_class = self.family.config_class
        known = {*paths_of(config_class), *parts_of(config_class)}
        if unknown := sorted(values.keys() - known):
            self.note(
                f"{config_class.__name__} has no {', '.join(unknown)}, which the family of "
                f"model_type={self.content.get('model_type')!r} sets"
            )
            raise self.error()

    def _note_unread(self) -> None:
        """Notes fields not read by the family, unless they change nothing."""
        family, unknown = self.family, list[str]()
        neutral = {**NEUTRAL, **family.neutral}
        harmless = HARMLESS | set(family.harmless)
        for name, value in self.content.items():
            if name in self.read_names:
                continue

            is_neutral_value = is_neutral(name, value, neutral)
            if is_neutral_value is False:
                only = f", only {neutral[name][0]!r}" if name in neutral else " for this family"
                self.note(f"{name}={brief(value)} is not supported{only}")
            if is_neutral_value is not None or name in harmless:
                continue

            default = family.published.get(name, REQUIRED)
            default = default if family.computes_defaults else REQUIRED
            if default is REQUIRED:
                self.note(f"{name}={brief(value)} is unknown")
                unknown.append(name)
            elif value != default:
                self.note(f"{name}={brief(value)} is not supported, only {default!r}")

        if unknown:
            model_type = self.content.get("model_type")
            self.advice.append(
                f"If {', '.join(unknown)} changes nothing in what the model computes, say so: "
                f"sx.models.register({model_type!r}, like={model_type!r}, harmless={unknown!r})."
            )

    def _of_architecture(self) -> Mapping[str, Any]:
        architectures = self.family.architectures
        names = self.take("architectures", None, kind=kinds.TEXTS.or_null) or [
            next(iter(architectures))
        ]
        if len(names) == 1 and names[0] in architectures:
            return architectures[names[0]]

        self.note(
            f"architectures={brief(names)} is not supported, only one of {', '.join(architectures)}"
        )
        model_type, bare = self.content.get("model_type"), dict(architectures[self.family.bare])
        self.advice.append(
            f"The layers alone, without the head, are read after sx.models.register({model_type!r},"
            f" like={model_type!r}, architectures={{{names[0]!r}: {bare!r}}}), by "
            f"sx.models.from_pretrained(folder, strict=False)."
        )
        return {}

    def error(self) -> PretrainedError:
        """Returns the error of all problems."""
        text = f"{self.where} describes a model that cannot be read: {'; '.join(self.problems)}."
        return PretrainedError(" ".join([text, *self.advice]))
