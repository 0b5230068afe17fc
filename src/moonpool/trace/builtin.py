"""The built-in profiles of the generator.

"conversation" is fitted to Mooncake's public conversation trace. "toolagent" and "synthetic" match
the number of requests, mean lengths and hit ratio in Table 2 of the FAST'25 paper; the paper
published nothing else, so their distributions are assumptions. The profiles with fixed lengths are
the data sets in Table 2 of the arXiv paper. Rates that no paper gives are assumptions.

"agents" are sessions that grow for about twenty turns, with the gaps between turns published for
coding agents: 2 s in the median, 11 min at P99. "coding-agents" has the statistics of Weka's corpus
of conversations: 47 calls in the median, prompts that grow to 115,000 tokens. "jobs" are sessions
that call short tools, or wait two minutes for a job. "hot-set" is single questions about popular
documents. "scan" is agents among documents that are read once.
"""

from __future__ import annotations

from bisect import bisect_left

from msgspec import structs

from moonpool.trace.profile import (
    NUM_CLASSES,
    PROBABILITIES,
    Branches,
    GeneratorProfile,
    Mix,
    MixComponent,
    Quantiles,
    SharedPrompts,
    ToolCalls,
)

# Quantiles of the conversation trace, at PROBABILITIES.
# fmt: off
_FIRST_TOKENS = (
    379, 382, 383, 385, 392, 422, 544, 746, 1048, 1857, 3051, 3801, 4408, 5167, 6259, 7573,
    9339, 11625, 14302, 18078, 24212, 27705, 32585, 36079, 40303, 47235, 59629, 83715,
    108687, 117936, 125683,
)
_OUTPUT_TOKENS = (
    1, 3, 3, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504,
    543, 597, 628, 670, 698, 738, 800, 892, 1119, 1568, 2000, 2000,
)
_GAP_S = (
    1.2, 13.8, 19.4, 30.7, 43.3, 53.7, 62.2, 70.4, 79.9, 91.8, 102.4, 118.1, 134.9, 157.8,
    182.5, 214.4, 252.4, 300.5, 359.6, 432.1, 532.5, 582.8, 631.3, 661, 773.6, 965.5,
    1231.3, 1714.3, 2115.1, 2412.7, 3029,
)
_MESSAGE_TOKENS = (
    1, 1, 1, 1, 5, 7, 9, 10, 12, 15, 19, 23, 29, 42, 65, 120, 253, 447, 828, 2953, 4311,
    5203, 6651, 7540, 8584, 10308, 12651, 17261, 22190, 36356, 91467,
)
_KEPT_SHARE = (
    0.015, 0.031, 0.036, 0.051, 0.067, 0.08, 0.1, 0.111, 0.13, 0.152, 0.167, 0.189, 0.214,
    0.25, 0.294, 0.355, 0.41, 0.463, 0.574, 0.754, 0.9, 0.918, 0.942, 0.947, 0.954, 0.958,
    0.963, 0.978, 0.982, 0.989, 0.993,
)
_NEW_SHARE = (
    0, 0.048, 0.14, 0.373, 0.483, 0.569, 0.62, 0.676, 0.741, 0.814, 0.874, 0.934, 0.997,
    1.021, 1.074, 1.126, 1.176, 1.282, 1.42, 1.573, 1.845, 2.077, 2.686, 3.256, 5.547,
    8.782, 10.943, 16.303, 18.171, 28.165, 30.517,
)
# fmt: on


def _through(*points: tuple[float, float]) -> Quantiles:
    """The quantile table through (probability, value) points, from probability 0 to 1."""
    table = []
    shares = [share for share, _ in points]
    for probability in PROBABILITIES:
        number = max(1, bisect_left(shares, probability))
        (low_share, low), (high_share, high) = points[number - 1], points[number]
        part = (probability - low_share) / (high_share - low_share)
        table.append(round(low + part * (high - low), 1))
    return tuple(table)


CONVERSATION = GeneratorProfile(
    name="conversation",
    rate_rps=3.4,
    burst_short_cv2=0.0056,
    burst_long_cv2=0.0055,
    first_tokens=_FIRST_TOKENS,
    output_tokens=_OUTPUT_TOKENS,
    max_input_tokens=126_195,
    shared=SharedPrompts(share=1.0, count=1, skew=0.0, tokens=(512.0,)),
    first_continue_share=(0.0108, 0.472, 0.3639, 0.4086, 0.3828, 0.2389, 0.1455),
    continue_share=(0.4247, 0.5795, 0.6681, 0.6454, 0.7, 0.8333),
    gap_s=_GAP_S,
    message_tokens=_MESSAGE_TOKENS,
    repeat_share=0.019,
    branches=Branches(
        class_share=(0.0, 0.0017, 0.0472, 0.2804, 0.2992, 0.2042, 0.1571),
        kept_share=_KEPT_SHARE,
        new_share=_NEW_SHARE,
    ),
)

