# SPDX-License-Identifier: Apache-2.0
"""Types of functions."""

from __future__ import annotations

from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class NamedFunction(Protocol[P, R_co]):
    """A callable with a name, as functions have it and partials have not."""

    __name__: str
    __qualname__: str

    def __hash__(self) -> int: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
