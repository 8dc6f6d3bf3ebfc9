# SPDX-License-Identifier: Apache-2.0
"""What is known of a type of published models, and the reading of its ``config.json``.

What a config says and no table knows is refused by name: a field either changes the model, is known
to change nothing, or may only have the value that changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardax._core.errors import ShardaxError
from shardax._transforms.errors import LayerConfigError
from shardax.models.config_fields import (
    ACTIVATION_NAMES,
    HARMLESS,
    NEUTRAL,
    brief,
    is_neutral,
    type_problem,
)
from shardax.models.transformer import Rope, TransformerConfig


class PretrainedError(ShardaxError, ValueError):
    """A published model cannot be read, or a model be written.

    The type of the model or a field of its config is unknown or unsupported, or tensors are
    missing, left over or of another shape.
    """


Taker = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """What is known of a type of models."""

    # By field of ``config.json`` those of ``TransformerConfig`` that it sets, separated by spaces.
    fields: Mapping[str, str]
    # The table of tensors.
    tensors: str
    # Fields of ``TransformerConfig`` that all models of the family share.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # Values of fields of ``config.json`` that may be left out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Called with a function that takes a field by name; returns fields of ``TransformerConfig``.
    derive: Callable[[Taker], Mapping[str, Any]] | None = None
    # By name of the class the fields of ``TransformerConfig`` that it sets.
    architectures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Fields of ``config.json`` that may only have one of these values.
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Fields that change nothing.
    harmless: Iterable[str] = ()
    # Of the names of tensors, in all models but those without a head.
    prefix: str = "model."
    # Ends of the names of tensors that are no parameters.
    buffers: Iterable[str] = ("rotary_emb.inv_freq",)

    def config(
        self, content: Mapping[str, Any], where: str, tensors: int | None = None
    ) -> TransformerConfig:
        """Reads a ``config.json``, or raises with all that is wrong in it.

        ``tensors`` is how many the files have, which bounds layers and experts.
        """
        return _Reading(self, content, where, tensors).config

    def fields_read(self, content: Mapping[str, Any]) -> set[str]:
        """Returns the fields of a valid ``config.json`` that the model depends on."""
        return _Reading(self, content, "config.json", None).taken

    @property
    def bare(self) -> str:
        """The architecture without a head."""
        return next(
            (name for name, parts in self.architectures.items() if parts.get("head", "") is None),
            next(iter(self.architectures)),
        )


# Fewer layers, and experts of all layers, are read whatever the files have: the check of the
# tensors names what is missing.
_FEW_LAYERS, _FEW_EXPERTS = 256, 4096


class _Reading:
    """One ``config.json``, read field by field."""

    def __init__(
        self, family: Family, content: Mapping[str, Any], where: str, tensors: int | None
    ) -> None:
        self.family, self.content, self.where = family, content, where
        self.tensors = tensors
        self.taken: set[str] = set()
        self.problems: list[str] = []
        self.advice: list[str] = []
        self.config = self._read()

    def take(self, name: str, *default: Any) -> Any:
        """Returns the value of a field, or what it is if it is left out."""
        self.taken.add(name)
        if name in self.content:
            problem = type_problem(name, self.content[name])
            if problem is None:
                return self.content[name]
            self._note(problem)
        if name in self.family.defaults:
            return self.family.defaults[name]
        if default:
            return default[0]
        if name not in self.content:
            self._note(f"{name} is missing")
        return 1

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _read(self) -> TransformerConfig:
        family = self.family
        values: dict[str, Any] = {**family.fixed, **self._of_architecture()}
        for name, targets in family.fields.items():
            values.update(self._of_field(name, targets.split()))
        self._check_counts(values)
        if family.derive is not None:
            try:
                values.update(family.derive(self.take))
            except PretrainedError as error:
                self._note(str(error))
        self._check_others()
        self._raise()
        self._check_counts(values)
        if values.get("num_kv_heads") is None:
            values["num_kv_heads"] = values["num_heads"]
        if values.get("head_dim") is None:
            values["head_dim"] = values["embed_dim"] // values["num_heads"]
        try:
            config = TransformerConfig(**values, source=json.dumps(self.content))
        except (LayerConfigError, ValueError) as error:
            self._note(str(error).removesuffix("."))
        self._raise()
        return config

    def _of_field(self, name: str, targets: list[str]) -> dict[str, Any]:
        value = self.take(name)
        if name in self.content:
            for problem in filter(None, (type_problem(name, value, each) for each in targets)):
                self._note(problem)
                return {}
        if "activation" in targets:
            if value not in ACTIVATION_NAMES:
                self._note(f"{name}={brief(value)} is none of {', '.join(ACTIVATION_NAMES)}")
            value = ACTIVATION_NAMES.get(value, "silu")
        if value is None and isinstance(self.family.defaults.get(name), bool):
            value = False
        return dict.fromkeys(targets, value)

    def _check_counts(self, values: Mapping[str, Any]) -> None:
        """Raises at once where layers or experts are more than the files have."""
        if self.tensors is None:
            return
        layers, experts = values.get("num_layers", 0), values.get("num_experts", 0)
        for count, least, what in (
            (layers, _FEW_LAYERS, f"{layers} layers"),
            (layers * experts, _FEW_EXPERTS, f"{layers} layers of {experts} experts"),
        ):
            if type(count) is int and count > max(self.tensors, least):
                raise PretrainedError(
                    f"{self.where} says that the model has {what}, but its files have "
                    f"{self.tensors} tensors in all. Download or save the model again."
                )

    def _check_others(self) -> None:
        """Notes fields that the family does not read, unless they change nothing."""
        family, neutral = self.family, {**NEUTRAL, **self.family.neutral}
        harmless, unknown = HARMLESS | set(family.harmless), []
        for name, value in self.content.items():
            if name in self.taken:
                continue
            problem = type_problem(name, value)
            neutral_here = is_neutral(name, value, neutral) if problem is None else None
            if neutral_here is False:
                only = f", only {neutral[name][0]!r}" if name in neutral else " for this family"
                self._note(f"{name}={brief(value)} is not supported{only}")
            elif problem is not None:
                self._note(problem)
            elif neutral_here is None and name not in harmless:
                self._note(f"{name}={brief(value)} is unknown")
                unknown.append(name)
        if unknown:
            kind = self.content.get("model_type")
            self.advice.append(
                f"If {', '.join(unknown)} changes nothing in what the model computes, say so: "
                f"sx.models.register({kind!r}, like={kind!r}, harmless={unknown!r})."
            )

    def _of_architecture(self) -> Mapping[str, Any]:
        architectures = self.family.architectures
        names = self.take("architectures", None) or [next(iter(architectures))]
        if len(names) == 1 and names[0] in architectures:
            return architectures[names[0]]
        self._note(
            f"architectures={brief(names)} is not supported, only one of {', '.join(architectures)}"
        )
        kind, bare = self.content.get("model_type"), dict(architectures[self.family.bare])
        self.advice.append(
            f"The layers alone, without the head, are read after sx.models.register({kind!r}, "
            f"like={kind!r}, architectures={{{names[0]!r}: {bare!r}}}), by "
            f"sx.models.from_pretrained(folder, strict=False)."
        )
        return {}

    def _raise(self) -> None:
        if self.problems:
            text = (
                f"{self.where} describes a model that cannot be read: {'; '.join(self.problems)}."
            )
            raise PretrainedError(" ".join([text, *self.advice]))


# --- the rotary embedding ---


_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "original_max_position_embeddings",
        "truncate",
    ),
}


def read_rope(
    take: Taker,
    values: Mapping[str, Any] | None = None,
    *,
    base: float = 10_000.0,
    fraction: float = 1.0,
    kinds: Iterable[str] = tuple(_ROPE_FIELDS),
) -> Rope:
    """Reads the rotary embedding, as transformers 5 does.

    Of ``rope_scaling`` and ``rope_parameters`` it takes the former, and the base of neither of the
    two from ``rope_theta`` beside them.
    """
    if values is None:
        scaling, parameters = take("rope_scaling", None), take("rope_parameters", None)
        theta, part = take("rope_theta", None), take("partial_rotary_factor", None)
        base, fraction = theta if theta else base, fraction if part is None else part
        values = scaling or parameters or {}
        if theta and values.get("rope_theta") not in (None, theta):
            raise PretrainedError(
                f"rope_theta={theta!r} stands beside a table with rope_theta="
                f"{values['rope_theta']!r}, which transformers takes: leave one of them out"
            )
    left = {name: value for name, value in values.items() if value is not None}
    kind = left.pop("rope_type", left.get("type", "default"))
    left.pop("type", None)
    if kind not in tuple(kinds):
        raise PretrainedError(
            f"rope_type={brief(kind)} is not supported, only one of {', '.join(kinds)}"
        )
    names = _ROPE_FIELDS[kind]
    if kind in ("llama3", "yarn") and "original_max_position_embeddings" not in left:
        left["original_max_position_embeddings"] = take("max_position_embeddings")
    numbers = {"rope_theta": base, "partial_rotary_factor": fraction}
    numbers |= {"beta_slow": 1.0, "beta_fast": 32.0} if kind == "yarn" else {}
    numbers |= {
        name: left.pop(name)
        for name in ("rope_theta", "partial_rotary_factor", *names)
        if name in left
    }
    wrong = [f"{name}={brief(value)} is unknown" for name, value in left.items()]
    absent = {"factor", "low_freq_factor", "high_freq_factor"} & set(names) - set(numbers)
    wrong += [f"{name} is missing" for name in sorted(absent)]
    truncate = numbers.pop("truncate", True)
    if not isinstance(truncate, bool):
        wrong.append(f"truncate={brief(truncate)} is not true or false")
    for name, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            wrong.append(f"{name}={brief(value)} is not a positive number")
    if not wrong:
        wrong = _rope_problems(kind, numbers)
    if wrong:
        raise PretrainedError(f"the rotary embedding of rope_type={kind!r}: {', '.join(wrong)}")
    fields = {
        "rope_theta": "base",
        "partial_rotary_factor": "fraction",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "beta_slow": "low",
        "beta_fast": "high",
        "original_max_position_embeddings": "length",
    }
    options: dict[str, Any] = {fields.get(name, name): v for name, v in numbers.items()}
    options |= {"base": float(options["base"]), "fraction": float(options["fraction"])}
    return Rope(kind=kind, truncate=truncate, **options)


def _rope_problems(kind: str, numbers: Mapping[str, Any]) -> list[str]:
    """Returns what would divide by zero."""
    problems = []
    if numbers["partial_rotary_factor"] > 1:
        problems.append(f"partial_rotary_factor={numbers['partial_rotary_factor']!r} is above 1")
    if kind == "yarn" and numbers["rope_theta"] <= 1:
        problems.append(f"rope_theta={numbers['rope_theta']!r} is not above 1")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        problems.append("low_freq_factor is not below high_freq_factor")
    return problems


def rope_fields(rope: Rope) -> dict[str, Any]:
    """Returns the ``rope_parameters`` of a rotary embedding."""
    fields = {
        "factor": rope.factor,
        "low_freq_factor": rope.low,
        "high_freq_factor": rope.high,
        "beta_slow": rope.low,
        "beta_fast": rope.high,
        "original_max_position_embeddings": rope.length,
        "attention_factor": rope.attention_factor,
        "truncate": rope.truncate,
    }
    return {
        "rope_type": rope.kind,
        "rope_theta": rope.base,
        **({} if rope.fraction == 1 else {"partial_rotary_factor": rope.fraction}),
        **{name: fields[name] for name in _ROPE_FIELDS[rope.kind] if fields[name] is not None},
    }
