# SPDX-License-Identifier: Apache-2.0
"""Layouts of whole trees, in the order in which ``TreeLayout`` runs.

- ``inventory`` lists the leaves of a tree.
- ``overrides`` has what the caller says of some leaves, by filter.
- ``layout`` makes the specs of every leaf; ``reduced_states`` those of optimizers' states in boxes.
- ``diagnostics`` collects what is wrong with them, ``misspelt_names`` warns of it.
- ``check`` adds what only live arrays and Modules tell.
"""
