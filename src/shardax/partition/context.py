# SPDX-License-Identifier: Apache-2.0
"""The settings in scope: rules, and how layers run.

The *current rules* are those of the innermost ``with axis_rules(...)`` around the running code, in
this thread; without one they are empty. All settings are part of the key by which ``jax.jit`` finds
compiled programs, so a function traced under some settings is traced anew under others.

Besides rules, a scope can set

* what a constraint does without a mesh (``axis_rules(..., on_no_mesh=...)``),
* in how many microbatches stacks run, and how attention reads a split sequence (``parallel``),
* which kernels layers run (``kernels``, and ``tracing_reference`` for none but XLA's),
* that constraints only *mark* arrays (``marking_names``): an array stays as it is, and the traced
  program holds the names that it was to be laid out by. A planner reads the names of dimensions
  inside of a program that way.

What an inner scope does not set is as in the scope around it.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardax._core.checks import Options
from shardax._core.errors import warn
from shardax.partition.errors import PartitionError, unused_scope
from shardax.partition.rules import Rules, RulesLike

P = ParamSpec("P")
R = TypeVar("R")

OnNoMesh = Literal["error", "ignore"]
"""The effect of a constraint without a mesh or rules: raise, or leave the array as it is."""

SCHEDULES = ("gpipe", "circular")
"""The orders in which stages of a pipeline have layers."""
ATTENTION_KERNELS = ("auto", "xla", "cudnn", "splash", "tokamax")
"""The implementations of attention."""
LAYER_KERNELS = ("auto", "xla", "tokamax")
"""The implementations of experts, losses, gated units and norms."""
_OPTIONS = Options(PartitionError)


class _Settings(NamedTuple):
    """All settings of a scope."""

    rules: Rules = Rules()
    on_no_mesh: OnNoMesh = "error"
    marking: bool = False
    microbatches: int | None = None
    schedule: str = "gpipe"
    context: str = "all-gather"
    attention: str | None = None
    experts: str | None = None
    loss: str | None = None
    gated: str | None = None
    norms: str | None = None
    interpret: bool = False
    reference: bool = False


# The context is part of the key of JAX's own caches, so rules that change retrace, also in plain
# jax.jit. It is hashed and compared on every call of a compiled function, therefore it holds text,
# for which Python is not entered; equal settings have equal text.
_DEFAULT_TEXT = repr(_Settings())
_current_text = jax.make_user_context(default_value=_DEFAULT_TEXT)
_settings_by_text: dict[str, _Settings] = {_DEFAULT_TEXT: _Settings()}


def _current_settings() -> _Settings:
    return _settings_by_text[_current_text.value]


def current_rules() -> Rules:
    """Returns the rules of this thread's innermost ``axis_rules`` scope, else empty rules.

    Example:
        >>> len(current_rules())
        0
    """
    return _current_settings().rules


def resolve_rules(rules: RulesLike | None = None) -> Rules:
    """Returns ``rules`` as ``Rules``, or the current rules for None."""
    if rules is None:
        return current_rules()
    return rules if isinstance(rules, Rules) else Rules(rules)


def resolve_on_no_mesh(on_no_mesh: OnNoMesh | None = None) -> OnNoMesh:
    """Returns the policy given, else the one in scope, else ``"error"``."""
    if on_no_mesh is None:
        return _current_settings().on_no_mesh
    _OPTIONS.choice("on_no_mesh", on_no_mesh, ("error", "ignore"))
    return on_no_mesh


def is_marking() -> bool:
    """Whether constraints only mark arrays by their names."""
    return _current_settings().marking


class SettingsScope:
    """A scope of changed settings: a context manager and a decorator."""

    def __init__(self, name: str, **changes: Any) -> None:
        self._name = name
        self._changes = changes
        self._local = threading.local()  # one scope object may be entered by many threads at once
        self._is_used = False

    def __del__(self) -> None:
        # It was made, and is gone: a line of its own changes nothing.
        if not getattr(self, "_is_used", True) and not sys.is_finalizing():
            warn(unused_scope(self._name, self._changes))

    def __reduce__(self) -> tuple[Callable[..., SettingsScope], tuple[str, dict[str, Any]]]:
        return _unpickled_scope, (self._name, self._changes)

    def __enter__(self) -> Rules:
        self._is_used = True
        settings = _current_settings()._replace(**self._changes)
        text = repr(settings)
        _settings_by_text.setdefault(text, settings)
        scope = _current_text(text)
        scope.__enter__()

        if not hasattr(self._local, "entered"):
            self._local.entered = []
        self._local.entered.append(scope)
        return settings.rules

    def __exit__(self, *exception: object) -> None:
        self._local.entered.pop().__exit__(*exception)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        self._is_used = True
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise PartitionError(
                f"{self._name} cannot decorate {function!r}: a generator or coroutine runs after "
                f"the call that made it. Write `with {self._name}(...)` inside, around code that "
                "neither yields nor awaits."
            )

        @functools.wraps(function)
        def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
            with SettingsScope(self._name, **self._changes):
                return function(*args, **kwargs)

        return scoped


def _unpickled_scope(name: str, changes: dict[str, Any]) -> SettingsScope:
    """Returns the ``SettingsScope`` that was pickled."""
    scope = SettingsScope(name, **changes)
    scope._is_used = True  # by the function that it decorates
    return scope


def axis_rules(rules: RulesLike, *, on_no_mesh: OnNoMesh | None = None) -> SettingsScope:
    """Makes ``rules`` the current rules in a ``with`` block or decorated function.

    Scopes nest: inner rules replace outer ones (``current_rules().override(...)`` adds to them)
    until the end of the block, also by an exception. Scopes belong to a thread.

    Args:
        rules: Rules, pairs or a mapping.
        on_no_mesh: What constraints inside do without a mesh or without rules: ``"error"``, or
            ``"ignore"`` to leave arrays as they are. None: as in the scope around, else
            ``"error"``.

    Returns:
        The context manager, which is also a decorator.

    Raises:
        PartitionError: If the rules are malformed, or a generator or coroutine function is
            decorated, or if ``on_no_mesh`` is no policy.

    Example:
        >>> with axis_rules({"embed": "model"}):
        ...     logical_to_mesh_axes(("embed", "mlp"))
        P('model', None)
        >>> @axis_rules({"mlp": "model"})
        ... def layout():
        ...     return logical_to_mesh_axes(("embed", "mlp"))
        >>> layout()
        P(None, 'model')
    """
    changes: dict[str, Any] = {"rules": resolve_rules(rules)}
    if on_no_mesh is not None:
        changes["on_no_mesh"] = resolve_on_no_mesh(on_no_mesh)
    return SettingsScope("axis_rules", **changes)


def parallel(
    *, microbatches: int | None = None, schedule: str | None = None, context: str | None = None
) -> SettingsScope:
    """Settings of parallel forms in a ``with`` block or decorated function.

    Scopes nest: what an inner one leaves out is as around it.

    Args:
        microbatches: In how many parts ``nn.Stack`` runs a batch. Where the rules lay its layers
            over a mesh axis, it is a pipeline of as many stages as that axis has parts.
            Stacks inside of its layers run a microbatch as it comes.
        schedule: In which order stages of a pipeline have layers. ``"gpipe"``, the default: a run
            of layers each. ``"circular"``: one layer a turn, in as many rounds as a stage has
            layers, so that stages are idle for less time, and send more.
        context: How attention reads a sequence that is split by position. ``"all-gather"``, the
            default: every device holds all keys and values of a layer. ``"ring"``: they go round
            the devices, and none holds more than two parts. ``"ring-zigzag"``: so that in causal
            attention all devices also do the same work, about half of what they wait for in a
            ring; results are the same.

    Returns:
        The context manager, which is also a decorator.

    Raises:
        PartitionError: If an argument has no such meaning.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> stack = sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=sx.Rngs(0)), 2)
        >>> with sx.parallel(microbatches=3):
        ...     y = stack(jnp.ones((6, 4)))
        >>> bool(jnp.allclose(y, stack(jnp.ones((6, 4)))))
        True
    """
    changes: dict[str, Any] = {}
    if microbatches is not None:
        _OPTIONS.integers(microbatches=microbatches)
        changes["microbatches"] = int(microbatches)  # as text it is part of JAX's key

    if schedule is not None:
        _OPTIONS.choice("schedule", schedule, SCHEDULES)
        changes["schedule"] = schedule

    if context is not None:
        _OPTIONS.choice("context", context, ("all-gather", "ring", "ring-zigzag"))
        changes["context"] = context
    return SettingsScope("parallel", **changes)


def kernels(
    *,
    attention: str | None = None,
    experts: str | None = None,
    loss: str | None = None,
    gated: str | None = None,
    norms: str | None = None,
    interpret: bool | None = None,
) -> SettingsScope:
    """Kernels of layers in a ``with`` block or decorated function.

    Scopes nest: what an inner one leaves out is as around it. A layer with an ``implementation`` of
    its own keeps that. Programs traced under other kernels are traced anew.

    What is not attention takes ``"xla"``, XLA's own operations, the default; ``"tokamax"``, what
    the library tokamax takes on this platform; or ``"auto"``, the best that a layer can run.

    Args:
        attention: ``"auto"``: of each layer the fastest kernel that computes the same and runs on
            the platform of the mesh in scope, else on JAX's default one. ``"xla"``: XLA's own
            operations, the default. ``"cudnn"``: that of NVIDIA GPUs. ``"splash"``: JAX's splash
            attention, on TPUs. ``"tokamax"``: what the library tokamax takes on this platform. A
            layer that cannot run a kernel asked for by name refuses it and says why.
        experts: The products of ``nn.MoE`` with its experts' kernels, of rows sorted by expert.
        loss: ``models.blockwise_cross_entropy``.
        gated: The first half of a gated ``nn.MLP``: ``activation(gate(x)) * up(x)``.
        norms: ``nn.RMSNorm`` and ``nn.LayerNorm``. By name, other norms refuse it.
        interpret: Whether Pallas's kernels are interpreted, which runs them on CPU, slowly, to
            check their numbers. Those of tokamax have no such mode.

    Returns:
        The context manager, which is also a decorator.

    Raises:
        PartitionError: If there is no such kernel.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> attention = sx.nn.MultiHeadAttention(16, 4, causal=True, rngs=sx.Rngs(0))
        >>> with sx.kernels(attention="auto", norms="auto"):
        ...     y = attention(jnp.ones((2, 5, 16)))
        >>> bool(jnp.allclose(y, attention(jnp.ones((2, 5, 16))), atol=1e-6))
        True
    """
    changes: dict[str, Any] = {}
    if attention is not None:
        _OPTIONS.choice("attention", attention, ATTENTION_KERNELS)
        changes["attention"] = str(attention)

    names = {"experts": experts, "loss": loss, "gated": gated, "norms": norms}
    for layer, name in names.items():
        if name is not None:
            _OPTIONS.choice(layer, name, LAYER_KERNELS)
            changes[layer] = str(name)

    if interpret is not None:
        _OPTIONS.choice("interpret", interpret, (True, False))
        changes["interpret"] = interpret
    return SettingsScope("kernels", **changes)


def current_kernel(kind: str) -> str | None:
    """Returns the scope's kernel of a kind, such as attention, or None."""
    return getattr(_current_settings(), kind)


