# SPDX-License-Identifier: Apache-2.0
"""The settings in scope: rules, and how layers run.

``axis_rules``, ``parallel`` and ``kernels`` open a scope for users, and check values;
``ScopeSettings.scope`` opens one for code that hands settings on. What an inner scope does not set
is as in the scope around it. Scopes belong to a thread. The *current rules* are those of the
innermost ``axis_rules``, or none.

All settings are part of the key by which ``jax.jit`` finds compiled programs, so a function that
was traced under some settings is traced anew under others.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Hashable, Iterable
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
from jax.sharding import PartitionSpec

from shardax._core.checks import Options
from shardax.partition import errors
from shardax.partition.errors import PartitionError
from shardax.partition.rules import Rules, RulesLike

P = ParamSpec("P")
R = TypeVar("R")

OnNoMesh = Literal["error", "ignore"]
"""The effect of a constraint without a mesh or rules: raise, or leave the array as it is."""

_OPTIONS = Options(PartitionError)


class ScopeSettings(NamedTuple):
    """The settings of a scope.

    Attributes:
        rules: The rules.
        on_no_mesh: What a constraint does without a mesh or rules.
        marking: Whether constraints only mark arrays by their names (``AxisNameMarks``), so that
            a planner can read the names of dimensions inside of a program.
        microbatches: In how many parts stacks run a batch, or None.
        schedule: The schedule of pipelines.
        context: How attention reads a sequence that is split by position.
        attention: The kernel of attention, or None.
        experts: The kernel of the products with experts, or None.
        loss: The kernel of losses, or None.
        gated: The kernel of gated units, or None.
        norms: The kernel of norms, or None.
        interpret: Whether Pallas's kernels are interpreted.
        reference: Whether all layers compute by XLA's operations, whatever kernels are asked for.
            A planner reads the operations of a step for other hardware so.

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

    @classmethod
    def current(cls) -> ScopeSettings:
        """Returns the settings of this thread's innermost scopes, or their defaults."""
        return _settings_by_text[_current_text.value]

    @staticmethod
    def choices(name: str) -> tuple[str, ...]:
        """Returns the values that a setting can have.

        Args:
            name: The name of a kernel (see ``sx.kernels``), ``"schedule"`` or ``"context"``.

        Raises:
            KeyError: If there is no such setting.
        """
        return _CHOICES[name]

    @staticmethod
    def scope(**changes: Any) -> SettingsScope:
        """Returns a scope with other settings, in which nothing is checked.

        ``sx.kernels`` and ``sx.parallel`` are for users: they check values. This one is for code
        that hands settings on, or takes them away.

        Args:
            **changes: Fields of ``ScopeSettings``; the rules may be any ``RulesLike``.
        """
        if "rules" in changes:
            changes["rules"] = resolve_rules(changes["rules"])
        return SettingsScope("ScopeSettings.scope", **changes)

    @staticmethod
    @contextlib.contextmanager
    def telling_once(told: set[Hashable]) -> Generator[None]:
        """Gives each warning of misspelt names once, and not at every call in the scope.

        Args:
            told: The warnings that were given, to which the scope adds its own.
        """
        token = _told_warnings.set(told)
        try:
            yield
        finally:
            _told_warnings.reset(token)

    def kernel(self, kind: str) -> str | None:
        """Returns the kernel of a kind, such as ``"attention"``, or None.

        Args:
            kind: A name of ``sx.kernels``.
        """
        return getattr(self, kind)


_LAYER_KERNELS = ("auto", "xla", "tokamax")
_CHOICES = {
    "attention": ("auto", "xla", "cudnn", "splash", "tokamax"),
    "experts": _LAYER_KERNELS,
    "loss": _LAYER_KERNELS,
    "gated": _LAYER_KERNELS,
    "norms": _LAYER_KERNELS,
    "schedule": ("gpipe", "circular"),
    "context": ("all-gather", "ring", "ring-zigzag"),
}

# The context is part of the key of JAX's own caches, so rules that change retrace, also in plain
# jax.jit. It is hashed and compared on every call of a compiled function, therefore it holds text,
# for which Python is not entered; equal settings have equal text.
_DEFAULT_TEXT = repr(ScopeSettings())
_current_text = jax.make_user_context(default_value=_DEFAULT_TEXT)
_settings_by_text: dict[str, ScopeSettings] = {_DEFAULT_TEXT: ScopeSettings()}


# The warnings of misspelt names that a scope has given; None where each call gives its own.
_told_warnings: ContextVar[set[Hashable] | None] = ContextVar("told_warnings", default=None)


def told_warnings() -> set[Hashable] | None:
    """Returns the warnings of misspelt names that a scope has given; None outside of such."""
    return _told_warnings.get()


def current_rules() -> Rules:
    """Returns the rules of this thread's innermost ``axis_rules`` scope, else empty rules.

    Example:
        >>> len(current_rules())
        0
    """
    return ScopeSettings.current().rules


def resolve_rules(rules: RulesLike | None = None) -> Rules:
    """Returns ``rules`` as ``Rules``, or the current rules for None."""
    if rules is None:
        return current_rules()
    return rules if isinstance(rules, Rules) else Rules(rules)


def resolve_on_no_mesh(on_no_mesh: OnNoMesh | None = None) -> OnNoMesh:
    """Returns the policy given, else the one in scope, else ``"error"``."""
    if on_no_mesh is None:
        return ScopeSettings.current().on_no_mesh
    _OPTIONS.choice("on_no_mesh", on_no_mesh, ("error", "ignore"))
    return on_no_mesh


class SettingsScope:
    """A scope of changed settings: a context manager and a decorator."""

    def __init__(self, name: str, **changes: Any) -> None:
        self._name = name
        self._changes = changes
        self._local = threading.local()  # one scope object may be entered by many threads at once

    def __reduce__(self) -> tuple[Callable[..., SettingsScope], tuple[str, dict[str, Any]]]:
        return _unpickled_scope, (self._name, self._changes)

    def __enter__(self) -> Rules:
        settings = ScopeSettings.current()._replace(**self._changes)
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
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise errors.decorated_generator(self._name, function)

        @functools.wraps(function)
        def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
            with SettingsScope(self._name, **self._changes):
                return function(*args, **kwargs)

        return scoped


def _unpickled_scope(name: str, changes: dict[str, Any]) -> SettingsScope:
    """Returns the ``SettingsScope`` that was pickled."""
    return SettingsScope(name, **changes)


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
    changes = _chosen(schedule=schedule, context=context)
    if microbatches is not None:
        _OPTIONS.integers(microbatches=microbatches)
        changes["microbatches"] = int(microbatches)  # as text it is part of JAX's key
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
    changes = _chosen(attention=attention, experts=experts, loss=loss, gated=gated, norms=norms)
    if interpret is not None:
        _OPTIONS.choice("interpret", interpret, (True, False))
        changes["interpret"] = interpret
    return SettingsScope("kernels", **changes)


def _chosen(**settings: str | None) -> dict[str, Any]:
    """Returns the settings that were given, each one of its choices."""
    chosen: dict[str, Any] = {}
    for name, value in settings.items():
        if value is not None:
            _OPTIONS.choice(name, value, ScopeSettings.choices(name))
            chosen[name] = str(value)
    return chosen


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