TOOLAGENT = GeneratorProfile(
    name="toolagent",
    rate_rps=6.67,  # 23,608 requests in 59 minutes
    burst_short_cv2=0.02,
    burst_long_cv2=0.01,
    first_tokens=_through((0, 40), (0.5, 1_650), (0.9, 8_700), (0.99, 34_000), (1, 110_000)),
    output_tokens=_through((0, 5), (0.5, 155), (0.9, 450), (0.99, 850), (1, 2_000)),
    max_input_tokens=126_000,
    shared=SharedPrompts(
        share=1.0, count=60, skew=1.1, tokens=_through((0, 512), (0.5, 1_990), (1, 5_300))
    ),
    first_continue_share=(0.2,) * NUM_CLASSES,
    continue_share=(0.35,),
    gap_s=_through((0, 5), (0.5, 90), (0.9, 450), (1, 1_800)),
    message_tokens=_through((0, 5), (0.5, 40), (0.9, 600), (1, 6_000)),
    tools=ToolCalls(
        share=0.3,
        gap_s=_through((0, 0.5), (0.5, 2.5), (0.9, 8), (1, 20)),
        output_tokens=_through((0, 15), (0.5, 45), (0.9, 120), (1, 300)),
        result_tokens=_through((0, 30), (0.5, 700), (0.9, 3_500), (1, 12_000)),
    ),
)

SYNTHETIC = GeneratorProfile(
    name="synthetic",
    rate_rps=1.1,  # 3,993 requests in about an hour, Poisson
    first_tokens=_through((0, 15), (0.6, 120), (0.8, 800), (0.95, 3_000), (1, 8_000)),
    output_tokens=_through((0, 2), (0.4, 20), (0.7, 110), (0.9, 400), (1, 1_100)),
    max_input_tokens=126_000,
    shared=SharedPrompts(
        share=0.8, count=1_300, skew=0.2, tokens=_through((0, 3_072), (0.5, 13_824), (1, 37_376))
    ),
    first_continue_share=(0.2,) + (0.6,) * (NUM_CLASSES - 1),
    continue_share=(0.6,),
    gap_s=_through((0, 5), (0.5, 60), (1, 600)),
    message_tokens=_through((0, 5), (0.7, 60), (1, 1_500)),
)


def _fixed(
    name: str, rate_rps: float, input_tokens: int, output_tokens: int, shared: SharedPrompts | None
) -> GeneratorProfile:
    shared_tokens = int(shared.tokens[0]) if shared else 0
    return GeneratorProfile(
        name=name,
        rate_rps=rate_rps,
        first_tokens=(input_tokens - shared_tokens,),
        output_tokens=(output_tokens,),
        max_input_tokens=input_tokens,
        shared=shared,
    )