def is_interpreting_kernels() -> bool:
    """Whether Pallas's kernels are interpreted."""
    return _current_settings().interpret


def tracing_reference() -> SettingsScope:
    """Returns a scope in which every layer computes by XLA's operations."""
    # A planner reads the operations and dimensions of a step for other hardware from this.
    return SettingsScope("tracing_reference", reference=True)


def is_tracing_reference() -> bool:
    """Whether layers compute by XLA's operations, whatever was asked for."""
    return _current_settings().reference


def current_schedule() -> str:
    """Returns the schedule of pipelines of the scope."""
    return _current_settings().schedule


def current_microbatches() -> int | None:
    """Returns the microbatches of the scope, or None."""
    return _current_settings().microbatches


def current_context() -> str:
    """Returns the scope's way of attention over a split sequence."""
    return _current_settings().context


_MARK = "shardax-names:"


def marking_names(rules: RulesLike) -> SettingsScope:
    """Returns a scope in which constraints only mark arrays by their names."""
    # Programs traced in it are not used outside of it, nor the other way round.
    return SettingsScope("marking_names", rules=resolve_rules(rules), marking=True)


def mark_names(array: jax.Array, names: Iterable[object]) -> jax.Array:
    """Returns the array, marked by an equation of the primitive ``name``."""
    # JSON writes a tuple of names as a list. What is no name, such as UNCONSTRAINED, says nothing.
    entries = [name if isinstance(name, (str, tuple)) else None for name in names]
    return checkpoint_name(array, _MARK + json.dumps(entries))


