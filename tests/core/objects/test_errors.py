# SPDX-License-Identifier: Apache-2.0
"""Every error stands under ShardaxError and a builtin, says what it is for, and can be pickled."""

from __future__ import annotations

import inspect
import pickle

import pytest

import shardax as sx
from shardax.errors import ShardaxError

ERRORS = [
    error
    for _, error in inspect.getmembers(sx.errors, inspect.isclass)
    if issubclass(error, ShardaxError) and error is not ShardaxError
]


@pytest.mark.parametrize("error", ERRORS)
def test_errors_subclass_python_errors_and_have_docstrings(error: type[ShardaxError]) -> None:
    standard = [base for base in error.__mro__ if not base.__module__.startswith("shardax.")]
    assert standard[0] not in (Exception, BaseException, object)
    assert error.__doc__ and error.__doc__ != ShardaxError.__doc__


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_survives_pickling_with_its_text(error: type[ShardaxError]) -> None:
    raised = error("what was found")
    copied = pickle.loads(pickle.dumps(raised))
    assert type(copied) is error
    assert (str(copied), copied.args) == (str(raised), raised.args)


def test_errors_derived_elsewhere_keep_their_module() -> None:
    derived = type("Derived", (ShardaxError,), {"__module__": "application.errors"})
    assert (derived.__module__, ShardaxError.__module__) == ("application.errors", "shardax.errors")
