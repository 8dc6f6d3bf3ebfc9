# SPDX-License-Identifier: Apache-2.0
"""The folder of a published model, on this machine or downloaded from the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from shardax.extend import needs_package
from shardax.models.files import INDEX, SINGLE
from shardax.models.generating.config import GENERATION_CONFIG
from shardax.models.kinds import PretrainedError

CONFIG = "config.json"

# What is fetched of a hub's model: its weights are often there in other formats too.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template*"),
    *(GENERATION_CONFIG, "vocab.json", "merges.txt", CONFIG),
)
MODEL_FILES = (*TOKENIZER_FILES, SINGLE, INDEX, "model-*.safetensors")


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
    """Returns the first line of an error's text."""
    return str(error).strip().partition("\n")[0]
