"""The agreement between all processes of one vLLM that they need before they use the pool. All
calls are collective: each process makes the same calls in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moonpool_engine.vllm.cache_layout import LayoutRefused


def agreed(act: Callable[[], None]) -> None:
    """Calls `act` on all ranks. Raises LayoutRefused on all ranks if it fails on one: whatever the
    error was, vLLM can serve without the pool."""
    refusal = _refusal_of(act)
    for rank_group in _rank_groups():
        refusal = next(filter(None, _gathered(refusal, rank_group)), "")
    if refusal:
        raise LayoutRefused(refusal)


def of_all_stages(value: bytes) -> list[bytes]:
    """The value of this rank's place in each pipeline stage, in their order."""
    return _gathered(value, _rank_groups()[1])


def is_last_stage() -> bool:
    """Whether this rank has the last layer."""
    return bool(_rank_groups()[1].is_last_rank)


def _refusal_of(act: Callable[[], None]) -> str:
    """Why `act` failed, in one line; empty if it did not."""
    try:
        act()
    except LayoutRefused as error:
        return str(error)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return f"the layout could not be proven: {type(error).__name__}: {said}"
    return ""


def _rank_groups() -> tuple[Any, Any]:
    """Returns the ranks that share layers, and the ranks that share tokens."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_tp_group(), get_pp_group()


def _gathered(value: Any, rank_group: Any) -> list[Any]:
    import torch

    if rank_group.world_size == 1:
        return [value]
    found: list[Any] = [None] * rank_group.world_size
    torch.distributed.all_gather_object(found, value, group=rank_group.cpu_group)
    return found
