# SPDX-License-Identifier: Apache-2.0
"""Errors of draws, and their texts. A *function* is the public one that the user called."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.errors import ModuleError, ShardaxError

# An operand of a draw: of NumPy where it is on the host.
Operand = np.ndarray | jax.Array


class DrawError(ShardaxError, ValueError, RuntimeError):
    """A draw with wrong arguments, or inside a JAX transform."""


# --- arguments ---


def not_a_shape(function: str, shape: object) -> DrawError:
    """Returns the error of a shape that is no integer and no tuple of integers."""
    return DrawError(
        f"shardax.random.{function} was given the shape {shape!r}; a shape is an integer or a "
        f"tuple of integers, none below 0."
    )


def not_a_number(function: str, name: str, operand: Operand, kind: str) -> DrawError:
    """Returns the error of a parameter that is too small; ``kind`` says what fits."""
    return DrawError(f"shardax.random.{function} was given {name}={operand}. Give a number {kind}.")


def not_a_probability(function: str, p: Operand) -> DrawError:
    """Returns the error of probabilities below 0 or above 1."""
    return DrawError(
        f"shardax.random.{function} was given p={p}; a probability is a number from 0 to 1. To "
        f"draw in proportion to weights, divide them by their sum."
    )


def not_a_distribution(function: str, p: Operand) -> DrawError:
    """Returns the error of probabilities that do not add up to 1."""
    return DrawError(
        f"shardax.random.{function} was given p={p}, which adds up to {p.sum()}. Probabilities "
        f"add up to 1: p / p.sum()."
    )


def not_a_triangle(left: Operand, mode: Operand, right: Operand) -> DrawError:
    """Returns the error of ends and a mode that are not in order."""
    return DrawError(
        f"shardax.random.triangular was given left={left}, mode={mode} and right={right}. Give "
        f"left <= mode <= right, and left < right."
    )


def not_an_interval(function: str, **bounds: Operand) -> DrawError:
    """Returns the error of a lower and an upper bound that are not in order."""
    (low_name, low), (high_name, high) = bounds.items()
    return DrawError(
        f"shardax.random.{function} was given {low_name}={low} and {high_name}={high}, which is no "
        f"interval to draw from. Give a {low_name} below {high_name}, both finite."
    )


def bound_not_integer(name: str, bound: Operand) -> DrawError:
    """Returns the error of a bound of integers that is no integer."""
    return DrawError(
        f"shardax.random.randint was given {name}={bound} of dtype {bound.dtype}; the bounds of "
        f"integers are integers."
    )


def bound_outside_of_dtype(
    name: str, bound: Operand, dtype: np.dtype, least: int, most: int
) -> DrawError:
    """Returns the error of a bound that the dtype does not allow."""
    return DrawError(
        f"shardax.random.randint was given {name}={bound}, but {dtype.name} allows {least} to "
        f"{most} there. Give a wider dtype."
    )


# --- devices and shardings ---


def does_not_divide(
    function: str, made: jax.ShapeDtypeStruct, sharding: NamedSharding, error: ValueError
) -> DrawError:
    """Returns the error of a shape that the mesh does not divide."""
    return DrawError(
        f"shardax.random.{function} cannot lay out {made.dtype}{list(made.shape)} by {sharding}: "
        f"{error} Choose a shape that the mesh divides, or another sharding."
    )


# Texts, for the error class of the room whose function makes the array.


def device_and_sharding(function: str, device: object, sharding: object) -> str:
    """Returns the text about a device and a sharding that are given together."""
    return (
        f"{function} was given device={device!r} and sharding={sharding!r}; a sharding names its "
        f"devices, so give one of them."
    )


def not_a_sharding(function: str, sharding: object) -> str:
    """Returns the text about a sharding that is neither one nor a spec."""
    return (
        f"{function} was given sharding={sharding!r} of type {type(sharding).__name__}. Give a "
        f"Sharding, or a PartitionSpec over the mesh in scope; for a device there is device=."
    )


def spec_without_mesh(function: str, spec: PartitionSpec) -> str:
    """Returns the text about a spec where no mesh is in scope."""
    return (
        f"{function} was given sharding={spec}, which needs a mesh, and none is in scope. Put one "
        f"there with jax.set_mesh(mesh), or give a NamedSharding(mesh, {spec})."
    )


# --- the stream ---


def drawn_while_tracing(function: str) -> DrawError:
    """Returns the error of a draw from the global stream inside a JAX transform."""
    return DrawError(
        f"shardax.random.{function} was called while a JAX transform is tracing. The global "
        f"stream is outside of the program: its numbers would stay in the program as constants. "
        f"Pass random state as an argument, rngs = shardax.Rngs(0), and inside step(rngs, x) draw "
        f"by jax.random.normal(rngs.noise(), x.shape). Or draw the numbers outside and pass those."
    )


def never_seeded(process_count: int) -> ModuleError:
    """Returns the error of a stream that was not seeded, in a program of several processes."""
    return ModuleError(
        f"shardax.random was not seeded, and this program runs in {process_count} processes, which "
        f"would draw different numbers for one array. Give all the same seed first: "
        f"shardax.random.seed(0)."
    )


def several_keys(key: jax.Array) -> ModuleError:
    """Returns the error of a seed that is an array of keys."""
    return ModuleError(
        f"A stream starts from one key, not {key.size} of shape {key.shape}: give key[0]."
    )


def unknown_generator(impl: object, error: Exception) -> ModuleError:
    """Returns the error of a random generator that JAX does not have."""
    return ModuleError(f"JAX knows no random generator {impl!r}: {error}")


def not_a_state(state: object) -> ModuleError:
    """Returns the error of a state that is no ``StreamState``."""
    return ModuleError(
        f"The state of a stream is a shardax.random.StreamState, but set_state was given {state!r} "
        f"of type {type(state).__name__}. For a seed or a key there is shardax.random.seed."
    )


def impossible_state(impl: str, words: tuple[int, ...], count: int, word_count: int) -> ModuleError:
    """Returns the error of a ``StreamState`` whose numbers no stream can have."""
    return ModuleError(
        f"StreamState(impl={impl!r}, words={words}, count={count!r}) is not the state of a stream: "
        f"a {impl} key has {word_count} words in [0, 2**32), and the count is an integer from 0 "
        f"(shardax.random.get_state())."
    )
