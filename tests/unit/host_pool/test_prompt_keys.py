"""Tests keys of a vLLM request's blocks: equal content gives equal keys, and other content does
not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.types import BlockKey
from moonpool_engine.vllm.prompt_keys import PromptKeys

SIZE = 4


def request(tokens: list[int], **more: Any) -> Any:
    return SimpleNamespace(all_token_ids=list(tokens), **more)


def image(offset: int, length: int, name: str) -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(mm_position=place, identifier=name)


def content_of(lora: Any) -> str:
    return f"content of {lora.lora_path}"


def keys(one: Any) -> list[BlockKey]:
    return list(PromptKeys(one, SIZE, content_of).extend(len(one.all_token_ids) // SIZE))


def test_a_root_key_as_salt_gives_the_conductors_keys() -> None:
    tokens = list(range(13))
    root = root_key(b"layout", "tenant")
    assert keys(request(tokens, cache_salt=root.hex())) == block_keys(tokens, SIZE, root)


def test_everything_that_makes_content_counts() -> None:
    tokens = list(range(12))
    lora = SimpleNamespace(lora_path="a")
    other_lora = SimpleNamespace(lora_path="b")
    kinds = [
        request(tokens),
        request([*tokens[:-1], 99]),
        request(tokens, cache_salt="s"),
        request(tokens, cache_salt="t"),
        request(tokens, lora_request=lora),
        request(tokens, lora_request=other_lora),
        request(tokens, lora_request=lora, cache_salt="s"),
        request(tokens, lora_request=lora, cache_salt=root_key(b"", "x").hex()),
        request(tokens, mm_features=[image(1, 3, "cat")]),
        request(tokens, mm_features=[image(1, 3, "dog")]),
        request(tokens, mm_features=[image(1, 2, "cat")]),
        request(tokens, mm_features=[image(1, 3, "cat"), image(5, 2, "dog")]),
    ]
    last = [keys(one)[-1] for one in kinds]
    assert len(set(last)) == len(kinds)


def test_an_image_changes_the_blocks_from_it_on() -> None:
    tokens = list(range(16))
    plain, cat = keys(request(tokens)), keys(request(tokens, mm_features=[image(9, 2, "cat")]))
    assert plain[:2] == cat[:2]
    assert plain[2] != cat[2]
    assert plain[3] != cat[3]


def test_embeddings_as_a_prompt_have_no_keys() -> None:
    assert keys(request(list(range(12)), prompt_embeds=object())) == []


@given(st.lists(st.integers(0, 100), max_size=60), st.data())
def test_keys_do_not_depend_on_how_the_request_grew(tokens: list[int], data: Any) -> None:
    features = [image(3, 5, "cat")] if data.draw(st.booleans()) else []
    whole = keys(request(tokens, mm_features=features))
    grown = request([], mm_features=features)
    found = PromptKeys(grown, SIZE, content_of)
    for token in tokens:
        grown.all_token_ids.append(token)
        if data.draw(st.booleans()):
            found.extend(len(grown.all_token_ids) // SIZE)
    assert found.extend(len(tokens) // SIZE) == whole
