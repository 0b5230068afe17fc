"""Plants bugs in clusters in which two releases work together."""

from __future__ import annotations

from typing import Any

from moonpool.head.takeover import standby_links
from moonpool.link import auth, channel
from moonpool.protocol.versions import OWN, Agreed, Versions
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method


@plant("workers of the release before are told of standbys", standby_links, "_understands")
def _tells_all(original: Method) -> Method:
    return lambda link: True


@plant("a peer of the release before gets all fields", channel, "without_defaults")
def _all_fields(original: Method) -> Method:
    return lambda frame: frame


@plant("each end speaks its own newest version", auth, "agree")
def _own_newest(original: Method) -> Method:
    def defective(ours: Versions, *rest: Any) -> Agreed:
        agreed: Agreed = original(ours, *rest)
        return agreed._replace(protocol=ours.protocol.newest)

    return defective


@plant("a peer that states no version counts as of the newest", auth, "read_versions")
def _unread(original: Method) -> Method:
    return lambda nonce: OWN
