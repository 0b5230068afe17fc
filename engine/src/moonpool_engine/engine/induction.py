"""The built-in default model: a Llama with constructed weights instead of learned ones.

The model continues a text as the text continued when the same bytes last occurred. So any wrong,
stale or misplaced KVCache block shows in the answer (docs/decisions/batch-invariance.md).

The residual stream (hidden 288) consists of eighteen slots of 16 numbers. Slot 0 holds the code of
the row's own token, slot 17 the constant 1. The layers fill the other slots, each with one
attention head:

* **Shift** layers copy the slots filled so far from exactly 1, then 2, then 4 tokens back. Slots
  1..7 then hold the codes of the seven previous tokens. The score is a sum of cosines in the fast
  RoPE pairs, largest at that distance.
* The **search** layer attends to the position whose *predecessors* equal the latest tokens (near
  predecessors weigh more) and copies those predecessors to slots 8..14. Content lies in the slow
  RoPE pairs, which hardly rotate over the whole context. Between equal contexts, a slight
  preference for the recent one falls with the logarithm of the distance (all middle pairs, in
  phase).
* The **answer** layer uses only the result of the search layer. This layer attends to the position
  with those predecessors and copies the token there to slot 16. If both layers searched
  independently, one could hide damage to the other's blocks.

The codes are the 256 words of the Nordstrom-Robinson code (any two overlap at most 1/4) and three
more for the special tokens. Every RMSNorm sees a known number of unit slots, which its weights
cancel.
"""

from __future__ import annotations

import hashlib
import itertools

import torch
from torch import Tensor

from moonpool_engine.engine.spec import ModelSpec, RopeSpec
from moonpool_engine.engine.tensors import tensor_shapes

NAME = "moonpool/induction"
BOS, EOS = 256, 257  # token 258 is padding

CODE = 16
HEAD_DIM = 256
HIDDEN = 18 * CODE
PAIRS = HEAD_DIM // 2
THETA = 1e12
FAST = range(22)  # pairs that turn by more than 0.01 per token
MIDDLE = range(22, 64)
SLOW = range(64, 128)  # pairs that turn by less than a millionth per token

FOUND = 8  # the first slot of the search layer's result
ANSWER = 16
ONE = 17 * CODE  # the element with the constant 1
SHIFTS = (1, 2, 4)
NUM_LAYERS = len(SHIFTS) + 2

SHIFT_SHARPNESS = 60.0
WEIGHTS = (256.0, 160.0, 100.0, 64.0, 40.0, 24.0, 16.0)  # of a match 1, 2, ... tokens back
RECENCY = 1.0
LOGIT_SCALE = 24.0

# Quadratic forms over GF(2)^4 (bit e: the product of the e-th pair of variables) whose differences
# all have full rank, a Kerdock set: the cosets of the Reed-Muller code RM(1, 4) that they name are
# the Nordstrom-Robinson code.
_KERDOCK = (0, 12, 22, 27, 39, 41, 53, 58)

SPEC = ModelSpec(
    family="llama",
    vocab_size=259,
    hidden_size=HIDDEN,
    num_layers=NUM_LAYERS,
    num_heads=1,
    num_kv_heads=1,
    head_dim=HEAD_DIM,
    intermediate_size=16,
    max_positions=32768,
    rms_eps=1e-6,
    rope=RopeSpec(theta=THETA),
    bos_token_id=BOS,
    eos_token_ids=(EOS,),
)


