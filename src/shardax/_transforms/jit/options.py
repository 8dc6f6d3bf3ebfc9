# SPDX-License-Identifier: Apache-2.0
"""The options of ``jit``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from shardax._core.errors import DonationError
from shardax._core.graph.paths import Path, PyTree
from shardax._core.graph.static import exact_key
from shardax._transforms import errors
from shardax._transforms.errors import StaticArgumentError
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.filter_mappings import check_shardings_only
from shardax._transforms.lift.signatures import as_tuple, resolve_arguments


@dataclasses.dataclass(frozen=True)
class JitOptions:
    """Options of ``jit``, named as those of ``jax.jit``."""

    in_shardings: PyTree = None
    out_shardings: PyTree = None
    static_argnums: int | Sequence[int] | None = None
    static_argnames: str | Sequence[str] | None = None
    static: str | None = None
    donate_argnums: int | Sequence[int] | None = None
    donate_argnames: str | Sequence[str] | None = None
    keep_unused: bool = False
    inline: bool = False
    compiler_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        inputs.check_static_option(self.static)
        check_compiler_options(self.compiler_options)

        if self.in_shardings is not None:
            check_shardings_only(self.in_shardings, "in_shardings")
        if self.out_shardings is not None:
            check_shardings_only(self.out_shardings, "out_shardings")

    @property
    def auto_static(self) -> bool:
        """Whether leaves that are neither arrays nor objects are static."""
        return self.static is not None

    @property
    def static_numbers(self) -> bool:
        """Whether Python's numbers are static, too."""
        return self.static == inputs.NUMBERS

    @property
    def static_types(self) -> frozenset[type]:
        """Types that are static although JAX takes them."""
        if not self.auto_static:
            return frozenset()
        return frozenset({bool, *inputs.NUMBER_TYPES}) if self.static_numbers else frozenset({bool})

    @property
    def declares_shardings(self) -> bool:
        """Whether shardings of arguments or of the result are declared."""
        return self.in_shardings is not None or self.out_shardings is not None

    def key(self) -> Hashable:
        """Returns what the options compare by: their values if hashable, else themselves."""
        try:
            return exact_key(self)
        except TypeError:
            return object()

    def split_arguments(
        self,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        label: Callable[[int | str], Path],
    ) -> inputs.SplitArguments:
        """Returns the arguments of a call, without static ones, as ``SplitArguments``."""
        return inputs.SplitArguments(
            args, kwargs, self.auto_static, static_numbers=self.static_numbers, label=label
        )

    def donates(self, position: int, name: str) -> bool:
        """Whether the positional argument (by position or parameter name) is donated."""
        return position in as_tuple(self.donate_argnums) or self.donates_name(name)

    def donates_name(self, name: str) -> bool:
        """Whether the keyword argument is donated."""
        return name in as_tuple(self.donate_argnames)


def check_compiler_options(options: object) -> None:
    """Raises unless compiler options are a mapping."""
    if options is not None and not isinstance(options, Mapping):
        raise errors.compiler_options_not_named(options)


def with_resolved_donation(options: JitOptions, function: Callable[..., PyTree]) -> JitOptions:
    """Returns the options with donated arguments both by position and by name."""
    donated, donated_names = resolve_arguments(
        function, options.donate_argnums, options.donate_argnames, "donate", DonationError
    )
    static, static_names = resolve_arguments(
        function, options.static_argnums, options.static_argnames, "static", StaticArgumentError
    )

    both_names = {*donated_names} & {*static_names}
    both_positions = {*donated} & {*static}
    if both_names or both_positions:
        raise errors.static_and_donated(sorted(both_names) or sorted(both_positions))

    return dataclasses.replace(options, donate_argnums=donated, donate_argnames=donated_names)
