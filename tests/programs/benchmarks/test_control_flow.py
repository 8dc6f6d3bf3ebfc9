# SPDX-License-Identifier: Apache-2.0
"""The benchmark of control flow runs, and its forms compute the same."""

import json
import sys

import control_flow
import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def small(monkeypatch):
    """The same works, small."""
    for name, size in {"WIDTH": 4, "DEPTH": 2, "ELEMENTS": 20, "STEPS": 3, "SIZE": 4}.items():
        monkeypatch.setattr(control_flow, name, size)


@pytest.mark.usefixtures("small")
def test_quick_run_records_each_form(monkeypatch, tmp_path):
    few = {name: control_flow.loops()[name] for name in ("sx.scan", "sx.while_loop")}
    monkeypatch.setattr(control_flow, "loops", lambda: few)  # the others compile for long
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["control_flow", "--quick", "--json", str(path)])
    assert control_flow.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("control_flow", [])
    names = [(record["work"], record["name"]) for record in written["records"]]
    works = {
        "one choice": control_flow.choices(),
        "each element": control_flow.element_choices(),
        "loop": ["Python's for", *control_flow.loops()],
    }
    assert names == [(work, name) for work, forms in works.items() for name in forms]
    nans = {record["name"]: record.get("nans") for record in written["records"]}
    assert nans["jnp.where"] > nans["sx.safe_where"] == nans["vmap of cond"] == 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("flag", [False, True])
def test_choices_all_give_the_same(flag):
    x = jnp.eye(4)
    expected = (control_flow.heavy if flag else control_flow.light)(x)
    for form in control_flow.choices().values():
        found = form(jnp.bool_(flag), x)
        np.testing.assert_allclose(found if found.ndim == 2 else found[0], expected, rtol=1e-5)


@pytest.mark.usefixtures("small")
def test_element_choices_all_give_the_same():
    x = jnp.array([-1.0, 0.0, 4.0])
    for form in control_flow.element_choices().values():
        np.testing.assert_allclose(form(x), [0.0, 0.0, 2.0])


@pytest.mark.usefixtures("small")
def test_loops_all_give_the_same():
    weight, x = jnp.eye(4), jnp.ones(4)
    expected = control_flow.in_python(weight, x)
    for form in control_flow.loops().values():
        found = jax.jit(form)(weight, x)
        last = found if found.ndim == 1 else found[control_flow.STEPS - 1]
        np.testing.assert_allclose(last, expected, rtol=1e-6)
