# SPDX-License-Identifier: Apache-2.0
"""Selections: parts of a model, read and edited like data.

To be read in this order: ``places`` (what can be selected), ``narrowing`` and ``selection`` (what
users call), ``edit`` and ``combine`` (new trees). ``predicates`` and ``accessors`` find places;
``holders`` is the graph that edits walk.
"""
