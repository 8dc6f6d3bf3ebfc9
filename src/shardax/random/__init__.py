# SPDX-License-Identifier: Apache-2.0
"""Eager random numbers from one global, seedable stream.

These are the functions of ``jax.random`` without a key. They refuse to work while a transform is
tracing; ``Rngs`` is the random state that goes into programs.
"""

from shardax.random.distributions import ball as ball
from shardax.random.distributions import beta as beta
from shardax.random.distributions import binomial as binomial
from shardax.random.distributions import cauchy as cauchy
from shardax.random.distributions import chisquare as chisquare
from shardax.random.distributions import dirichlet as dirichlet
from shardax.random.distributions import double_sided_maxwell as double_sided_maxwell
from shardax.random.distributions import exponential as exponential
from shardax.random.distributions import f as f
from shardax.random.distributions import gamma as gamma
from shardax.random.distributions import generalized_normal as generalized_normal
from shardax.random.distributions import geometric as geometric
from shardax.random.distributions import gumbel as gumbel
from shardax.random.distributions import laplace as laplace
from shardax.random.distributions import loggamma as loggamma
from shardax.random.distributions import logistic as logistic
from shardax.random.distributions import lognormal as lognormal
from shardax.random.distributions import maxwell as maxwell
from shardax.random.distributions import multinomial as multinomial
from shardax.random.distributions import multivariate_normal as multivariate_normal
from shardax.random.distributions import orthogonal as orthogonal
from shardax.random.distributions import pareto as pareto
from shardax.random.distributions import poisson as poisson
from shardax.random.distributions import rademacher as rademacher
from shardax.random.distributions import rayleigh as rayleigh
from shardax.random.distributions import t as t
from shardax.random.distributions import triangular as triangular
from shardax.random.distributions import wald as wald
from shardax.random.distributions import weibull_min as weibull_min
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
from shardax.random.stream import StreamState as StreamState
from shardax.random.stream import get_state as get_state
from shardax.random.stream import isolated as isolated
from shardax.random.stream import seed as seed
from shardax.random.stream import set_state as set_state
