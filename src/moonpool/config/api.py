"""The configuration of the HTTP API."""

from __future__ import annotations

from typing import Annotated

from moonpool.config.schema import about
from moonpool.types import Struct


class ApiConfig(Struct, frozen=True):
    host: Annotated[str, about("Address of the HTTP API.", protects=True)] = "127.0.0.1"
    port: Annotated[int, about("Port of the HTTP API.", ge=0, le=65535)] = 8000
    api_keys: Annotated[
        tuple[str, ...],
        about(
            "Accept this bearer key; each key is a tenant of its own.", "--api-key", protects=True
        ),
    ] = ()
    api_key_file: Annotated[
        str,
        about(
            "File with a bearer key on each line, then optionally its tenant and limits.",
            "--api-key-file",
            metavar="FILE",
            protects=True,
        ),
    ] = ""
    ssl_certfile: Annotated[
        str,
        about(
            "Serve HTTPS with this certificate chain (PEM).",
            "--ssl-certfile",
            metavar="FILE",
            protects=True,
        ),
    ] = ""
    ssl_keyfile: Annotated[
        str,
        about(
            "Key of the certificate (PEM); in the certificate's file unless given.",
            "--ssl-keyfile",
            metavar="FILE",
            protects=True,
        ),
    ] = ""
    ssl_ca_certs: Annotated[
        str,
        about(
            "Serve only clients with a certificate that this authority (PEM) has signed.",
            "--ssl-ca-certs",
            metavar="FILE",
            protects=True,
        ),
    ] = ""
    max_body_bytes: Annotated[int, about("Largest accepted request body in bytes.", gt=0)] = (
        32 << 20
    )
    allowed_origins: Annotated[
        tuple[str, ...],
        about(
            "Let web pages of this origin call the API, such as https://example.org; * means all.",
            "--allowed-origin",
            protects=True,
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        about(
            "Without keys, serve requests for this host, too; a web page may make up others.",
            "--allowed-host",
            protects=True,
        ),
    ] = ()
    tool_call_parser: Annotated[
        str,
        about(
            "The format in which the model writes tool calls: auto, none or a name like hermes.",
            "--tool-call-parser",
            metavar="NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        about(
            "The format in which the model writes its reasoning: auto, none or a name.",
            "--reasoning-parser",
            metavar="NAME",
        ),
    ] = "auto"
    request_timeout_s: Annotated[
        float,
        about("Most seconds that one request may take.", "--request-timeout", gt=0, le=86_400),
    ] = 600.0
    keepalive_s: Annotated[
        float,
        about(
            "A stream that is silent so long sends a comment, so that proxies keep it; 0: never.",
            "--keepalive",
            ge=0,
            le=86_400,
        ),
    ] = 5.0
    strict_max_tokens: Annotated[
        bool,
        about("Refuse a max_tokens beyond the room in the context, instead of lowering it."),
    ] = False
    drain_seconds: Annotated[
        float,
        about(
            "Seconds that running answers may take to end when the head is told to stop.",
            "--drain-seconds",
            ge=0,
            le=86_400,
        ),
    ] = 25.0
    fronts: Annotated[
        int,
        about(
            "Processes that accept, tokenise and stream; 1: the head does it itself.",
            "--fronts",
            ge=1,
            le=64,
        ),
    ] = 1
    event_log_bytes: Annotated[
        int,
        about(
            "Memory for the Conductor's last events, which `moonpool rewind` replays; 0: none.",
            ge=0,
            le=1 << 30,
        ),
    ] = 32 << 20
