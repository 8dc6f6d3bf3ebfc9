# SPDX-License-Identifier: Apache-2.0
"""Programs that are run with Flax and translated, and what they print."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from typing import NamedTuple

from tests.interop.migrate.translation import Translation, translate


class Outcome(NamedTuple):
    """What a program printed with Flax and here, and its translation."""

    theirs: str
    ours: str
    result: Translation

    @property
    def left(self) -> list[int]:
        """Lines that the report leaves."""
        return [note.line for note in self.result.notes if note.kind == "left"]


def run_both_ways(text: str) -> Outcome:
    """Runs a program and its translation in this process."""
    result = translate(text)
    return Outcome(printed_by(text), printed_by(result.text), result)


def printed_by(text: str) -> str:
    """What a program prints; of one that ends by ``SystemExit``, what that says."""
    module = types.ModuleType("program_of_a_test")
    output = io.StringIO()
    sys.modules[module.__name__] = module
    # What a program sets on the library is not for the other tests.
    from flax import nnx

    names = dict(vars(nnx))
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(text, "program", "exec", dont_inherit=True), vars(module))
    except SystemExit as error:
        output.write(str(error))
    finally:
        nnx.__dict__.update(names)
        del sys.modules[module.__name__]
    return output.getvalue()