class InductionWeights:
    """The tensors of `SPEC`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors = {
            name: torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
            for name, shape in tensor_shapes(SPEC).items()
        }
        self._fill()

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(NAME.encode())
        for tensor in self._tensors.values():
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def load(self, name: str) -> Tensor:
        return self._tensors[name].to(self._dtype, copy=True)

    def matrix(self, name: str) -> Tensor:
        return self.load(name)

    def _fill(self) -> None:
        codes = token_codes()
        self._tensors["model.embed_tokens.weight"][:, :CODE] = codes
        self._tensors["model.embed_tokens.weight"][:, ONE] = 1
        for layer, distance in enumerate(SHIFTS):
            self._norm(f"model.layers.{layer}.input_layernorm.weight", unit_slots=1 + distance)
            self._shift(layer, distance)
        search, answer = len(SHIFTS), len(SHIFTS) + 1
        self._norm(f"model.layers.{search}.input_layernorm.weight", unit_slots=9)
        self._search(search, queries=range(7), copied=range(1, 8), to=FOUND)
        self._norm(f"model.layers.{answer}.input_layernorm.weight", unit_slots=16)
        self._search(answer, queries=range(FOUND, FOUND + 7), copied=range(1), to=ANSWER)
        self._norm("model.norm.weight", unit_slots=17)
        head = self._tensors["lm_head.weight"]
        head[:, ANSWER * CODE : (ANSWER + 1) * CODE] = LOGIT_SCALE * codes

    def _attention(self, layer: int, part: str) -> Tensor:
        return self._tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"]

    def _norm(self, name: str, unit_slots: int) -> None:
        """Sets norm weights that give `unit_slots` unit slots unit length after RMSNorm."""
        self._tensors[name].fill_((unit_slots / HIDDEN) ** 0.5)

    def _shift(self, layer: int, distance: int) -> None:
        """Attends `distance` tokens back; copies slots 0 .. distance - 1 to the next slots."""
        q, k = self._attention(layer, "q"), self._attention(layer, "k")
        sharpness = SHIFT_SHARPNESS * HEAD_DIM**0.5
        for pair in FAST:
            angle = torch.tensor(THETA ** (-pair / PAIRS) * distance, dtype=torch.float64)
            q[pair, ONE] = sharpness * angle.cos()
            q[pair + PAIRS, ONE] = -sharpness * angle.sin()
            k[pair, ONE] = 1
        self._copy(layer, range(distance), to=distance)

    def _search(self, layer: int, queries: range, copied: range, to: int) -> None:
        """Attends to the position whose predecessors (slots 1..7) equal the query slots."""
        q, k = self._attention(layer, "q"), self._attention(layer, "k")
        places = [*SLOW, *(pair + PAIRS for pair in SLOW)]
        for i, (query, weight) in enumerate(zip(queries, WEIGHTS, strict=True)):
            for j in range(CODE):
                place = places[i * CODE + j]
                q[place, query * CODE + j] = weight * HEAD_DIM**0.5
                k[place, (i + 1) * CODE + j] = 1
        for pair in MIDDLE:
            q[pair, ONE] = RECENCY * HEAD_DIM**0.5
            k[pair, ONE] = 1
        self._copy(layer, copied, to)

    def _copy(self, layer: int, slots: range, to: int) -> None:
        """Copies `slots` of the attended position to the slots from `to` on."""
        begin, width = slots.start * CODE, len(slots) * CODE
        self._attention(layer, "v")[:width, begin : begin + width].fill_diagonal_(1)
        self._attention(layer, "o")[to * CODE : to * CODE + width, :width].fill_diagonal_(1)


def token_codes() -> Tensor:
    """Returns [259, 16] of +-1/4: one unit vector per token; those of any two bytes overlap at most
    1/4."""
    points = [[(x >> i) & 1 for i in range(4)] for x in range(16)]
    pairs = list(itertools.combinations(range(4), 2))
    words = []
    for form in _KERDOCK:
        quadratic = [
            sum((form >> e) & p[a] & p[b] for e, (a, b) in enumerate(pairs)) for p in points
        ]
        for line in range(32):
            linear = [(line >> 4) + sum((line >> i) & p[i] for i in range(4)) for p in points]
            words.append([(s + t) & 1 for s, t in zip(quadratic, linear, strict=True)])
    words += [[(word >> i) & 1 for i in range(16)] for word in _special_words()]
    return (1 - 2 * torch.tensor(words, dtype=torch.float32)) / 4


def _special_words() -> tuple[int, int, int]:
    """Returns three words that are orthogonal to each other and overlap any byte's word by at most
    1/2."""
    return 15, 51, 85
