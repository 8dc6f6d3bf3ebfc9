# SPDX-License-Identifier: Apache-2.0
"""Choosing by name what the backward pass keeps and what it computes anew.

A *policy* is None (keep everything), ``"full"`` (keep nothing but the inputs), the name of one of
JAX's policies, or a policy itself: a function of ``jax.checkpoint_policies``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardax.core.errors import LayerConfigError
from shardax.transforms.remat import remat

POLICY_NAMES = (
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
)
"""Policies of ``jax.checkpoint_policies`` that are no factories and have one name each."""

Policy = str | Callable[..., Any] | None


def check_policy(layer: str, policy: Any) -> Policy:
    """Returns a policy that is one.

    Args:
        layer: Who asks, for the message.
        policy: What the caller gave.

    Raises:
        LayerConfigError: If there is no such policy.

    Example:
        >>> check_policy("Stack", "dots_saveable")
        'dots_saveable'
    """
    if policy is None or policy == "full" or policy in POLICY_NAMES or callable(policy):
        return policy
    raise LayerConfigError(
        f"{layer} was given remat={policy!r}. It takes None, 'full', one of "
        f"{', '.join(map(repr, POLICY_NAMES))}, or a policy such as "
        f"jax.checkpoint_policies.save_only_these_names('attention')."
    )


def rematerialised(
    function: Callable[..., Any], policy: Policy, *, in_loop: bool = False
) -> Callable[..., Any]:
    """Returns a function that keeps for its gradient what the policy says.

    Args:
        function: A function over Modules, whose arguments are arrays and objects.
        policy: The policy.
        in_loop: Whether it is the body of a loop, where the compiler cannot undo it.

    Example:
        >>> rematerialised(len, None) is len
        True
    """
    if policy is None:
        return function
    chosen: Any = policy
    if isinstance(policy, str):
        chosen = None if policy == "full" else getattr(jax.checkpoint_policies, policy)
    return remat(function, policy=chosen, prevent_cse=not in_loop)
