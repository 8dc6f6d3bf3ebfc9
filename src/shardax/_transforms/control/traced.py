# SPDX-License-Identifier: Apache-2.0
"""``TracedFunction``: a body, branch or condition that JAX traces once, for its types and to run.

A loop must know what its body writes before it runs, and a choice what its branches write. So a
function of the user's is traced for its types first (``TracedFunction.types``). It is one
``jax.jit``, so JAX keeps that trace: where the loop calls it (``__call__``), the user's code does
not run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardax._core._jax import INLINE
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.variable import Variable
from shardax._transforms.control.forms import abstract_eval
from shardax._transforms.lift.engine import LiftedCall, RetraceRequest, RunContext


class TracedFunction:
    """A function of the user's, as a function of the values of Variables and of plain leaves.

    Args:
        call: The lifted call.
        leave: Returns what leaves a run.
        otherwise: What leaves a run that wrote captured Variables; ``types`` then asks for these as
            inputs. None: ``leave`` looks at them itself.
        which: Which of the functions of the call it is.

    Attributes:
        graphdef: The structure that it runs on, if it is another than that of the call.
        static: Plain leaves that do not enter the program, by position.
    """

    def __init__(
        self,
        call: LiftedCall,
        leave: Callable[[RunContext], PyTree],
        otherwise: PyTree = None,
        which: int = 0,
    ) -> None:
        self.call = call
        self.leave = leave
        self.otherwise = otherwise
        self.which = which
        self.graphdef: GraphDef | None = None
        self.static: dict[int, object] = {}

        _, self._plain_tree = call.arguments.plain_leaves()
        self._captured: list[Variable] = []
        # Inlined, because the program of a loop is then smaller and quicker to differentiate.
        self._compiled = jax.jit(call.program(self._run, "leaves", which), inline=INLINE)

    def __call__(self, values: list[PyTree], plain: list[Leaf]) -> Any:
        """Returns what leaves a run."""
        return self._compiled(values, plain)

    def types(self, values: list[PyTree], plain: list[Leaf]) -> Any:
        """Returns the types of what leaves; raises ``RetraceRequest`` for captured Variables."""
        types = abstract_eval(self._compiled, values, plain)
        # Raised here and not in the trace: an exception that passes through a trace of JAX 0.10
        # leaves the trace and its constants in memory for good.
        if self._captured:
            raise RetraceRequest(self._captured)
        return types

    def _run(self, values: list[PyTree], plain: list[Leaf]) -> PyTree:
        plain = [self.static.get(index, leaf) for index, leaf in enumerate(plain)]
        positional, named = self._plain_tree.unflatten(plain)
        return self.call.run(
            values, positional, named, self._leave, which=self.which, graphdef=self.graphdef
        )

    def _leave(self, context: RunContext) -> PyTree:
        if self.otherwise is not None:
            self._captured = [item.outer for item in context.captured()]
            if self._captured:
                return self.otherwise
        return self.leave(context)
