# SPDX-License-Identifier: Apache-2.0
"""Every error stands under ShardaxError and a builtin, says what it is for, and can be pickled."""

from __future__ import annotations

import inspect
import pickle

import shardax as sx
from shardax.errors import ShardaxError

ERRORS = [
    error
    for _, error in inspect.getmembers(sx.errors, inspect.isclass)
    if issubclass(error, ShardaxError) and error is not ShardaxError
]


def test_errors_subclass_python_errors_and_have_docstrings() -> None:
    for error in ERRORS:
        standard = [base for base in error.__mro__ if not base.__module__.startswith("shardax.")]
        assert standard[0] not in (Exception, BaseException, object), error
        assert error.__doc__ and error.__doc__ != ShardaxError.__doc__, error


def test_errors_survive_pickling_with_their_texts() -> None:
    for error in ERRORS:
        raised = error("what was found")
        copied = pickle.loads(pickle.dumps(raised))
        assert type(copied) is error
        assert (str(copied), copied.args) == (str(raised), raised.args)


def test_errors_derived_elsewhere_keep_their_module() -> None:
    derived = type("Derived", (ShardaxError,), {"__module__": "application.errors"})
    assert (derived.__module__, ShardaxError.__module__) == ("application.errors", "shardax.errors")