def _half_cached(name: str, rate_rps: float, input_tokens: int) -> GeneratorProfile:
    shared = SharedPrompts(share=1.0, count=16, skew=0.0, tokens=(input_tokens // 2,))
    return _fixed(name, rate_rps, input_tokens, 512, shared)


BUILT_IN = {
    profile.name: profile
    for profile in (
        CONVERSATION,
        TOOLAGENT,
        SYNTHETIC,
        _fixed("arxiv-sum", 1.0, 8_088, 229, None),
        _fixed(
            "l-eval",
            1.0,
            19_019,
            72,
            SharedPrompts(share=1.0, count=100, skew=0.0, tokens=(17_408.0,)),
        ),
        _half_cached("simulated-16k", 1.0, 16_384),
        _half_cached("simulated-32k", 0.5, 32_768),
        _half_cached("simulated-64k", 0.2, 65_536),
        _half_cached("simulated-128k", 0.1, 131_072),
    )
}
"""By name."""

AGENTS = GeneratorProfile(
    name="agents",
    closed_loop=True,
    rate_rps=4.0,
    first_tokens=_through((0, 500), (0.5, 3_000), (0.9, 20_000), (1, 60_000)),
    output_tokens=_through((0, 10), (0.5, 317), (0.9, 1_500), (1, 8_000)),
    max_input_tokens=200_000,
    shared=SharedPrompts(
        share=1.0, count=12, skew=1.0, tokens=_through((0, 6_000), (0.5, 14_000), (1, 24_000))
    ),
    first_continue_share=(0.85,) * NUM_CLASSES,
    continue_share=(0.95,),
    gap_s=_through((0, 0.3), (0.5, 2), (0.75, 6), (0.9, 40), (0.97, 240), (0.99, 660), (1, 2_400)),
    message_tokens=_through((0, 50), (0.5, 800), (0.9, 4_000), (1, 20_000)),
)
# The statistics that Weka publishes of 642 conversations of coding agents: prompts at the start and
# at the end, and calls; answers and pauses as in the corpus itself, whose longest pauses (people
# who come back the next day) are cut at an hour.
CODING_AGENTS = GeneratorProfile(
    name="coding-agents",
    closed_loop=True,
    rate_rps=4.0,
    first_tokens=_through((0, 300), (0.5, 4_500), (0.7, 12_000), (0.9, 60_000), (1, 100_000)),
    output_tokens=_through((0, 1), (0.25, 138), (0.5, 217), (0.75, 419), (0.95, 1_445), (1, 8_000)),
    max_input_tokens=190_000,
    shared=SharedPrompts(
        share=1.0, count=8, skew=1.0, tokens=_through((0, 12_288), (0.5, 15_360), (1, 18_432))
    ),
    first_continue_share=(0.98,) * NUM_CLASSES,
    continue_share=(0.98,),
    gap_s=_through((0, 10), (0.25, 37), (0.5, 115), (0.75, 398), (0.9, 1_255), (1, 3_600)),
    message_tokens=_through((0, 10), (0.5, 200), (0.9, 1_500), (1, 10_000)),
    tools=ToolCalls(
        share=0.85,
        gap_s=_through(
            *((0, 0.5), (0.1, 4), (0.25, 5), (0.5, 8), (0.75, 18), (0.9, 69), (0.95, 147)),
            *((0.99, 610), (1, 1_800)),
        ),
        output_tokens=_through(
            (0, 1), (0.25, 138), (0.5, 217), (0.75, 419), (0.95, 1_445), (1, 8_000)
        ),
        result_tokens=_through(
            *((0, 0), (0.1, 1), (0.25, 48), (0.5, 297), (0.75, 951), (0.9, 2_885)),
            *((0.95, 6_034), (0.99, 16_322), (1, 60_000)),
        ),
    ),
)
JOBS = GeneratorProfile(
    name="jobs",
    rate_rps=2.0,
    first_tokens=_through((0, 4_000), (0.5, 12_000), (1, 30_000)),
    output_tokens=_through((0, 50), (0.5, 200), (1, 600)),
    max_input_tokens=126_000,
    first_continue_share=(0.9,) * NUM_CLASSES,
    continue_share=(0.9,),
    gap_s=_through((0, 1), (0.5, 3), (0.6, 8), (0.62, 100), (0.9, 130), (1, 160)),
    message_tokens=_through((0, 100), (0.5, 500), (1, 3_000)),
)
HOT_SET = GeneratorProfile(
    name="hot-set",
    rate_rps=6.0,
    first_tokens=_through((0, 100), (0.5, 1_000), (1, 8_000)),
    output_tokens=(200.0,),
    max_input_tokens=126_000,
    shared=SharedPrompts(
        share=1.0, count=800, skew=0.9, tokens=_through((0, 2_000), (0.5, 10_000), (1, 40_000))
    ),
)
DOCUMENTS = GeneratorProfile(
    name="documents",
    rate_rps=0.75,
    burst_short_cv2=0.01,
    burst_long_cv2=0.01,
    first_tokens=_through((0, 2_000), (0.5, 12_000), (0.9, 30_000), (1, 40_000)),
    output_tokens=_through((0, 20), (0.5, 180), (0.9, 380), (1, 900)),
    max_input_tokens=126_000,
)
CHATS = GeneratorProfile(
    name="chats",
    rate_rps=1.35,
    burst_short_cv2=0.01,
    burst_long_cv2=0.01,
    first_tokens=_through((0, 20), (0.5, 250), (0.9, 1_200), (1, 6_000)),
    output_tokens=_through((0, 100), (0.5, 1_400), (0.9, 3_400), (1, 6_000)),
    max_input_tokens=126_000,
    first_continue_share=(0.5,) * NUM_CLASSES,
    continue_share=(0.5,),
    gap_s=_through((0, 5), (0.5, 60), (1, 400)),
    message_tokens=_through((0, 5), (0.5, 60), (0.9, 300), (1, 2_000)),
)
# Documents with short answers dominate the morning, chats with long answers the evening.
# fmt: off
_MORNING = (
    0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.7, 1.4, 2.1, 2.4, 2.4, 2.4,
    2.2, 2.2, 2.0, 1.6, 1.1, 0.7, 0.4, 0.2, 0.1, 0.1, 0.1, 0.1,
)
_EVENING = (
    1.1, 0.7, 0.4, 0.2, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.3, 0.3,
    0.4, 0.4, 0.5, 0.8, 1.3, 1.8, 2.2, 2.4, 2.4, 2.4, 2.2, 1.7,
)
# fmt: on
SHIFTING_DAY = Mix(
    name="shifting-day",
    # each of the 24 hours lasts five minutes, so that a day is simulated in a minute
    day_s=7_200.0,
    kinds=(
        MixComponent(profile=DOCUMENTS, by_hour=_MORNING),
        MixComponent(profile=CHATS, by_hour=_EVENING),
    ),
)
SCAN = Mix(
    name="scan",
    day_s=86_400.0,
    kinds=tuple(
        MixComponent(profile=structs.replace(profile, rate_rps=2.0), by_hour=(1.0,))
        for profile in (AGENTS, DOCUMENTS)
    ),
)
BUILT_IN |= {profile.name: profile for profile in (AGENTS, CODING_AGENTS, JOBS, HOT_SET)}
BUILT_IN_MIXES = {SHIFTING_DAY.name: SHIFTING_DAY, SCAN.name: SCAN}
"""By name."""
