"""The fields by which a call of an agent describes its program."""

from __future__ import annotations

import msgspec

from moonpool.types import Struct


class ProgramCall(Struct, frozen=True):
    """One call of a session that is a program. `number`: the number of the program in its run."""

    number: int
    step: int
    is_last: bool

    def xargs(self, run: str, answer_tokens: int) -> dict[str, str]:
        """The `vllm_xargs` that name the program: JSON as a text, because vLLM takes no object. All
        fields are read by vllm-router, and all but the step by moonpool."""
        fields = {
            "program_id": f"{run}-{self.number}",
            "step_id": self.step,
            "expected_resume": not self.is_last,
            "expected_output_length": answer_tokens,
        }
        return {"agentic_context": msgspec.json.encode(fields).decode()}
