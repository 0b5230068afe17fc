r"""Tests grammars in GBNF: the samples that llama.cpp and vLLM document, and random grammars
compared with Python's `re`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from moonpool.api.grammars.gbnf import GbnfError, gbnf_to_lark, is_gbnf
from moonpool.text.grammar import first_error, matches_grammar

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
SQL = """
    root ::= select_statement

    select_statement ::= "SELECT " column " from " table " where " condition

    column ::= "col_1 " | "col_2 "

    table ::= "table_1 " | "table_2 "

    condition ::= column "= " number

    number ::= "1 " | "2 "
"""
SUMS = r"""
root  ::= (expr "=" term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= num | "(" expr ")"
num   ::= [0-9]+
"""
CHESS = r"""
root   ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move   ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
SAMPLES = [
    (JSON, ['{"a": [1, true, {"b": "x\\u00e4\\n"}], "c": -1.5e3}', "{}"], ["[1]", '{"a": }', ""]),
    (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_3 ", ""]),
    (SUMS, ["1+2=3\n", "(1+2)*3=9\n4=4\n"], ["1+=3\n", "1=1", "(1=1\n"]),
    (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n3. O-O-O bxa8=Q+\n"], ["1. e4 e5\n", "1. e9 e5\n2. a1 a2\n"]),
    ('root ::= "a"\n  | "b" [^x]', ["a", "bä", "b\n"], ["b", "bx"]),
    ('root ::= item{2,3}\nitem ::= "ä" | .', ["ää", "xyz", "\n\n"], ["x", "wxyz"]),
    (r'root ::= "\x41\u00e9\U0001F600\t\]"', ["Aé😀\t]"], ["A"]),
    ("root ::= [-a] [a-] [\\]\\-^] [^]", ["-a]x", "a--\n"], ["b-]x"]),
    ('root ::= [a-z]* "end"', ["end", "endend", "enxend"], ["en", "endx"]),
    ('root ::= "a" root | ""', ["", "a", "aaa"], ["b"]),
    ('root ::= x-1 x_2{2} x3{1,}\nx-1 ::= "1"\nx_2 ::= "2"\nx3 ::= "3"', ["1223"], ["123"]),
]


def lark(text: str) -> str:
    assert is_gbnf(text)
    grammar: str = LLMatcher.grammar_from_lark(gbnf_to_lark(text))
    return grammar


@pytest.mark.parametrize(("text", "right", "wrong"), SAMPLES)
def test_samples_match_what_they_describe(text: str, right: list[str], wrong: list[str]) -> None:
    grammar = lark(text)
    assert first_error(grammar) == ""
    for answer in right:
        assert matches_grammar(grammar, answer), answer
    for answer in wrong:
        assert not matches_grammar(grammar, answer), answer


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('a ::= "b"', "no rule named 'root'"),
        ("root ::= x", "the rule 'root' uses 'x', which is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ('\n\nroot ::= "a', "line 3: '\"a' is not understood"),
        ("root ::= [z-a]", "a range that ends before it begins"),
        ("root ::= []", "matches no character"),
        ("root ::= *", "nothing before '*'"),
        ('root ::= ("a"', "a ')' is missing"),
        ('root ::= "a")', "a rule such as root ::= ... is expected"),
        (r'root ::= "\xZ"', "is no escape"),
        (r"root ::= [\uD800]", "is no character"),
        (r'root ::= "\UFFFFFFFF"', "is no character"),
        ('root ::= "a"{3,1}', "is no range of repetitions"),
        ('root ::= "a"{}', "is no range of repetitions"),
        ('root ::= "a"?*', "two repetitions"),
        ("root ::= <think>", "is not understood"),
        ("root ::= " + "(" * 10_000, "may be nested"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(text: str, why: str) -> None:
    with pytest.raises(GbnfError) as found:
        gbnf_to_lark(text)
    assert why in str(found.value)
    assert "\n" not in str(found.value)


def test_lark_is_not_taken_for_gbnf() -> None:
    for text in ('start: "::="', "start: A\nA: /x ::= y/", '// root ::= "a"\nstart: "a"', ""):
        assert not is_gbnf(text)


@pytest.mark.long
def test_a_long_chain_of_rules_is_read_in_one_go() -> None:
    """Makes rules that each use the next rule, in both orders. The work must not grow with the
    square of their number."""
    links = [f'r{i} ::= "a" r{i + 1}' for i in range(20_000)]
    for order in (links, links[::-1]):
        text = "\n".join(["root ::= r0", *order, 'r20000 ::= "b"'])
        assert gbnf_to_lark(text).count("\n") == 20_002


SET = st.sampled_from([("[a-c]", "[a-c]"), ("[^b]", "[^b]"), ("[-a]", "[-a]"), (".", "(?s:.)")])
TEXT = st.text('ab]\\"/\n-', max_size=3).map(lambda t: (json.dumps(t), re.escape(t)))
TIMES = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,1}", "{1,}"])


def _repeated(part: tuple[str, str], times: str) -> tuple[str, str]:
    return f"({part[0]}){times}", f"(?:{part[1]}){times}"


def _joined(mark: str) -> Callable[[list[tuple[str, str]]], tuple[str, str]]:
    def join(parts: list[tuple[str, str]]) -> tuple[str, str]:
        gbnf = f" {mark} ".join(part[0] for part in parts)
        return f"({gbnf})", f"(?:{mark.join(part[1] for part in parts)})"

    return join


PATTERN = st.recursive(
    SET | TEXT,
    lambda inner: (
        st.builds(_repeated, inner, TIMES)
        | st.lists(inner, min_size=1, max_size=3).map(_joined(""))
        | st.lists(inner, min_size=1, max_size=3).map(_joined("|"))
    ),
    max_leaves=6,
)


@given(
    pattern=PATTERN, answers=st.lists(st.text('abc]\\"/\n-', max_size=5), min_size=1, max_size=8)
)
def test_a_grammar_without_recursion_is_a_regular_expression(
    pattern: tuple[str, str], answers: list[str]
) -> None:
    gbnf, regex = pattern
    grammar = lark(f"root ::= within\nwithin ::= {gbnf}")
    for answer in answers:
        expected = re.fullmatch(regex, answer) is not None
        assert matches_grammar(grammar, answer) == expected, (gbnf, answer)
