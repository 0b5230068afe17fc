"""How byte-level tokenizers split a text into words before they merge bytes.

`tokenizer.ggml.pre` of a GGUF file names a way. The patterns are those of the models' own
`tokenizer.json`, or of Moonshot's code for Kimi; llama.cpp's differ from some of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moonpool.text.shown import shown
from moonpool.text.tokenizer import TokenizerError


class WordSplit(NamedTuple):
    """One way. Each pattern splits the pieces that the previous patterns left."""

    patterns: tuple[str, ...]
    keeps_words: bool = False  # whether a word that is a token is kept, and not merged from parts
    composes: bool = False  # whether the text is first converted to NFC
    gpt2: bool = False  # whether GPT-2's split follows the patterns


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS}"
)
_TEKKEN = (
    rf"{_WORD}[{_UPPER}]*[{_LOWER}]+|{_WORD}[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
)
_GPT4O = (
    rf"{_WORD}[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|{_WORD}[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
)
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"[\p{{Han}}]+|{_WORD}[{_UPPER}{_NO_HAN}]*[{_LOWER}{_NO_HAN}]+{_CONTRACTIONS}?"
    rf"|{_WORD}[{_UPPER}{_NO_HAN}]+[{_LOWER}{_NO_HAN}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
)


def _characters(ranges: str) -> str:
    """Ranges of code points in hexadecimal, as the inside of a pattern's brackets."""
    bounds = ([chr(int(bound, 16)) for bound in part.split("-")] for part in ranges.split())
    return "".join("-".join(pair) for pair in bounds)


_CASED = _characters(
    "b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd "
    "1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 "
    "1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 "
    "2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 "
    "2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 "
    "a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943 "
)
"""Letters in upper and lower case, as DeepSeek V2's tokenizer lists them, besides a to z."""
_WIDE_MARKS = _characters("ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
_EAST_ASIAN = f"[{_characters('4e00-9fa5 800-4e00 ac00-d7ff')}]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[A-Za-z{_CASED}]+",
    rf"\s?[!-/:-~{_WIDE_MARKS}]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}",
)
_DEEPSEEK_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"
_MARK_AND_LETTERS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    f"[{_characters('4e00-9fa5 3040-309f 30a0-30ff')}]+",
    _MARK_AND_LETTERS
    + rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDS}",
)
SPLITS: dict[str, WordSplit] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"),
        WordSplit((_LLAMA3,), keeps_words=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), WordSplit((_LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4"), WordSplit((_GPT4O,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), WordSplit((_QWEN2,), composes=True)),
    "qwen35": WordSplit((_QWEN35,), composes=True),
    "tekken": WordSplit((_TEKKEN,), keeps_words=True),
    "deepseek-llm": WordSplit(_DEEPSEEK),
    "deepseek-coder": WordSplit(_DEEPSEEK_CODER),
    "deepseek-v3": WordSplit(_DEEPSEEK3),
    "kimi-k2": WordSplit((_KIMI,), keeps_words=True),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "command-r"),
        WordSplit((r"\p{N}",), gpt2=True),
    ),
    **dict.fromkeys(
        ("gpt-2", "default", "phi-2", "olmo", "jina-es", "jina-de"), WordSplit((), gpt2=True)
    ),
}


def split_of(name: str) -> WordSplit:
    """The way that a file names. Raises `TokenizerError`."""
    if name not in SPLITS:
        raise TokenizerError(
            f"the tokenizer splits text as {shown(name)} does, which is not known; "
            f"known: {', '.join(sorted(SPLITS))}"
        )
    return SPLITS[name]


def pre_tokenizer(split: WordSplit) -> dict[str, Any]:
    """The split as in `tokenizer.json`, with bytes as GPT-2's characters."""
    steps: list[dict[str, Any]] = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in split.patterns
    ]
    steps.append(
        {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": split.gpt2,
        }
    )
    return {"type": "Sequence", "pretokenizers": steps}