def names_marked(text: str) -> tuple[Any, ...] | None:
    """Returns the names in the parameter ``name`` of a mark, or None for another name."""
    if not text.startswith(_MARK):
        return None
    entries = json.loads(text.removeprefix(_MARK))
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)


def logical_to_mesh_axes(
    names: Iterable[object] | None, rules: RulesLike | None = None
) -> PartitionSpec | None:
    """Maps the logical names of one array's dimensions to mesh axes.

    Same results as ``flax.linen.logical_to_mesh_axes``, except that a dimension given as a tuple of
    names (a merged dimension) is mapped too, each name by its own rule.

    Args:
        names: One entry per dimension: a name, None (not split), ``PartitionSpec.UNCONSTRAINED``,
            or a tuple of names. None in place of all names gives None.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        The ``PartitionSpec``, with one entry per dimension; None if ``names`` is None.

    Raises:
        PartitionError: If ``names`` is malformed or holds a name twice, or if a name lost a mesh
            axis to another under ``on_conflict="error"``, or if no rule mentions a name under
            ``on_unmapped="error"``, or if ``rules`` are malformed.

    Example:
        >>> rules = [("batch", "x"), ("features", "x"), ("heads", "y"), ("batch", "z")]
        >>> logical_to_mesh_axes(("batch", "length", "heads", "features"), rules)
        P('x', None, 'y', None)
    """
    if names is None:
        return None
    return resolve_rules(rules).spec(names)
