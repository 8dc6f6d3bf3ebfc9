# SPDX-License-Identifier: Apache-2.0
"""Lifted calls that run once: what ``grad``, ``remat``, ``eval_shape`` and the like share.

The user's function is run one time per call, so what it did can be kept in this object instead of
leaving the transform. Variables that the function uses without being given them are read as they
are in the calling frame; written values leave beside the result and are stored back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from shardax.core import epoch
from shardax.core.frames import Adopted, Frame
from shardax.transforms.arguments import Arguments
from shardax.transforms.call import Call, Inside
from shardax.transforms.lift import Carried, Graph, Record, carry_in, check_no_leak


class Once:
    """One lifted call.

    Args:
        name: The transform's name, for messages.
        function: The user's function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        make_frame: Makes the frame; by default an ordinary one.
        static: Positions and names of arguments that are passed on as they are.
        auto_static: Whether leaves that are neither arrays nor objects are passed on so.
        static_numbers: Whether Python's numbers are, too.

    Attributes:
        call: The call.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        make_frame: Callable[[str], Frame] = Frame,
        static: Container[int | str] = (),
        auto_static: bool = False,
        static_numbers: bool = False,
    ) -> None:
        self.call = Call(
            name,
            [function],
            args,
            kwargs,
            make_frame,
            static=static,
            auto_static=auto_static,
            static_numbers=static_numbers,
        )
        self._record: Record | None = None
        self._adopted: list[Adopted] = []

    @property
    def arguments(self) -> Arguments:
        """The arguments taken apart."""
        return self.call.arguments

    @property
    def graph(self) -> Graph:
        """The function and the objects in the arguments, flattened together."""
        return self.call.graph

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

        def leave(inside: Inside) -> tuple[Any, tuple[Any, ...]]:
            head, rest = split(inside.result)
            carried = inside.carry_out(rest)
            self._record = carried.record
            self._adopted = inside.captured()
            captured = [item.stand_in.value for item in self._adopted]
            return head, (carried.result, carried.written, carried.fresh, captured)

        return self.call.run(values, plain, plain_named, leave)

    def finish(self, leaving: tuple[Any, ...]) -> Any:
        """Stores what was written and returns the result, with objects in place.

        Args:
            leaving: The second part of what ``run`` returned, as it came out of the transform.
        """
        carried = self._carried(leaving)
        check_no_leak(self.graph, carried)
        for item, value in zip(self._adopted, leaving[3], strict=True):
            item.outer._write(value)
            if item.outer._metadata != item.stand_in._metadata:
                item.outer._metadata = item.stand_in._metadata
                epoch.advance()
        return carry_in(self.graph, carried)

    def finish_on(self, graph: Graph, leaving: tuple[Any, ...]) -> Any:
        """Returns the result with the objects of a copy in place of the caller's.

        Args:
            graph: A copy of the call's graph; what was written is stored there.
            leaving: As for ``finish``.
        """
        return carry_in(graph, self._carried(leaving))

    def _carried(self, leaving: tuple[Any, ...]) -> Carried:
        assert self._record is not None
        result, written, fresh, _ = leaving
        return Carried(result, written, fresh, self._record)
