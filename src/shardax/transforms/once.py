# SPDX-License-Identifier: Apache-2.0
"""Lifted calls that run once: what ``grad``, ``eval_shape`` and the like share.

The user's function is run one time per call, so what it did can be kept in this object instead of
leaving the transform. Variables that the function uses without being given them are read as they
are in the calling frame; written values leave beside the result and are stored back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardax.core.frames import Adopted, Frame
from shardax.transforms.closures import parameter_name
from shardax.transforms.lift import (
    Arguments,
    Carried,
    Graph,
    Record,
    bind,
    carry_in,
    carry_out,
    check_no_leak,
    same_value,
)
from shardax.transforms.naming import root_names


class Once:
    """One lifted call.

    Args:
        name: The transform's name, for messages.
        function: The user's function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        make_frame: Makes the frame; by default an ordinary one.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        make_frame: Callable[[str], Frame] = Frame,
    ) -> None:
        self.name = name
        self.make_frame = make_frame
        self.arguments = Arguments(args, kwargs)
        labels = [parameter_name(function, i) for i in range(len(self.arguments.templates))]
        self.graph = Graph(
            [function, *self.arguments.roots],
            [(), *root_names(labels, self.arguments)],
        )
        self._record: Record | None = None
        self._adopted: list[Adopted] = []

    def run(
        self,
        values: Sequence[Any],
        plain: Sequence[Any],
        plain_named: Mapping[str, Any],
        split: Callable[[Any], tuple[Any, Any]],
    ) -> tuple[Any, tuple[Any, ...]]:
        """Runs the user's function inside the transform.

        Args:
            values: One value per Variable of the graph.
            plain: Plain parts of the positional arguments.
            plain_named: Plain parts of the keyword arguments.
            split: Separates the function's result into a part that the transform itself needs
                (arrays only) and the rest, which may hold objects.

        Returns:
            (the transform's part, what else must leave the transform: a tuple of pytrees of
            arrays).
        """
        graphdef = self.graph.flat.graphdef
        with self.make_frame(self.name) as frame:
            roots, copies = bind(frame, graphdef, values, self.graph.objects(), self.graph.leaves)
            args, kwargs = self.arguments.restore(plain, plain_named, roots[1:])
            head, rest = split(roots[0](*args, **kwargs))
            carried = carry_out(frame, graphdef, copies, values, rest)
            self._record = carried.record
            self._adopted = [
                item for item in frame.adopted if not same_value(item.value, item.stand_in._value)
            ]
            captured = [item.stand_in.value for item in self._adopted]
        return head, (carried.result, carried.written, carried.fresh, captured)

    def finish(self, leaving: tuple[Any, ...], keep_captured: bool = False) -> Any:
        """Stores what was written and returns the result, with objects in place.

        Args:
            leaving: The second part of what ``run`` returned, as it came out of the transform.
            keep_captured: Whether Variables that were not passed in keep their values.
        """
        assert self._record is not None
        result, written, fresh, captured = leaving
        carried = Carried(result, written, fresh, self._record)
        check_no_leak(self.graph, carried)
        for item, value in zip(self._adopted, captured, strict=True):
            if not keep_captured:
                item.outer._write(value)
        return carry_in(self.graph, carried)
