# SPDX-License-Identifier: Apache-2.0
"""Eager random numbers from one global, seedable stream.

These are the functions of ``jax.random`` without a key. They refuse to work while a transform is
tracing; ``Rngs`` is the random state that goes into programs.
"""

from shardax.random.counts import binomial as binomial
from shardax.random.counts import geometric as geometric
from shardax.random.counts import multinomial as multinomial
from shardax.random.counts import poisson as poisson
from shardax.random.counts import rademacher as rademacher
from shardax.random.draws import bernoulli as bernoulli
from shardax.random.draws import bits as bits
from shardax.random.draws import categorical as categorical
from shardax.random.draws import choice as choice
from shardax.random.draws import key as key
from shardax.random.draws import normal as normal
from shardax.random.draws import permutation as permutation
from shardax.random.draws import randint as randint
from shardax.random.draws import truncated_normal as truncated_normal
from shardax.random.draws import uniform as uniform
from shardax.random.parametric import beta as beta
from shardax.random.parametric import chisquare as chisquare
from shardax.random.parametric import double_sided_maxwell as double_sided_maxwell
from shardax.random.parametric import f as f
from shardax.random.parametric import gamma as gamma
from shardax.random.parametric import generalized_normal as generalized_normal
from shardax.random.parametric import loggamma as loggamma
from shardax.random.parametric import lognormal as lognormal
from shardax.random.parametric import pareto as pareto
from shardax.random.parametric import rayleigh as rayleigh
from shardax.random.parametric import t as t
from shardax.random.parametric import triangular as triangular
from shardax.random.parametric import wald as wald
from shardax.random.parametric import weibull_min as weibull_min
from shardax.random.standard import cauchy as cauchy
from shardax.random.standard import exponential as exponential
from shardax.random.standard import gumbel as gumbel
from shardax.random.standard import laplace as laplace
from shardax.random.standard import logistic as logistic
from shardax.random.standard import maxwell as maxwell
from shardax.random.stream import StreamState as StreamState
from shardax.random.stream import get_state as get_state
from shardax.random.stream import isolated as isolated
from shardax.random.stream import seed as seed
from shardax.random.stream import set_state as set_state
from shardax.random.vectors import ball as ball
from shardax.random.vectors import dirichlet as dirichlet
from shardax.random.vectors import multivariate_normal as multivariate_normal
from shardax.random.vectors import orthogonal as orthogonal
