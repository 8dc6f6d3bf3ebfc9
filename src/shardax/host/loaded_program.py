# SPDX-License-Identifier: Apache-2.0
"""Loaded programs: the program of an artifact, on the devices that it runs on here.

A program maps lists of *words* (``host.array_form``) to lists of words and has no state. It runs in
one of three ways: compiled here; as part of a larger program that is being traced; or as the
snapshot that came with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardax.core._jax import Tracer
from shardax.core.errors import ArtifactCallError, PickleWriteError
from shardax.host.array_form import ArrayForm
from shardax.host.signature import Signature
from shardax.transforms.jit import jit


class LoadedProgram:
    """The program of an artifact; see the module's text.

    Args:
        exported: What ``jax.export`` read.
        signature: The artifact's signature.
        devices: The devices, as many as it was exported for.
        mesh: The exporting mesh over these devices; None for one device.

    Attributes:
        jitted: The program as a function of words: (state, inputs) to (results, written state).
        step: A call of a ``LoadedFunction`` with it, compiled as a whole.
        snapshot: The program compiled beforehand, or None.
        snapshot_unused: Why there is none.
    """

    def __init__(
        self, exported: Any, signature: Signature, devices: Sequence[Any], mesh: Mesh | None
    ) -> None:
        self.exported = exported
        self.signature = signature
        self.devices = list(devices)
        self.mesh = mesh
        self.snapshot: Any = None
        self.snapshot_unused = "not asked for: trust_snapshot=True"
        written = [self.place_of(entry.form) for entry in signature.state if entry.written]
        results = [None] * len(signature.output_forms)
        self.step = jit(lambda function, inputs: function._run(inputs))
        places = None if mesh is None else (results, written)
        self.jitted = jax.jit(self._differentiable(exported.call), out_shardings=places)

    def __deepcopy__(self, memo: Any) -> LoadedProgram:
        return self  # it has no state

    def __reduce__(self) -> Any:
        raise PickleWriteError(
            f"The loaded {self.signature} cannot be pickled: its program belongs to this process. "
            "Send the path of the artifact and load it there, sx.host.load(path); its state is "
            "sx.state(loaded)."
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.signature}>"

    def _differentiable(self, call: Any) -> Any:
        """Returns the program, made to refuse derivatives if it was exported without."""
        program = jax.custom_jvp(lambda state, inputs: tuple(call(state, inputs)))

        @program.defjvp
        def _refuse(primals: Any, tangents: Any) -> Any:
            raise ArtifactCallError(
                f"{self.signature.name} was exported without derivatives. Export it with "
                "vjp_order=1, or more for higher ones."
            )

        return program if self.signature.vjp_order == 0 else program.fun

    def place_of(self, form: ArrayForm) -> NamedSharding | None:
        """Returns where an array of the state goes; None for the default device."""
        return None if self.mesh is None else form.sharding(self.mesh)

    @property
    def trees(self) -> tuple[Any, Any]:
        """Structure of the program's (arguments, results)."""
        signature = self.signature
        count = sum(len(item.forms) for item in signature.inputs)
        written = sum(entry.written for entry in signature.state)
        state = [0] * len(signature.state)
        results = [0] * len(signature.output_forms)
        return (
            jax.tree.structure(((state, [0] * count), {})),
            jax.tree.structure((results, [0] * written)),
        )

    def compiled(self) -> Any:
        """Returns the program compiled for these devices and fixed sizes."""
        forms = [entry.form for entry in self.signature.state]
        shapes = self.exported.in_avals
        state = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.place_of(form))
            for a, form in zip(shapes, forms, strict=False)
        ]
        inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes[len(forms) :]]
        return self.jitted.lower(state, inputs).compile()

    def run(self, state: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the program on words; returns (results, new values of the written state)."""
        given = list(state), list(inputs)
        traced = any(isinstance(item, Tracer) for item in (*state, *inputs))
        if self.snapshot is not None and not traced:
            _, places = self.snapshot.input_shardings[0]
            return self.snapshot(given[0], jax.device_put(given[1], places))
        return self.jitted(*given)

    def explained(self, error: Exception) -> Exception:
        """Returns what JAX says about exported programs in terms of ``export``."""
        text, name = str(error), self.signature.name
        if "refining shapes" in text and self.signature.constraints:
            return ArtifactCallError(
                f"The sizes of the call break what {name} was exported under: "
                f"{', '.join(self.signature.constraints)}. It takes {self.signature}."
            )
        if "atching rule" in text:
            return ArtifactCallError(
                f"{name} cannot be mapped by vmap: an exported program is as it is. Export it with "
                "a dimension for the batch, dynamic={'batch': 0}, or call it in a loop (sx.scan)."
            )
        return error
