# SPDX-License-Identifier: Apache-2.0
"""``Remat``: a Module around another one, which is run again when it is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardax.core.modules import Module
from shardax.transforms.around import Around
from shardax.transforms.remat import remat


class Remat(Around):
    """A Module whose call keeps its inputs for the gradient, and computes the rest anew.

    Args:
        module: The body, a Module that can be called. Strings, functions and flags may be among its
            arguments.
        policy: As for ``remat``: what is kept all the same.
        prevent_cse: As for ``remat``.

    Attributes:
        body: It itself, not a copy. Its attributes are also those of the wrapper.

    Raises:
        LayerConfigError: If it is no Module, or cannot be called.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> layer = sx.Remat(mlp, policy=jax.checkpoint_policies.dots_saveable)
        >>> loss = lambda layer: layer(jnp.ones((1, 2))).sum()
        >>> grads, plain = sx.grad(loss)(layer), sx.grad(loss)(mlp)
        >>> layer.body is mlp, bool((grads.body.up.kernel == plain.up.kernel).all())
        (True, True)
    """

    _own = frozenset({"body", "policy", "prevent_cse"})

    def __init__(
        self,
        module: Module,
        policy: Callable[..., bool] | None = None,
        prevent_cse: bool = True,
    ) -> None:
        super().__init__(module)
        self.policy = policy
        self.prevent_cse = prevent_cse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the body."""
        call = remat(self.body, policy=self.policy, prevent_cse=self.prevent_cse, static="auto")
        return call(*args, **kwargs)
