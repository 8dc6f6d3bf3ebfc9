# SPDX-License-Identifier: Apache-2.0
"""What a model says of its texts: the tokens that begin and end them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.models.generating import errors
from shardax.models.generating.errors import GenerationError
from shardax.models.kinds import brief

GENERATION_CONFIG = "generation_config.json"
# By field here, the field of ``generation_config.json``, and of ``config.json`` in older files.
_NAMES = {
    "stop": "eos_token_id",
    "pad": "pad_token_id",
    "start": "decoder_start_token_id",
    "forced_start": "forced_bos_token_id",
    "forced_end": "forced_eos_token_id",
}


@dataclass(frozen=True)
class GenerationConfig:
    """The tokens that begin and end the texts of a model.

    ``from_pretrained`` reads it from ``generation_config.json``, or else from ``config.json``, and
    ``save_pretrained`` writes it. A model has it as ``model.generation_config``, where ``generate``
    finds what is not given to it. Other settings of the file, such as a temperature, are kept in
    ``source`` and not applied.

    Args:
        stop: Tokens after which a text ends (``eos_token_id``). A list, a single token, and None
            for none are made a tuple.
        pad: The token of padding (``pad_token_id``).
        start: What a text of an ``EncoderDecoder`` begins with (``decoder_start_token_id``), if its
            config does not say so.
        forced_start: The token behind that (``forced_bos_token_id``), such as a language's.
        forced_end: The last token of a text that reached its full length
            (``forced_eos_token_id``).
        source: The text of the ``generation_config.json`` that it was read from.

    Raises:
        GenerationError: If a token is no integer from 0 up, or too large for int32.

    Example:
        >>> import shardax as sx
        >>> model = sx.models.Decoder(sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0))
        >>> model.generation_config = sx.models.GenerationConfig(stop=(10,))
        >>> (text,) = sx.models.generate(model, [[1, 2]], max_new_tokens=4, seed=0)
        >>> 10 in text[2:-1]
        False
    """

    stop: tuple[int, ...] = ()
    pad: int | None = None
    start: int | None = None
    forced_start: int | None = None
    forced_end: int | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        # A tuple, because a model has its config as a static attribute.
        object.__setattr__(self, "stop", _as_tokens(self.stop))

        tokens = [self.pad, self.start, self.forced_start, self.forced_end]
        for token in (*self.stop, *(token for token in tokens if token is not None)):
            if type(token) is not int or not 0 <= token < 2**31:
                raise errors.no_token(token)


def _as_tokens(stop: object) -> tuple[int, ...]:
    """Returns stop tokens as a tuple.

    Raises:
        GenerationError: If they are neither a token nor a list of them.
    """
    if stop is None:
        return ()
    if isinstance(stop, (list, tuple)):
        return tuple(stop)
    if type(stop) is not int:
        raise errors.no_token(stop)
    return (stop,)


def config_of_texts(model: object) -> GenerationConfig | None:
    """Returns the ``generation_config`` of a model; None where it has none.

    Raises:
        GenerationError: If it is something else, such as a dict.
    """
    config = getattr(model, "generation_config", None)
    if config is not None and not isinstance(config, GenerationConfig):
        raise errors.no_generation_config(config)
    return config


def read_generation_config(
    content: Mapping[str, Any], source: str | None = None
) -> GenerationConfig | None:
    """Returns what a ``generation_config.json`` or a ``config.json`` says of texts.

    Args:
        content: The fields of the file.
        source: The text of the file, if it is a ``generation_config.json``.

    Returns:
        A ``GenerationConfig``; None if it says nothing.

    Raises:
        GenerationError: If a token is none.
    """
    found: dict[str, Any] = {}
    for field, name in _NAMES.items():
        value = content.get(name)
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [token for token in tokens if type(token) is not int]
        if wrong:
            raise GenerationError(f"{name}={brief(value)} is no token, nor a list of tokens.")

        # -1 stands for none in some files.
        tokens = [token for token in tokens if token >= 0]
        if field == "stop":
            found[field] = tuple(tokens)
        elif tokens:
            # Of several that are forced together the first is as good as another.
            found[field] = tokens[0]
    # A file whose fields are all null is that of a model without a config of texts.
    is_silent = source is None or all(value is None for value in content.values())
    if is_silent and found == {"stop": ()}:
        return None
    return GenerationConfig(**found, source=source)


def generation_content(
    config: GenerationConfig | None, content: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the ``generation_config.json`` of a model.

    Args:
        config: What the model says of its texts.
        content: The ``config.json`` that is written beside it.

    Returns:
        The fields of the file; None if there is nothing that ``config.json`` does not say.
    """
    if config is None:
        # Without a file, what ``config.json`` says would be read instead.
        said = read_generation_config(content)
        return None if said is None else dict.fromkeys([_NAMES["stop"], _NAMES["pad"]])
    if config.source is None and _tokens_of(config) == _tokens_of(read_generation_config(content)):
        return None

    fields = {} if config.source is None else json.loads(config.source)
    before = read_generation_config(fields, config.source)
    for field, name in _NAMES.items():
        value = getattr(config, field)
        if before is not None and value == getattr(before, field):
            continue
        if field == "stop":
            value = list(value) if len(value) > 1 else value[0] if value else None
        if value is not None or name in fields:
            fields[name] = value
    return fields


def _tokens_of(config: GenerationConfig | None) -> Sequence[object]:
    return [getattr(config or GenerationConfig(), field) for field in _NAMES]
