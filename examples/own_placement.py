"""Compares a placement policy of one's own with two built-in ones. Argument: a trace."""

import sys

import moonpool


class ShortestQueueWithCache:
    """Prefers the shortest queue; among similar queues, the instance with more of the prompt."""

    def __call__(self, context):
        prefill = context.local()
        saved_s = prefill.prefill_s.max() - prefill.prefill_s
        return context.queue_s - 0.5 * saved_s


runs = {
    name: moonpool.simulate(
        sys.argv[1], placement=policy, prefill=4, decode=4, config={"slo": {"ttft_s": 5.0}}
    )
    for name, policy in (
        ("own", ShortestQueueWithCache),
        ("load-balancing", "load-balancing"),
        ("kvcache-centric", "kvcache-centric"),
    )
}
for name, run in runs.items():
    figures = run.summary
    print(
        f"{name:16} {figures['effective']:4} of {figures['requests']} within both SLOs,"
        f" TTFT p90 {figures['ttft_s']['p90']:.2f} s,"
        f" {figures['cache']['hit_ratio']:.1%} of prompt tokens from the cache"
    )
moonpool.report(list(runs.values()), "placements.html", list(runs))
print("see placements.html")
