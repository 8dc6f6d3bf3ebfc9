# SPDX-License-Identifier: Apache-2.0
"""Equations of linear maps, such as ``"...te,ehd->...thd"``.

An equation names the dimensions of the input, of the kernel and of the result by letters. The
kernel's letters that the result lacks are summed over; those that only the kernel has are made by
it; those that input, kernel and result have are batch dimensions, along which the kernel is many
kernels. An ellipsis, anywhere in an operand, stands for further dimensions.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Self

import jax

from shardax.nn.errors import LayerConfigError

_TERM = r"[A-Za-z]*(?:\.\.\.)?[A-Za-z]*"
_FORM = re.compile(f"({_TERM}),({_TERM})->({_TERM})")


@dataclass(frozen=True)
class Equation:
    """Letters of an input and a kernel, and of their result."""

    input: str
    kernel: str
    output: str
    ellipsis: bool  # whether input and result have further dimensions
    input_place: int = 0  # how many letters of the input are before these
    output_place: int = 0
    shared: str = ""  # letters for the kernel's ellipsis that the input has too

    @classmethod
    def parse(cls, text: str, kernel_rank: int | None = None) -> Self:
        """Reads an equation, or raises ``LayerConfigError``."""
        # An ellipsis of the kernel becomes letters, as the rank of a kernel is known; those letters
        # are the last dimensions of the other ellipses, as in NumPy.
        match = _FORM.fullmatch(text.replace(" ", ""))
        first, second, output = match.groups() if match else ("", "", "")
        has_ellipsis = "..." in first or "..." in second
        if not first or not second or has_ellipsis != ("..." in output):
            raise LayerConfigError(
                f"Einsum cannot read the equation {text!r}. Write the letters of input, kernel and "
                f"result, with an ellipsis in the result if there is one in an operand: "
                f"'...te,ehd->...thd'."
            )

        letters = [term.replace("...", "") for term in (first, second, output)]
        for term in letters:
            if len(set(term)) < len(term):
                raise LayerConfigError(
                    f"Einsum({text!r}) has a letter twice in {term!r}; give each dimension of "
                    f"one array a letter of its own."
                )
        unknown = set(letters[2]) - set(letters[0] + letters[1])
        if unknown:
            raise LayerConfigError(
                f"Einsum({text!r}) has {sorted(unknown)} in the result but in neither operand."
            )

        shared = ""
        if "..." in second and kernel_rank is not None:
            unused = [x for x in reversed(string.ascii_letters) if x not in "".join(letters)]
            shared = "".join(unused[: max(kernel_rank - len(letters[1]), 0)])
            first = first.replace("...", f"...{shared}")
            second = second.replace("...", shared)
            output = output.replace("...", f"...{shared}" if "..." in first else shared)

        inputs, kernel, outputs = (term.replace("...", "") for term in (first, second, output))
        before, start = (max(term.find("..."), 0) for term in (first, output))
        shared = shared if "..." in first else ""
        return cls(inputs, kernel, outputs, "..." in first, before, start, shared)

    @property
    def made(self) -> str:
        """Letters of the result from the kernel alone."""
        return "".join(x for x in self.output if x in self.kernel and x not in self.input)

    def kernel_dimensions(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Returns the kernel's summed, new, and batch dimensions."""
        letters = tuple(enumerate(self.kernel))
        batch = tuple(i for i, x in letters if x in self.output and x in self.input)
        new_dims = tuple(i for i, x in letters if x in self.made)
        return tuple(i for i, x in letters if x not in self.output), new_dims, batch

    def expanded(self, x: jax.Array) -> jax.Array:
        """Adds dimensions of size 1 where the kernel's ellipsis has more."""
        missing = len(self.input) - x.ndim
        if not 0 < missing <= len(self.shared):
            return x
        return jax.lax.expand_dims(x, range(self.input_place, self.input_place + missing))

    def spelled_out(self, extra: int) -> str:
        """Returns the equation with letters in place of the ellipsis."""
        unused = [x for x in string.ascii_letters if x not in self.input + self.kernel]
        return self._with("".join(unused[:extra]))

    def _with(self, further: str) -> str:
        before, after = self.input[: self.input_place], self.input[self.input_place :]
        start, end = self.output[: self.output_place], self.output[self.output_place :]
        return f"{before}{further}{after},{self.kernel}->{start}{further}{end}"

    def __str__(self) -> str:
        return self._with("..." if self.ellipsis else "")
