# SPDX-License-Identifier: Apache-2.0
"""PyTorch functions inside JAX programs, with PyTorch's derivatives.

A gradient by ``torch.autograd`` is a torch function again, so derivatives of every order come the
same way; it runs the function once more. Integers become ``int64``, which PyTorch wants for labels
and indices; ``bfloat16``, which NumPy does not know, travels as its bits. JAX's gradient of a
complex number is the conjugate of PyTorch's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.extend import PyTree, needs_package
from shardax.host.calls import name_of
from shardax.host.host_function import HostFunction, host_function, if_differentiable

_BFLOAT16 = jnp.dtype("bfloat16")


def from_torch(
    function: Callable[..., object] | None = None, *, out: object = None, vmap: str = "sequential"
) -> Any:
    """Makes a PyTorch function callable in JAX programs, with gradients.

    Arguments and results are pytrees of arrays; what is passed by name is passed on, and has no
    gradient. The function runs on the CPU, and must give the same for the same arguments: put
    layers with dropout into evaluation mode. Weights that it holds are constants; to train them,
    make them arguments.

    Args:
        function: A function of tensors or a ``torch.nn.Module``. Left out: returns a decorator.
        out: Shapes and dtypes of the result, as for ``host_function``. Left out, it is a loss: one
            number, of the widest dtype of floats among the arguments.
        vmap: As for ``host_function``.

    Returns:
        A function of JAX arrays, with derivatives of every order in reverse mode: second ones by
        ``sx.jacrev(sx.jacrev(f))``, since ``sx.hessian`` goes forward over reverse.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> @sx.host.from_torch
        ... def loss(logits, labels):
        ...     import torch
        ...     return torch.nn.functional.cross_entropy(logits, labels)
        >>> logits = jax.ShapeDtypeStruct((8, 10), jnp.bfloat16)
        >>> labels = jax.ShapeDtypeStruct((8,), jnp.int32)
        >>> value, gradient = jax.eval_shape(jax.value_and_grad(loss), logits, labels)
        >>> value.dtype, gradient.shape, gradient.dtype
        (dtype(bfloat16), (8, 10), dtype(bfloat16))
    """
    if function is None:
        return functools.partial(from_torch, out=out, vmap=vmap)
    return _hosted(function, _loss_form if out is None else out, vmap)


def _torch():
    # No extra of this package brings it, so type checkers miss it.
    with needs_package("from_torch", "torch"):
        return importlib.import_module("torch")


def _loss_form(*args: object, **kwargs: object) -> jax.ShapeDtypeStruct:
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(args) if _is_moving(leaf)]
    return jax.ShapeDtypeStruct((), jnp.result_type(*dtypes) if dtypes else jnp.result_type(float))


def _is_moving(leaf: object) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _hosted(function: Callable[..., object], out: object, vmap: str) -> HostFunction:
    """Make a host function of a torch function, with its gradient."""

    @functools.wraps(function, updated=())
    def on_arrays(*args: object, **kwargs: object):
        torch = _torch()
        with torch.no_grad():
            args, kwargs = jax.tree.map(to_tensor, (args, kwargs))
            return jax.tree.map(to_numpy, function(*args, **kwargs))

    on_arrays.__qualname__ = name_of(function)

    @functools.cache
    def gradient() -> HostFunction:
        return _hosted(
            gradient_of(function), lambda args, _, **named: if_differentiable(args), vmap
        )

    def rule(
        args: tuple[object, ...], result: object, cotangent: object, **kwargs: object
    ) -> PyTree:
        return gradient()(args, cotangent, **kwargs)

    return host_function(on_arrays, out=out, vmap=vmap, vjp=rule)


def gradient_of(function: Callable[..., object]) -> Callable[..., Any]:
    """Return the gradient of a torch function as a torch function."""

    def gradient(args: tuple[PyTree, ...], cotangent, **kwargs) -> tuple[PyTree, ...]:
        torch = _torch()
        create_graph = torch.is_grad_enabled()  # whether this is differentiated in turn

        leaves, treedef = jax.tree.flatten(args)
        leaves = [
            leaf.detach().requires_grad_()
            if _has_gradient(leaf) and not leaf.requires_grad
            else leaf
            for leaf in leaves
        ]

        with torch.enable_grad():
            result = function(*treedef.unflatten(leaves), **kwargs)
            results = [leaf for leaf in jax.tree.leaves(result) if _has_gradient(leaf)]
            grads = torch.autograd.grad(
                [leaf for leaf in results if leaf.requires_grad],
                [leaf for leaf in leaves if _has_gradient(leaf)],
                [
                    ct.conj()
                    for leaf, ct in zip(results, jax.tree.leaves(cotangent), strict=True)
                    if leaf.requires_grad
                ],
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )

        gradients = iter(grads)
        return treedef.unflatten(
            [next(gradients).conj() if _has_gradient(leaf) else None for leaf in leaves]
        )

    gradient.__qualname__ = f"gradient of {name_of(function)}"
    return gradient


def _has_gradient(leaf) -> bool:
    return hasattr(leaf, "is_floating_point") and (leaf.is_floating_point() or leaf.is_complex())


def to_tensor(leaf: object) -> Any:
    """Return a NumPy array as a tensor; anything else as it is."""
    torch = _torch()
    if not isinstance(leaf, np.ndarray):
        return leaf
    if not leaf.flags.writeable or not leaf.flags.c_contiguous:  # a tensor cannot be read-only
        leaf = leaf.copy()

    if leaf.dtype == _BFLOAT16:
        return torch.from_numpy(leaf.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(leaf.astype(np.int64) if leaf.dtype.kind in "iu" else leaf)


def to_numpy(leaf: Any) -> Any:
    """Return a tensor as a NumPy array; anything else as it is."""
    torch = _torch()
    if not isinstance(leaf, torch.Tensor):
        return leaf

    leaf = leaf.detach().cpu().resolve_conj()
    if leaf.dtype == torch.bfloat16:
        return leaf.view(torch.int16).numpy().view(_BFLOAT16)
    return leaf.numpy()
