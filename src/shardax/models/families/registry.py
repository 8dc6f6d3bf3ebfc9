# SPDX-License-Identifier: Apache-2.0
"""The families by type of model, those of users too."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from shardax.models.families import (
    clip,
    convnext,
    deepseek,
    encoder_decoders,
    encoders,
    gemma,
    glm,
    gpt,
    hybrids,
    llama,
    qwen,
    relatives,
)
from shardax.models.family import REQUIRED, DerivedFields, DualFamily, Family, Field
from shardax.models.kinds import PretrainedError, brief

_FAMILIES = {
    "bart": encoder_decoders.BART,
    "bert": encoders.BERT,
    "clip": clip.CLIP,
    "clip_text_model": clip.CLIP_TEXT,
    "clip_vision_model": clip.CLIP_VISION,
    "cohere2": relatives.COHERE2,
    "convnext": convnext.CONVNEXT,
    "convnextv2": convnext.CONVNEXT_V2,
    "deepseek_v2": deepseek.DEEPSEEK_V2,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "dinov2": encoders.DINOV2,
    "distilbert": encoders.DISTILBERT,
    "electra": encoders.ELECTRA,
    "falcon_h1": hybrids.FALCON_H1,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3_TEXT,
    "glm4": glm.GLM4,
    "glm4_moe": glm.GLM4_MOE,
    "gpt2": gpt.GPT2,
    "gpt_neox": gpt.GPT_NEOX,
    "gpt_oss": gpt.GPT_OSS,
    "granite": relatives.GRANITE,
    "lfm2": hybrids.LFM2,
    "llama": llama.LLAMA,
    "llama4_text": llama.LLAMA4_TEXT,
    "mamba2": hybrids.MAMBA2,
    "ministral": llama.MINISTRAL,
    "mistral": llama.MISTRAL,
    "mixtral": llama.MIXTRAL,
    "modernbert": encoders.MODERNBERT,
    "mpnet": encoders.MPNET,
    "nemotron": relatives.NEMOTRON,
    "olmo2": llama.OLMO2,
    "olmo3": llama.OLMO3,
    "olmoe": llama.OLMOE,
    "phi": gpt.PHI,
    "phi3": llama.PHI3,
    "qwen2": qwen.QWEN2,
    "qwen2_moe": qwen.QWEN2_MOE,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen.QWEN3_MOE,
    "qwen3_next": hybrids.QWEN3_NEXT,
    "roberta": encoders.ROBERTA,
    "siglip": clip.SIGLIP,
    "siglip_text_model": clip.SIGLIP_TEXT,
    "siglip_vision_model": clip.SIGLIP_VISION,
    "smollm3": relatives.SMOLLM3,
    "starcoder2": gpt.STARCODER2,
    "t5": encoder_decoders.T5,
    "vit": encoders.VIT,
    "whisper": encoder_decoders.WHISPER,
    "xlm-roberta": encoders.XLM_ROBERTA,
}
FAMILIES: dict[str, Family] = {name: family.of_type(name) for name, family in _FAMILIES.items()}
# In this order for a model without a file: the plain and widely served ones first, which most
# programs know it by, and then those that alone have some of its parts.
_PLAIN_MODELS_TEXT = """
llama mistral qwen2 qwen3 mixtral qwen3_moe olmo2 gemma gemma2 gemma3_text phi gpt2 gpt_neox
starcoder2 bert vit roberta xlm-roberta distilbert electra mpnet modernbert
dinov2
"""
NEW_MODEL_TYPES = tuple(dict.fromkeys([*_PLAIN_MODELS_TEXT.split(), *FAMILIES]))


# Parts of a family that follow from the others.
_SET_HERE = ("model_type", "has_parts", "computes_defaults")


def register(model_type: str, *, like: str | None = None, **parts: Any) -> None:
    """Makes a type of models known to ``from_pretrained``.

    Args:
        model_type: As in ``config.json``. A type that is known already is replaced.
        like: A known type, of which everything is taken that is not given; mappings and lists are
            added to its own.
        **parts: The parts of the family:

            - ``fields``: fields of ``config.json``, and those of the config that they set, by path.
            - ``derive``: a function for fields that need a computation:
              ``lambda take: {"attention.rope_layers": take("num_hidden_layers") // 2}``.
            - ``groups``: groups of fields that are read and written together.
            - ``fixed``: fields of the config that all models of the type share, by path.
            - ``defaults``: values of fields that may be left out.
            - ``architectures``: by name of the class the fields of the config that it sets, such as
              its head.
            - ``neutral``: fields with the only values that they may have.
            - ``harmless``: fields that change nothing.
            - ``tensors``: a sequence of ``shardax.models.tensors.Tensor``.
            - ``head_tensors``: those of each kind of head, where they differ.
            - ``buffers``: ends of the names of tensors that are no parameters.
            - ``prefix``: what models without a head leave out of the names of tensors.

    Raises:
        PretrainedError: If a part is unknown or missing, or ``like`` is no known type.

    Example:
        >>> import shardax as sx
        >>> sx.models.register(
        ...     "my_llama",
        ...     like="llama",
        ...     fixed={"output.softcap": 30.0},
        ...     architectures={"MyLlamaForCausalLM": {}},
        ...     harmless=["my_note"],
        ... )
    """
    names = [field.name for field in dataclasses.fields(Family)]
    parts_of_family = [name for name in names if name not in _SET_HERE]
    wrong = sorted(set(parts) - {*parts_of_family, "derive"})
    base = find_family(like, "like") if like is not None else None
    missing = [name for name in ("fields", "tensors") if base is None and name not in parts]
    if wrong or missing:
        raise PretrainedError(
            f"register({model_type!r}) was given {', '.join(wrong) or 'nothing unknown'}, and "
            f"lacks {', '.join(missing) or 'nothing'}. The parts of a family are "
            f"{', '.join(parts_of_family)}, derive; with like='llama' those left out are llama's."
        )

    if "fields" in parts:
        parts["fields"] = {
            name: Field(*targets.split(), default=REQUIRED) if isinstance(targets, str) else targets
            for name, targets in parts["fields"].items()
        }
    # Without the groups of the type that it is like, what those read is not known to be computed.
    derive = parts.pop("derive", None)
    if derive is not None or "groups" in parts:
        parts["computes_defaults"] = False
    if derive is not None:  # in the place of what the type that it is like reads together
        parts["groups"] = [*parts.get("groups", ()), DerivedFields(derive)]

    if base is not None:
        for name, value in parts.items():
            base_part = getattr(base, name)
            if isinstance(base_part, Mapping):
                parts[name] = {**base_part, **value}
            elif name in ("harmless", "buffers"):
                parts[name] = (*base_part, *value)
    family = Family(**parts) if base is None else dataclasses.replace(base, **parts)
    FAMILIES[model_type] = family

    # Pairs have an encoder of this type.
    for name, pair in FAMILIES.items():
        if isinstance(pair, DualFamily):
            FAMILIES[name] = pair.with_tower(model_type, family)


def find_family(model_type: Any, where: str) -> Family:
    """Returns the family of a type of models, or raises."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise PretrainedError(
        f"{where} has model_type={brief(model_type)}, but known are {', '.join(sorted(FAMILIES))}."
    )


def family_of(content: Mapping[str, Any], where: str) -> Family:
    """Returns the family of a ``config.json``, or raises with advice."""
    kind, names = content.get("model_type"), content.get("architectures")
    try:
        return find_family(kind, where)
    except PretrainedError as error:
        if not isinstance(kind, str):
            raise
        like = next(iter(difflib.get_close_matches(kind, FAMILIES, 1, 0.0)), "llama")
        parts = {name: {} for name in names} if isinstance(names, list) else {}
        raise PretrainedError(
            f"{error} If its layers and tensors are those of a known type, say of which, such as "
            f"sx.models.register({kind!r}, like={like!r}, architectures={parts!r}); if they "
            f"differ, docs/pretrained.md says how to describe them."
        ) from None
