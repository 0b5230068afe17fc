"""Plants a fault: a load does not compare the copied bytes with their checksums. vLLM calls
`register` in each of its processes, as a plugin of `planted-0.dist-info`."""

from __future__ import annotations


def register() -> None:
    import numpy as np

    from moonpool_engine.vllm.worker_side import WorkerSide

    checked = WorkerSide._copy_layers

    def unchecked(self: WorkerSide, *args: object) -> list[np.ndarray]:
        return [np.zeros_like(wrong) for wrong in checked(self, *args)]  # type: ignore[arg-type]

    WorkerSide._copy_layers = unchecked  # type: ignore[method-assign, assignment]
