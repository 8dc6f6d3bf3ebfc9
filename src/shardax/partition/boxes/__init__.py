# SPDX-License-Identifier: Apache-2.0
"""Boxes: values of any pytree with names of their dimensions.

- ``axis_metadata`` has the base class, ``partitioned`` the two standard boxes.
- ``protocol`` says what is a box at all, of this library or another one.
- ``variable_layout`` and ``variable_box`` are about Variables made of boxes, and the reverse.
- ``initializers`` make boxes; ``trees`` change all boxes of a tree.
"""
