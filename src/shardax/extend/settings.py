# SPDX-License-Identifier: Apache-2.0
"""Settings of the scope: the kernels and forms of parallelism that a layer looks up.

``sx.kernels``, ``sx.parallel`` and ``sx.axis_rules`` set them. They are part of the key of JAX's
own caches: a program that was traced under other settings is traced anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Hashable, Iterable
from typing import Any, NamedTuple

import jax

from shardax.partition import context, tree_layout


class ScopeSettings(NamedTuple):
    """The settings of a scope, besides its rules.

    Attributes:
        attention: The kernel of attention, or None.
        experts: The kernel of the products with experts, or None.
        loss: The kernel of losses, or None.
        gated: The kernel of gated units, or None.
        norms: The kernel of norms, or None.
        interpret: Whether Pallas's kernels are interpreted.
        microbatches: In how many parts stacks run a batch, or None.
        schedule: The schedule of pipelines.
        context: How attention reads a sequence that is split by position.
        reference: Whether all layers compute by XLA's operations, whatever kernels are asked for.

    Example:
        >>> import shardax as sx
        >>> from shardax import extend
        >>> with sx.parallel(microbatches=4), sx.kernels(attention="auto"):
        ...     settings = extend.ScopeSettings.current()
        >>> settings.microbatches, settings.kernel("attention"), settings.kernel("norms")
        (4, 'auto', None)
        >>> with sx.parallel(microbatches=4), extend.ScopeSettings.scope(microbatches=None):
        ...     extend.ScopeSettings.current().microbatches is None
        True
        >>> extend.ScopeSettings.choices("norms"), extend.ScopeSettings.choices("schedule")
        (('auto', 'xla', 'tokamax'), ('gpipe', 'circular'))
    """

    attention: str | None
    experts: str | None
    loss: str | None
    gated: str | None
    norms: str | None
    interpret: bool
    microbatches: int | None
    schedule: str
    context: str
    reference: bool

    @classmethod
    def current(cls) -> ScopeSettings:
        """Returns the settings of this thread's innermost scopes, or their defaults."""
        kernels = {kind: context.current_kernel(kind) for kind in _KERNELS}
        return cls(
            **kernels,
            interpret=context.is_interpreting_kernels(),
            microbatches=context.current_microbatches(),
            schedule=context.current_schedule(),
            context=context.current_context(),
            reference=context.is_tracing_reference(),
        )

    @staticmethod
    def choices(name: str) -> tuple[str, ...]:
        """Returns the values that a setting can have.

        Args:
            name: The name of a kernel (see ``sx.kernels``), or ``"schedule"``.

        Raises:
            KeyError: If there is no such setting.
        """
        choices: dict[str, tuple[str, ...]] = dict.fromkeys(_KERNELS, context.LAYER_KERNELS)
        choices["attention"] = context.ATTENTION_KERNELS
        choices["schedule"] = context.SCHEDULES
        return choices[name]

    @staticmethod
    @contextlib.contextmanager
    def scope(*, told_names: set[Hashable] | None = None, **changes: Any) -> Generator[None]:
        """Returns a scope with other settings, in which nothing is checked.

        ``sx.kernels`` and ``sx.parallel`` are for users: they check values. This one is for code
        that hands settings on, or takes them away.

        Args:
            told_names: Where warnings of misspelt names are noted: each is given once for the set,
                and not at every call in the scope. None: as around the scope.
            **changes: Fields of ``ScopeSettings``; and ``rules`` (``RulesLike``) with ``marking``,
                whether constraints mark arrays by their names (``AxisNameMarks``) instead of
                laying them out.
        """
        if "rules" in changes:
            changes["rules"] = context.resolve_rules(changes["rules"])
        with contextlib.ExitStack() as stack:
            if told_names is not None:
                stack.enter_context(tree_layout.telling_once(told_names))
            if changes:
                stack.enter_context(context.SettingsScope("scope", **changes))
            yield

    def kernel(self, kind: str) -> str | None:
        """Returns the kernel of a kind, such as ``"attention"``, or None.

        Args:
            kind: A name of ``sx.kernels``.
        """
        return getattr(self, kind)


_KERNELS = ("attention", "experts", "loss", "gated", "norms")


class AxisNameMarks:
    """Marks that show the names of an array's dimensions in its program.

    A mark is an equation of the primitive ``name``, which JAX drops when it compiles.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax import extend
        >>> mark = lambda x: extend.AxisNameMarks.put(x, ("batch", None))
        >>> [equation] = jax.make_jaxpr(mark)(jnp.ones((2, 3))).eqns
        >>> extend.AxisNameMarks.read(equation.params["name"])
        ('batch', None)
        >>> extend.AxisNameMarks.read("attention") is None
        True
    """

    @staticmethod
    def put(array: jax.Array, names: Iterable[object]) -> jax.Array:
        """Returns an array with a mark.

        Args:
            array: The array.
            names: One entry for each dimension.
        """
        return context.mark_names(array, names)

    @staticmethod
    def read(name: str) -> tuple[Any, ...] | None:
        """Returns the names in a mark; None for another name.

        Args:
            name: The parameter ``name`` of an equation of the primitive ``name``.
        """
        return context.names_marked(name)
