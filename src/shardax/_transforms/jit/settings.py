# SPDX-License-Identifier: Apache-2.0
"""What a trace writes into settings objects, which are part of what a specialization is found by.

A settings object is an instance of a user's class that a function reads as configuration
(``_core.graph.settings``). A function may write into one while it is traced. The next call then
finds other settings than the one that was traced for, and would trace again, for ever. So what the
trace itself wrote is noted, and the specialization is found by that as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardax._core.errors import ModuleError
from shardax._core.graph.paths import PyTree
from shardax._core.graph.settings import Setting, note_trace, settings_among
from shardax._transforms.jit.calls import CachedCall
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.input_graph import InputGraph

if TYPE_CHECKING:
    from shardax._transforms.jit.jit import Jit


def note_settings(
    jit: Jit,
    call: CachedCall,
    graph: InputGraph,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> None:
    """Finds the specialization of a call, from now on, by what its trace wrote into settings.

    Args:
        jit: The compiled function.
        call: The call, which was just made.
        graph: Its objects, flattened before that.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    specialization = call.specialization
    before = _settings_read(graph, specialization.key)
    if not before:
        return

    with contextlib.suppress(ModuleError, TypeError):  # the next call says what is wrong
        described = jit.describe(args, kwargs)
        after = _settings_read(described.graph, described.key)
        for old, new in zip(before, after, strict=False):
            if old.key.content != new.key.content:
                return  # another value, for which the next call traces
            note_trace(old.key, new.key)

        # Once more, with the notes.
        described = jit.describe(args, kwargs)
        known = jit.specializations.setdefault(described.key, specialization)
        if known is specialization:
            specialization.graphdef_after = described.graph.flat.graphdef
            call.settings = described.graph.flat.settings


def _settings_read(graph: InputGraph, key: tuple[Any, ...]) -> list[Setting]:
    """Returns the settings objects that a call was given, by the key of its specialization."""
    _, _, templates, named, static, _ = key[:6]
    statics = [item for _, item in static]
    for template in (*templates, *(template for _, template in named)):
        if isinstance(template, inputs.TreeTemplate):
            statics += [leaf for _, leaf in template.static]
    return [*graph.flat.settings, *settings_among(statics)]
