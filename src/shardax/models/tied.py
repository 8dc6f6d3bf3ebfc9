# SPDX-License-Identifier: Apache-2.0
"""Tensors of files that are one tensor of the model, under several names.

A head that is the embedding has a name of its own in files, and so have the embeddings of the two
halves of an encoder-decoder. Some files hold all of the names, most the one that is read, and those
of ``safetensors.torch.save_model`` the first by the alphabet, with the others in their metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from shardax.models.family import Family
from shardax.models.files import TensorFiles
from shardax.models.kinds import PretrainedError

_HEADS = ("head.kernel", "decoder.head.kernel")
_TIED_PLACES = (("embed.embedding", "head.kernel"), ("head_bias", "head.bias"))


def has_tied_head(
    family: Family, content: Mapping[str, Any], where: str, tensor_count: int
) -> bool:
    """Whether a ``config.json`` says that the head of tokens is the embedding."""
    try:
        config = family.config(content, where, tensor_count)
    except PretrainedError:  # such as of a class that is not read, whose layers alone are
        return False
    output = getattr(getattr(config, "decoder", config), "output", None)
    return config.head == "tokens" and output is not None and output.tied


class TiedNames:
    """Which tensors of files are read under other names.

    Making it lets files be read by the names that the model has.

    Args:
        family: The family, with its tensors and copies.
        config: The config of the model.
        files: The tensors of the folder.
        own: Names of the tensors that the model reads.
        prefix: What the names in the files do without.
        tied_head: Whether the head of tokens is the embedding, also where no head is read.

    Attributes:
        used: Names in the files that need no place of their own.
        differing: Names of one tensor under which the files hold different numbers.
    """

    def __init__(
        self,
        family: Family,
        config: Any,
        files: TensorFiles,
        *,
        own: Iterable[str],
        prefix: str,
        tied_head: bool,
    ) -> None:
        self.used: set[str] = set()
        self.differing: list[tuple[str, ...]] = []
        own = {*own}
        for names in _tied_groups(family, config, own, tied_head):
            self._read(files, [name.removeprefix(prefix) for name in names])

        # The others are those that the program that wrote a file found to be one.
        for name in own:
            kept = files.kept_as.get(name)
            if name not in files.names and kept is not None:
                files.repeat(kept, name)
                self.used.add(kept)

    def _read(self, files: TensorFiles, names: Sequence[str]) -> None:
        """Lets a tensor be read by the first of its names."""
        present = [name for name in names if name in files.names]
        others = [name for name in present[1:] if not files.equal(present[0], name)]
        self.used |= {*present} - {*others}
        if others:
            self.differing.append((present[0], *others))
        if present and names[0] not in files.names:
            files.repeat(present[0], names[0])


def _tied_groups(
    family: Family, config: Any, own: Set[str], tied_head: bool
) -> Iterator[list[str]]:
    """Yields the names of each tensor that has several, first that which is read."""
    tensors = (*family.tensors_for(config), *family.head_tensors.get("tokens", ()))
    by_place = {tensor.to: tensor.name for tensor in tensors}
    if tied_head:
        for places in _TIED_PLACES:
            if all(place in by_place for place in places):
                yield [by_place[place] for place in places]

    # A head that is another parameter is no copy, also where it is not read.
    heads = {by_place[place] for place in _HEADS if place in by_place}
    apart = own if tied_head else own | heads
    groups: dict[str, list[str]] = {}
    for copy, name in family.copies.items():
        if copy not in apart:
            groups.setdefault(name, [name]).append(copy)
    yield from groups.values()
