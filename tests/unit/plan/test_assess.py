"""How many seeds a verdict takes."""

from __future__ import annotations

import pytest

from moonpool.config import Config
from moonpool.plan.assess import SURE_FROM
from moonpool.plan.candidate import Candidate
from moonpool.plan.confidence import Verdict
from tests.unit.plan.made_up import MadeUpWorkforce
from tests.unit.plan.test_search import A, assessor, priced


@pytest.mark.parametrize(("share", "num_seeds"), [(0.904, SURE_FROM), (0.95, 3)])
def test_what_meets_by_little_is_looked_at_more_often(share: float, num_seeds: int) -> None:
    def truth(config: Config) -> tuple[float, float]:
        return share, 1.0

    workforce = MadeUpWorkforce(truth)
    used = assessor(workforce, priced())
    one = Candidate(A, A, 4, 2, 0, 3_000_000, 2048)
    used.glance([one])
    [found] = used.judge([one])
    assert found.verdict is Verdict.MEETS and len(found.outcomes) == num_seeds
    assert workforce.num_run == num_seeds
    assert used.judge([one], max_seeds=2) == [found]
