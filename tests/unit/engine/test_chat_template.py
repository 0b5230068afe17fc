"""Tests chat templates from a model's folder: no prompt is computed before the template is
rendered, and each error is of one kind, in one line."""

from __future__ import annotations

import tracemalloc

import pytest

from moonpool.text.tokenizer import ChatTemplateError
from moonpool.text.tokenizers.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate

BIG = 10**8
BOMBS = (
    f"{{{{ 'a' * {BIG} }}}}",
    f"{{{{ ('a' * {BIG}) ~ 'b' }}}}",
    f"{{{{ 'a'|center({BIG}) }}}}",
    f"{{{{ ('a' * {BIG})[0] }}}}",
    f"{{{{ ('a' * {BIG}).x }}}}",
    f"{{{{ 'a' * {BIG} == 'b' }}}}",
    f"{{{{ x if 'a' * {BIG} else y }}}}",
    f"{{{{ ['a' * {BIG}] }}}}",
    f"{{{{ {{'k': 'a' * {BIG}}} }}}}",
    f"{{{{ 'a' * {BIG} is string }}}}",
    f"{{{{ -([0] * {BIG})|length }}}}",
    f"{{{{ '%{BIG}d' % 1 }}}}",
    f"{{{{ '{{:>{BIG}}}'.format(1) }}}}",
    "{{ 7 ** (10**6) }}",
    f"{{% set x = 'a' * {BIG} %}}",
    f"{{% set x %}}{{{{ 'a' * {BIG} }}}}{{% endset %}}",
    f"{{% for x in 'a' * {BIG} %}}{{% endfor %}}",
    f"{{% for x in [0] * {BIG} if 'a' * {BIG} %}}{{% endfor %}}",
    f"{{% with x = 'a' * {BIG} %}}{{% endwith %}}",
    f"{{% filter center({BIG}) %}}x{{% endfilter %}}",
    f"{{% if 'a' * {BIG} %}}x{{% endif %}}",
    f"{{% autoescape true %}}{{{{ 'a' * {BIG} }}}}{{% endautoescape %}}",
    f"{{% macro f(x='a' * {BIG}) %}}{{% endmacro %}}",
    f"{{{{ range({BIG})|list }}}}",
)


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_is_never_reached_costs_nothing(bomb: str) -> None:
    template = ChatTemplate(f"{{% if messages[0] == 'no' %}}{bomb}{{% endif %}}yes")
    tracemalloc.start()
    try:
        template.check()
        assert template.render(["x"], True, None, {}) == "yes"  # type: ignore[list-item]
        assert tracemalloc.get_traced_memory()[1] < BIG // 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% autoescape 'a' * 10 %}x{% endautoescape %}",
        "{{ " + "a+" * 20000 + "a }}",
        "x" * (MAX_TEMPLATE_CHARS + 1),
    ],
)
def test_what_does_not_compile_is_one_clear_line(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the model's chat template") as caught:
        ChatTemplate(source).check()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "source",
    [
        "{{ 7 ** (10**5) }}",
        "{{ 1 // 0 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ messages.append(1) }}",
        "{{ 1e999|int }}",
        "{{ raise_exception('a\nb' * 10000) }}",
        "{{ strftime_now('\ud800') }}",
        "{{ nothing.at.all }}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{{ 'x'|no_such_filter }}",
        "{{ ''.join(1) }}",
        "{{ {}|groupby }}",
    ],
)
def test_what_fails_is_one_clear_line(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template") as caught:
        ChatTemplate(source).render([], True, None, {})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
