"""The MLP of a layer: one for all rows, or a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool_engine.engine.exponential import sigmoid
from moonpool_engine.engine.ops import Gate, Linear, Ops
from moonpool_engine.engine.packing import PlacedWeights, packed
from moonpool_engine.engine.routing import route
from moonpool_engine.engine.spec import ModelSpec


class GatedMlp:
    """Computes down(activation(gate(x)) * up(x)): [T, hidden] -> [T, hidden]."""

    def __init__(
        self, spec: ModelSpec, weights: PlacedWeights, ops: Ops, prefix: str, has_bias: bool
    ) -> None:
        self._ops = ops
        self._gate = Gate(spec.activation, spec.gate_alpha, spec.gate_limit)
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = packed(weights, ops, names, has_bias)
        self._down = packed(weights, ops, [f"{prefix}.down_proj"], has_bias)

    def __call__(self, normed: Tensor) -> Tensor:
        return self._down(self._ops.glu(self._gate_up(normed), self._gate))


class ExpertsMlp:
    """The weighted sum of the experts chosen for each row: [T, hidden] -> [T, hidden].

    A row's experts are added in the order of their scores, in float32, so the sum does not depend
    on other rows. A shard computes its own experts and a share of the shared ones; the sum over all
    shards is the full output.
    """

    def __init__(self, spec: ModelSpec, weights: PlacedWeights, ops: Ops, prefix: str) -> None:
        assert spec.experts is not None
        self._experts = own = spec.experts
        bias = weights.load(f"{prefix}.router.bias").float() if own.biases else None
        self._router = ops.exact_linear(weights.load(f"{prefix}.router.weight").float(), bias)
        self._correction: Tensor | None = None
        if own.correction:
            self._correction = weights.load(f"{prefix}.router.correction").float()
        self._own = {
            expert: GatedMlp(spec, weights, ops, f"{prefix}.experts.{expert}", own.biases)
            for expert in own.own_experts
        }
        self._shared: GatedMlp | None = None
        self._shared_gate: Linear | None = None
        if own.shared_size:
            self._shared = GatedMlp(spec, weights, ops, f"{prefix}.shared_experts", False)
        if own.shared_gate:
            gate = weights.load(f"{prefix}.shared_gate.weight").float()
            self._shared_gate = ops.exact_linear(gate, None)

    def __call__(self, normed: Tensor) -> Tensor:
        chosen, weights = route(self._router(normed.float()), self._experts, self._correction)
        parts = self._computed(normed, chosen).unflatten(0, chosen.shape)  # shape [T, k, hidden]
        total = parts[:, 0].float() * weights[:, :1]
        for slot in range(1, self._experts.per_token):
            total = total + parts[:, slot].float() * weights[:, slot : slot + 1]
        if self._shared is not None:
            added = self._shared(normed).float()
            if self._shared_gate is not None:
                added = added * sigmoid(self._shared_gate(normed.float()))
            total = total + added
        out: Tensor = total.to(normed.dtype)
        return out

    def _computed(self, normed: Tensor, chosen: Tensor) -> Tensor:
        """Every row's experts: [T * k, hidden], zero for experts of other shards."""
        flat = chosen.flatten()
        # a single row needs no gather, which keeps the number of calls in a decode small
        if len(normed) == 1:
            found = [self._own.get(expert) for expert in flat.tolist()]
            parts = [torch.zeros_like(normed) if mlp is None else mlp(normed) for mlp in found]
            return torch.cat(parts)
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self._experts.count).tolist()
        outputs = normed.new_zeros(len(flat), normed.shape[1])
        first = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            places = order[first : first + count]
            first += count
            if expert in self._own:
                rows = normed[places // self._experts.per_token]
                outputs[places] = self._own[expert](rows)
        return outputs
