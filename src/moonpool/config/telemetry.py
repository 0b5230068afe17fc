"""The configuration of log lines and traces."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from moonpool.config.schema import about
from moonpool.types import Struct

LogLevel = Literal["auto", "debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]
LOG_LEVELS: tuple[str, ...] = get_args(LogLevel)
LOG_FORMATS: tuple[str, ...] = get_args(LogFormat)


class TelemetryConfig(Struct, frozen=True):
    """What the cluster reports beside `/metrics`. Local workers take over the level and
    the format of the head's log lines."""

    log_level: Annotated[
        LogLevel,
        about("Least level of log lines; auto takes MOONPOOL_LOG_LEVEL of the environment."),
    ] = "auto"
    log_format: Annotated[
        LogFormat, about("Form of log lines; auto takes MOONPOOL_LOG_FORMAT of the environment.")
    ] = "auto"
    log_requests: Annotated[
        bool, about("Log one line for each ended request, with the time of each stage.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str,
        about(
            "Send the spans of each request to this OpenTelemetry collector (OTLP over HTTP).",
            metavar="URL",
        ),
    ] = ""
