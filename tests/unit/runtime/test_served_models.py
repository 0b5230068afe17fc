"""Tests the models of one head: which vLLM server serves which model, and by which names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from moonpool.api.serving_backend import AdapterCard, Output
from moonpool.conductor.actions import (
    InstanceForgotten,
    InstanceJoined,
    InstanceLost,
    InstancesExpected,
    Reported,
    RequestCancelled,
)
from moonpool.config.tables import Config, ModelConfig, VllmConfig
from moonpool.head.cluster_error import ClusterError
from moonpool.head.models.model_loading import load_offered, named_offer
from moonpool.head.models.served_model import HeadSettings, ServedModel
from moonpool.head.models.served_models import ServedModels
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import InstanceInfo, LeaveRequested
from moonpool.protocol.model_offer import POOLING_PATHS, ModelOffer, OfferedAdapter
from moonpool.request_record import RequestRecord
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Role
from moonpool.vllm.measure import ASSUMED_COST
from moonpool.vllm.nominal_layout import NO_ADDRESS

ROOT = "random:hidden=64,layers=1,heads=2,kv_heads=1,inter=64,vocab=300"
OTHER = "random:hidden=32,layers=1,heads=2,kv_heads=1,inter=64,vocab=280"


class Host:
    def now(self) -> float:
        return 1.0

    async def submit(
        self, model: ServedModel, request: Request, delivered: Any, call: Any = None
    ) -> AsyncGenerator[Output, None]:
        yield Output(finish_reason=FinishReason.STOP)

    def abort(self, request_id: RequestId, reason: str, model: ServedModel) -> None:
        model.handle(RequestCancelled(request_id, reason))

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int, model: ServedModel
    ) -> dict[str, float] | None:
        return None

    def unsettled(self, model: ServedModel) -> list[RequestRecord]:
        return []

    def on_new_model(self, model: ServedModel) -> None:
        pass

    def on_moved(self, instance_id: InstanceId, former: ServedModel) -> None:
        former.handle(InstanceForgotten(instance_id))


def models(**settings: Any) -> ServedModels:
    config = Config(model=ModelConfig(**({"name": "", "dtype": "float32"} | settings)))
    return ServedModels(Host(), HeadSettings(config, "l", {}, {}))


def offer(*names: str, root: str = ROOT, **others: Any) -> ModelOffer:
    return ModelOffer(root=root, names=names or ("m",), **({"max_model_tokens": 512} | others))


def take(served: ServedModels, name: str, offered: ModelOffer) -> ServedModel:
    return asyncio.run(served.of_offer(InstanceId(name), offered))


def test_servers_of_one_model_share_it_with_all_their_names() -> None:
    served = models()
    first = take(served, "a", offer("m", "n"))
    adapter = OfferedAdapter(name="poet", root="/poet")
    again = take(served, "b", offer("n", "o", adapters=(adapter,)))
    assert again is first
    card = first.card
    assert (card.model_id, card.other_names) == ("m", ("n", "o"))
    assert card.adapters == (AdapterCard(name="poet", adapter="poet", root="/poet"),)
    assert card.aliases == (ROOT,)
    assert card.root == ROOT


def test_another_root_is_another_model() -> None:
    served = models()
    first, second = take(served, "a", offer("m")), take(served, "b", offer("x", root=OTHER))
    assert first is not second
    assert [model.card.model_id for model in served] == ["m", "x"]
    assert served.default is first
    assert served.of(InstanceId("b")) is second
    assert served.of(InstanceId("unknown")) is first


def test_the_same_name_joins_places_on_several_machines() -> None:
    served = models(name="")
    first = take(served, "a", offer("m"))
    assert take(served, "b", offer("m", root="/elsewhere/m")) is first
    assert "/elsewhere/m" in first.card.aliases
    assert take(served, "c", offer("x", root=f"/other/{ROOT}")) is first, "its folder's name"


def test_two_folders_of_one_name_on_this_machine_are_two_models(tmp_path: Path) -> None:
    from moonpool.head.models.served_models import is_same_model

    for run in ("one", "two"):
        (tmp_path / run / "hf").mkdir(parents=True)
    model = take(models(), "a", offer("m"))
    model.key = str(tmp_path / "one" / "hf")
    assert not is_same_model(model, offer("x", root=str(tmp_path / "two" / "hf")))
    assert is_same_model(model, offer("x", root=str(tmp_path / "two" / ".." / "one" / "hf")))
    assert is_same_model(model, offer("x", root="/not/here/hf"))


def test_what_pools_is_apart_from_what_generates() -> None:
    served = models()
    generating = take(served, "a", offer("m"))
    pooling = take(served, "b", offer("m", paths=POOLING_PATHS))
    assert generating is not pooling
    assert (generating.card.generates, pooling.card.generates) == (True, False)
    assert pooling.card.forwards == POOLING_PATHS
    assert "/score" not in generating.card.forwards


def test_a_named_model_is_the_only_one() -> None:
    served = models(name=ROOT)
    config = Config(model=ModelConfig(name=ROOT, dtype="float32"))
    served.add(ROOT, asyncio.run(load_offered(config, named_offer(ROOT), is_first=True)))
    model = take(served, "a", offer("m"))
    assert len(served) == 1
    assert (model.card.model_id, model.card.aliases) == ("m", (ROOT,))
    with pytest.raises(ClusterError, match="but the head serves"):
        take(served, "b", offer("x", root=OTHER))
    assert take(served, "c", offer("y", root="/models/y.gguf")) is model


def test_a_given_name_and_context_are_those_of_the_first() -> None:
    served = models(served_name="front", max_model_tokens=64)
    first, second = take(served, "a", offer("m")), take(served, "b", offer("x", root=OTHER))
    assert (first.card.model_id, first.card.other_names) == ("front", ())
    assert first.card.max_model_tokens == 64
    assert second.card.model_id == "x"


def test_a_model_that_cannot_be_read_is_one_line() -> None:
    for root, says in (("/nowhere/at/all", "cannot be read here"), ("/x.gguf", "GGUF file")):
        with pytest.raises(ClusterError, match=says) as raised:
            take(models(), "a", offer("m", root=root))
        assert "\n" not in str(raised.value)


def test_two_servers_of_a_new_model_at_once_make_one() -> None:
    served = models()

    async def both() -> None:
        await asyncio.gather(*(served.of_offer(InstanceId(n), offer("m")) for n in "ab"))

    asyncio.run(both())
    assert len(served) == 1


def test_the_next_head_knows_the_models_of_the_one_before() -> None:
    before = models()
    take(before, "a", offer("m"))
    take(before, "b", offer("m", root="/elsewhere/m"))
    take(before, "c", offer("x", root=OTHER))
    after = models()
    for name in ("a", "b", "c"):
        left = before.offer(InstanceId(name))
        assert left is not None
        asyncio.run(after.expect_offer(InstanceId(name), left))
    assert [model.key for model in after] == [ROOT, OTHER]
    assert after.of(InstanceId("b")) is after.default
    assert take(after, "b", offer("m", root="/elsewhere/m")) is after.default


def test_parsing_is_left_to_servers_that_all_do_it() -> None:
    served = models()
    model = take(served, "a", offer("m", parses=("tools", "reasoning")))
    assert model.card.parses == ("tools", "reasoning")
    model.handle(InstancesExpected({InstanceId("a"): Role.MIXED}))
    take(served, "b", offer("m", parses=("reasoning",)))
    assert model.card.parses == ("reasoning",)
    model.handle(InstancesExpected({InstanceId("b"): Role.MIXED}))
    take(served, "a", offer("m"))  # the server has restarted without parsers
    assert model.card.parses == ()
    wanted = Config(
        model=ModelConfig(name="", dtype="float32"), vllm=VllmConfig(parsers="moonpool")
    )
    own = ServedModels(Host(), HeadSettings(wanted, "l", {}, {}))
    assert take(own, "a", offer("m", parses=("tools",))).card.parses == ()


POET, COOK = (OfferedAdapter(name=name, root=f"/{name}") for name in ("poet", "cook"))


def join(
    served: ServedModels,
    name: str,
    offered: ModelOffer,
    num_blocks: int = 100,
    role: Role = Role.MIXED,
) -> None:
    """Adds a server, as the head sees it."""
    model = take(served, name, offered)
    layout = BlockLayout(
        model_fingerprint="m",
        dtype="float32",
        block_tokens=16,
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
    )
    info = InstanceInfo(
        instance_id=InstanceId(name),
        role=role,
        incarnation=1,
        address=NO_ADDRESS,
        layout=layout,
        num_blocks=num_blocks,
        cost=ASSUMED_COST,
        pid=1,
        host="x",
    )
    model.limit_context_to(info, offered)
    served.note_present(info.instance_id)
    model.handle(InstanceJoined(info))


def leave(served: ServedModels, name: str, for_good: bool) -> None:
    instance_id = InstanceId(name)
    model = served.of(instance_id)
    assert model is not None
    if for_good:
        model.handle(Reported(instance_id, LeaveRequested(within_s=1.0)))
    model.handle(InstanceLost(instance_id, "gone"))
    served.note_lost(instance_id)


def adapters(model: ServedModel) -> list[str]:
    return [card.name for card in model.card.adapters]


def test_adapters_are_those_of_the_servers_that_are_there() -> None:
    served = models()
    join(served, "a", offer("m"))
    join(served, "b", offer("m", adapters=(POET,)))
    model = served.default
    assert model is not None and adapters(model) == ["poet"]
    served.note_adapters(InstanceId("a"), (POET, COOK))
    assert adapters(model) == ["poet", "cook"]
    served.note_adapters(InstanceId("b"), ())
    assert adapters(model) == ["poet", "cook"], "another has it still"
    assert served.offers[InstanceId("a")].adapters == (POET, COOK), "as the next head is told"
    leave(served, "a", for_good=False)
    assert adapters(model) == ["poet", "cook"], "it should be back soon"
    join(served, "a", offer("m", adapters=(COOK,)))
    assert adapters(model) == ["cook"]
    leave(served, "a", for_good=True)
    assert adapters(model) == []


def test_the_context_is_the_longest_of_the_servers_that_are_there() -> None:
    served = models()
    join(served, "a", offer("m", max_model_tokens=512))
    join(served, "b", offer("m", max_model_tokens=128))
    join(served, "c", offer("m", max_model_tokens=256))
    model = served.default
    assert model is not None and model.card.max_model_tokens == 512
    leave(served, "a", for_good=False)
    assert model.card.max_model_tokens == 512, "it should be back soon"
    join(served, "a", offer("m", max_model_tokens=200))
    assert model.card.max_model_tokens == 256
    leave(served, "c", for_good=True)
    assert model.card.max_model_tokens == 200
    leave(served, "a", for_good=True)
    assert model.card.max_model_tokens == 128
    leave(served, "b", for_good=True)
    assert model.card.max_model_tokens == 128


def test_the_context_is_one_that_some_server_prefills_and_some_server_decodes() -> None:
    served = models()
    join(served, "a", offer("m", max_model_tokens=512), role=Role.PREFILL)
    model = served.default
    assert model is not None and model.card.max_model_tokens == 512
    join(served, "b", offer("m", max_model_tokens=128), role=Role.PREFILL)
    join(served, "c", offer("m", max_model_tokens=256), role=Role.DECODE)
    assert model.card.max_model_tokens == 256


def test_nobody_waits_for_a_server_that_has_another_model_now() -> None:
    served = models()
    join(served, "a", offer("m"))
    join(served, "b", offer("m", adapters=(POET,), max_model_tokens=64))
    model = served.default
    assert model is not None
    leave(served, "b", for_good=False)
    assert InstanceId("b") in model.conductor.expected
    join(served, "b", offer("x", root=OTHER))
    assert InstanceId("b") not in model.conductor.expected
    assert (adapters(model), model.card.max_model_tokens) == ([], 512)
    other = served.of(InstanceId("b"))
    assert other is not None and other.card.model_id == "x"


def test_the_default_model_is_that_of_the_first_named_server() -> None:
    vllm = VllmConfig(mixed=("http://a", "http://b"))
    config = Config(model=ModelConfig(name="", served_name="x", dtype="float32"), vllm=vllm)

    async def both() -> ServedModels:
        served = ServedModels(Host(), HeadSettings(config, "l", {}, {}))
        later = asyncio.create_task(served.of_offer(InstanceId("mixed-1"), offer("b", root=OTHER)))
        await asyncio.sleep(0)
        await served.of_offer(InstanceId("mixed-0"), offer("a"))
        await later
        return served

    assert [model.card.model_id for model in asyncio.run(both())] == ["x", "b"]
