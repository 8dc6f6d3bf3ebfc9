# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a published model, as ``transformers`` reads it.

``tokenizer.json`` says how a text becomes tokens. It also holds how the last call before it was
saved cut and padded texts, which ``transformers`` sets anew in each call, and so is not followed.
The other files of a tokenizer may name tokens besides, which ``transformers`` adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardax.extend import needs_package
from shardax.models.files import check_no_pointer, read_json
from shardax.models.kinds import PretrainedError, brief
from shardax.models.weights.hub import TOKENIZER_FILES, find_directory

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

SETTINGS, OLDER_SETTINGS = "tokenizer_config.json", "special_tokens_map.json"
# In the order in which transformers adds them, others by the order of the file behind them.
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Lists of further tokens, by the names of today and before.
_LISTED = ("extra_special_tokens", "additional_special_tokens")
_NUMBERED = "added_tokens_decoder"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(directory: str | Path) -> Any:
    """Loads the tokenizer of a published model.

    A text is read as by ``transformers.AutoTokenizer``: whole, and without padding, whatever
    truncation and padding ``tokenizer.json`` was saved with. These are set for calls:
    ``enable_truncation(512)``, ``enable_padding()``. Tokens that ``tokenizer_config.json`` names
    beside those of ``tokenizer.json`` are added.

    Args:
        directory: As for ``from_pretrained``.

    Returns:
        A ``tokenizers.Tokenizer``: ``encode(text).ids``, ``decode(ids)``.

    Raises:
        PretrainedError: If there is no ``tokenizer.json``, one of its files is damaged, or a token
            is not where ``tokenizer_config.json`` says.
        ImportError: If ``tokenizers`` is missing.

    Example:
        >>> import json, pathlib, tempfile, shardax as sx
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> model = {"type": "WordLevel", "vocab": {"hi": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
        >>> _ = (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
        >>> sx.models.load_tokenizer(folder).encode("hi").ids
        [0]
    """
    with needs_package("A tokenizer", "shardax[hub]"):
        from tokenizers import Tokenizer
    folder = find_directory(directory, TOKENIZER_FILES)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise PretrainedError(f"{file} is not there; the model has no tokenizer of that kind.")
    check_no_pointer(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower class
        raise PretrainedError(
            f"{file} is damaged: {brief(str(error))}. Download or save it again."
        ) from error

    # Both are settings of a call, which a file keeps from the last one before it was saved.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    if _NUMBERED not in settings and (folder / OLDER_SETTINGS).is_file():
        settings |= read_json(folder / OLDER_SETTINGS)
    _add_tokens(tokenizer, settings, folder)
    if settings.get("split_special_tokens") is True:
        tokenizer.encode_special_tokens = True
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], folder: Path) -> None:
    """Adds tokens that settings name and a tokenizer lacks, or raises."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}

    # Those with numbers come first, in order, as the numbers follow from the order.
    numbered = settings.get(_NUMBERED) or {}
    try:
        numbers = {int(text): _as_token(value) for text, value in dict(numbered).items()}
    except (KeyError, ValueError, TypeError) as error:
        raise PretrainedError(
            f"{_NUMBERED} in {folder / SETTINGS} is no table of tokens by their numbers. Download "
            f"or save the tokenizer again."
        ) from error
    for number, token in sorted(numbers.items()):
        if not _is_same(known.get(token.content), token):
            tokenizer.add_tokens([token])
        known[token.content] = token
        found = tokenizer.token_to_id(token.content)
        if found != number:
            raise PretrainedError(
                f"{folder / SETTINGS} gives the token {token.content!r} the number {number}, but "
                f"by tokenizer.json, which does not have it there, it is {found}. Correct "
                f"{_NUMBERED}, or save the tokenizer that the model was trained with again: "
                f"tokenizer.save_pretrained({str(folder)!r})."
            )

    for value in _named_tokens(settings):
        content = value if isinstance(value, str) else value.get("content")
        if isinstance(content, str) and content not in known:
            token = _as_token(value if isinstance(value, dict) else {"content": value}, True)
            tokenizer.add_tokens([token])
            known[content] = token


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[str | dict[str, Any]]:
    """Yields tokens that have a name or stand in a list of further ones."""
    others = [name for name in settings if name.endswith("_token") and name not in _NAMED]
    values = [settings.get(name) for name in (*_NAMED, *others)]

    listed = next((settings[name] for name in _LISTED if settings.get(name)), [])
    if isinstance(listed, dict):
        values += listed.values()
    elif isinstance(listed, list):
        values += listed

    for value in values:
        if isinstance(value, (str, dict)):
            yield value


def _as_token(value: object, special: bool | None = None) -> AddedToken:
    """Returns a token of a table of its content and flags, or raises a TypeError."""
    from tokenizers import AddedToken

    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no table.")
    flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    flags |= {} if special is None else {"special": special}
    return AddedToken(value["content"], **flags)


def _is_same(known: AddedToken | None, token: AddedToken) -> bool:
    return known is not None and all(getattr(known, f) == getattr(token, f) for f in _FLAGS)
