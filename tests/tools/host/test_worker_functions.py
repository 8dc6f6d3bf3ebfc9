# SPDX-License-Identifier: Apache-2.0
"""How functions are known in another process: by import path or by value, never an old version."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import shardax as sx
from shardax import errors
from shardax.host import Worker, calls
from shardax.host.calls import FunctionTable, decode, describe, encode
from shardax.host.pickling import digest_of_file
from tests.child_processes import run_here
from tests.tools.host import worker_functions as there
from tests.tools.host.waiting import has_ended, wait_for

# --- encoding -------------------------------------------------------------------------------------

numbers = arrays.arrays(
    st.sampled_from(["int8", "float32", "complex64", ">f8", "bool", "U3"]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
trees = st.recursive(
    st.none() | st.integers() | st.text() | numbers,
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=6,
)


def same(one, other):
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@given(trees)
def test_decoding_undoes_encoding(tree):
    parts = [bytearray(part) for part in encode(tree)]
    assert same(decode(parts), tree)


def test_arrays_are_not_in_the_pickle():
    model = sx.nn.Linear(100, 100, rngs=sx.Rngs(0))
    head, *memory = encode([model, np.zeros(1000), jnp.zeros(1000)])
    assert len(head) < 2500
    assert [len(part) for part in memory] == [40_000, 400, 8000, 4000]


def test_encode_keeps_one_object_as_one():
    array = jnp.ones(3)
    one, other = decode(encode([array, array]))
    assert one is other


# --- keys -----------------------------------------------------------------------------------------


def test_describe_gives_importable_functions_by_path():
    for function in (there.add, there.by_jax, there.by_shardax, np.linalg.inv, abs):
        form = describe(function)
        assert len(form.parts) == 1
        assert len(form.parts[0]) < 200
        assert decode(form.parts) is function


def test_describe_without_cloudpickle_takes_import_paths_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    calls._pickler_class.cache_clear()
    try:
        assert decode(describe(there.by_jax).parts) is there.by_jax
        with pytest.raises(errors.WorkerError, match=r"shardax\[code\]"):
            describe(lambda x: x)
    finally:
        calls._pickler_class.cache_clear()


def test_equal_functions_have_one_key_and_others_another():
    def adding(step, default=1):
        def add(x, y=default):
            return x + y + step

        return add

    keys = [describe(adding(*given)).key for given in [(1,), (1,), (2,), (1, 3), (1.0,)]]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_closure_array_is_part_of_the_key():
    def keyed(array):
        return describe(lambda x: x + array).key

    assert keyed(jnp.zeros(3)) == keyed(jnp.zeros(3)) != keyed(jnp.ones(3))


def test_table_makes_function_once_and_keeps_latest():
    table = FunctionTable(2)
    forms = [describe(lambda x, n=n: x + n) for n in range(3)]
    one = table.find(forms[0])
    assert table.find(forms[0]) is one
    table.find(forms[1])
    table.find(forms[0])
    table.find(forms[2])
    assert table.find(forms[0]) is one
    assert [kept["calls"] for kept in table.summary()] == [1, 4]
    assert one.call(1) == 1


# --- sources --------------------------------------------------------------------------------------


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Writes a module `own_parts` and one that imports it, `own_whole`; returns the function."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_parts", "own_whole"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def write(step):
        (tmp_path / "own_parts.py").write_text(f"STEP = {step}\n")
        text = "import own_parts\n\ndef step(x):\n    return x + own_parts.STEP\n"
        (tmp_path / "own_whole.py").write_text(text)
        importlib.invalidate_caches()
        for name in ("own_parts", "own_whole"):
            sys.modules.pop(name, None)
        return importlib.import_module("own_whole").step

    yield write
    for name in ("own_parts", "own_whole"):
        sys.modules.pop(name, None)


def test_worker_runs_changed_code_only_after_restart(own_module):
    with Worker() as worker:
        assert worker.submit(own_module(1), 1).result() == 2
        changed = own_module(10)
        with pytest.raises(errors.WorkerError, match=r"own_parts.*worker\.restart\(\)"):
            worker.submit(lambda x: changed(x), 1).result()
        with pytest.raises(errors.WorkerError, match=r"own_parts"):
            worker.submit(changed, 1).result()
        own_module(1)  # as it was, so that calls are run
        before, waiting = worker.submit(there.process).result(), worker.submit(there.nap, 60)
        wait_for(waiting.running)
        changed = own_module(10)
        worker.restart()
        assert isinstance(
            waiting.exception(), errors.WorkerCrashedError | errors.CallCancelledError
        )
        assert has_ended(before) and worker.submit(there.process).result() != before
        assert worker.submit(changed, 1).result() == 11
        assert worker.submit(lambda x: changed(x), 1).result() == 11


def test_call_means_the_sources_when_it_was_made(own_module):
    function = own_module(1)
    table = FunctionTable(2)
    call = describe(function)
    changed = describe(own_module(10))
    assert table.find(call).name == "step"
    with pytest.raises(errors.WorkerError, match=r"own_parts.*worker\.restart\(\)"):
        table.find(changed)


def test_call_is_not_run_with_newer_sources(own_module):
    call = describe(own_module(1))
    changed = own_module(10)
    table = FunctionTable(2)
    with pytest.raises(errors.WorkerError, match=r"own_parts.*make the call again"):
        table.find(call)
    assert table.find(describe(changed)).call(1) == 11


def test_modules_unknown_to_callers_are_compared_with_files(own_module):
    own_module(1)
    table = FunctionTable(2)
    form = describe(there.add)._replace(sources={})
    assert table.find(form).call(1, 2) == 3
    own_module(10)
    with pytest.raises(errors.WorkerError, match=r"own_parts.*worker\.restart\(\)"):
        table.find(form)


def test_imports_do_not_change_keys_of_functions(own_module):
    before = describe(there.add)
    own_module(1)
    after = describe(there.add)
    assert before.key == after.key
    assert len(after.sources) == len(before.sources) + 2


def test_change_that_leaves_size_and_time_is_noticed(tmp_path):
    """File systems count time in steps, in which two changes have the same time."""
    file = tmp_path / "source.py"
    file.write_text("STEP = 1")
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    digests = set()
    for step in range(5):
        file.write_text(f"STEP = {step}")
        os.utime(file, ns=times)
        digests.add(digest_of_file(str(file)))
    assert len(digests) == 5


def test_function_table_notices_another_module_of_the_same_name(own_module, tmp_path):
    function = own_module(1)
    form = describe(function)
    assert sorted(form.modules) == ["own_whole"]
    wrong = form._replace(modules={"own_whole": "0" * 64})
    with pytest.raises(errors.WorkerError, match="own_whole"):
        FunctionTable(2).find(wrong)


def test_keys_agree_across_processes_for_code_without_sets():
    program = textwrap.dedent(
        """
        from shardax.host.calls import describe
        import jax.numpy as jnp
        scale = 3
        def inner(x): return jnp.sum(x) * scale
        def outer(x, y=2): return [inner(x + y) for _ in range(3)]
        print(describe(outer).key)
        """
    )
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        run_here(program)
    other = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert other.stdout.decode() == here.getvalue()


def test_errors_of_workers_survive_pickling():
    for name in ("WorkerCrashedError", "WorkerError", "WorkerTimeoutError"):
        error = getattr(errors, name)("text")
        assert repr(pickle.loads(pickle.dumps(error))) == repr(error)
