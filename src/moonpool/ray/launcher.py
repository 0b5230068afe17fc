"""`moonpool serve --launcher ray`: a deployment that lasts as long as the command."""

from __future__ import annotations

import contextlib
import logging
import threading

import httpx
from ray.exceptions import RayError

from moonpool.config.tables import Config
from moonpool.ray.deployment import LOOK_S, RayDeployment, deploy
from moonpool.ray.head_finder import HeadPlace

log = logging.getLogger("moonpool.ray")

ASK_S = 5.0


class RayLauncher:
    """Places the cluster's processes by Ray, and follows it until it is stopped."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def serve(self, stop: threading.Event) -> None:
        """Returns when `stop` is set and everything has ended. Raises ClusterError."""
        logging.getLogger("httpx").setLevel(logging.WARNING)
        deployment = deploy(self._config)
        try:
            self._follow(deployment, stop)
        finally:
            log.info("stopping")
            deployment.stop()

    def _follow(self, deployment: RayDeployment, stop: threading.Event) -> None:
        told: list[str] = []
        while not stop.wait(LOOK_S):
            with contextlib.suppress(RayError):  # raised while Ray itself is being restarted
                deployment.step()
            if not told:
                deployment.check_start()
            place = deployment.leader()
            if place is None or not (told or _is_up(place)):
                continue
            others = [url for url in deployment.urls() if url != place.url]
            if [place.url, *others] != told:
                if not told:
                    deployment.note_started()
                told = [place.url, *others]
                more = f", and after a loss at {', '.join(others)}" if others else ""
                log.info("serving at %s%s (Ctrl-C ends it)", place.url, more)


def _is_up(place: HeadPlace) -> bool:
    """Whether the cluster serves. A head of another machine may be out of reach from here; then the
    cluster serves if that head leads."""
    try:
        return httpx.get(f"{place.url}/health", timeout=ASK_S, verify=False).is_success  # noqa: S501
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        return False
