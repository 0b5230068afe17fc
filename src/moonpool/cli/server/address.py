"""The server to which a command sends requests: its address, the API key for it, and the authority
to trust over https.

All commands take these in the same way: the address as an argument, with or without http://, and
--api-key and --ca-file. Without --api-key the key comes from the environment.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from moonpool.cli.options import ParamType, not_empty
from moonpool.types import Struct

if TYPE_CHECKING:
    import httpx

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_URL = "http://127.0.0.1:8000"
OWN_KEYS = ("MOONPOOL_ADMIN_KEY", "MOONPOOL_API_KEY", "OPENAI_API_KEY")
KEYS_FOR_ANYBODY = ("OPENAI_API_KEY",)
"""Variables whose key may be sent to any server. Moonpool's own keys are sent to its servers
only."""
NO_KEY = (
    "the API key is missing or invalid: give --api-key, or set MOONPOOL_ADMIN_KEY or"
    " MOONPOOL_API_KEY in the environment"
)
_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")


class Server(Struct, frozen=True, kw_only=False):
    """A server, as a command line names it. `api_key` and `ca_file` may be empty."""

    url: str
    api_key: str = ""
    ca_file: str = ""

    def open_client(self, timeout_s: float) -> httpx.Client:
        """Returns a client that sends the key, and trusts `ca_file`. Raises TlsError."""
        import httpx

        from moonpool.http_client.trust import trusting_context

        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        is_https = self.url.startswith("https:")
        verify = trusting_context(self.ca_file) if is_https else True
        return httpx.Client(headers=headers, timeout=timeout_s, verify=verify)

    def unreachable(self, error: Exception) -> str:
        """Returns one line about a server that does not answer."""
        from moonpool.http_client.trust import untrusted_hint

        what_to_do = untrusted_hint(error) or "start one or correct the URL"
        return f"no server answers at {self.url}: {error}; {what_to_do}"


class ServerUrl(ParamType[str]):
    """The address of a server; without http:// or https:// it is HOST:PORT over http."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return full_url(str(value))


def full_url(address: str) -> str:
    """Returns an address with its scheme, and without a slash at the end."""
    address = address.strip()
    return (address if "://" in address else f"http://{address}").rstrip("/")


def is_address(word: str) -> bool:
    """Whether a text is a URL or HOST:PORT, and not a file or the name of a model."""
    if "://" in word:
        return True
    return _HOST_AND_PORT.fullmatch(word) is not None and not Path(word).exists()


SERVER_URL = ServerUrl()


def access_options(keys: tuple[str, ...] = OWN_KEYS) -> Callable[[F], F]:
    """Adds --api-key and --ca-file. The command gets `api_key`, which may be the first of the
    environment's `keys`, and `ca_file`."""
    *others, last = keys
    named = f"{', '.join(others)} or {last}" if others else last

    def decorate(command: F) -> F:
        command = click.option(
            "--ca-file",
            default="",
            callback=not_empty,
            type=click.Path(dir_okay=False),
            help="Trust these certificates (PEM) over https, in place of the system's.",
        )(command)
        return click.option(
            "--api-key",
            default="",
            callback=lambda ctx, param, value: bearer_key(value, keys),
            help=f"Bearer key; the environment's {named} unless given.",
        )(command)

    return decorate


def asks_server(
    default: str | None = DEFAULT_URL, former_flag: str = "", keys: tuple[str, ...] = OWN_KEYS
) -> Callable[[F], F]:
    """Adds the argument URL and the options of `access_options`. The command gets `server`: a
    Server, or None where no address is given and there is no default.

    `former_flag` also gives the address, as it did in earlier releases.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def asking(*, api_key: str, ca_file: str, **given: Any) -> Any:
            flag, word = given.pop("url_flag", None), given.pop("url")
            if flag is not None and word is not None:
                raise click.UsageError("give the address of the server once")
            url = word or flag or default
            server = None if url is None else Server(url, api_key, ca_file)
            return command(server=server, **given)

        del asking.__wrapped__  # the decorated function takes other parameters
        if default is not None:
            shown = f"URL may be HOST:PORT; it is {default} unless given."
            asking.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{shown}"
        asked: Any = access_options(keys)(asking)
        if former_flag:
            asked = click.option(former_flag, "url_flag", type=SERVER_URL, hidden=True)(asked)
        asked = click.argument("url", type=SERVER_URL, required=False, metavar="[URL]")(asked)
        return cast(F, asked)

    return decorate


def bearer_key(given: str | None, keys: tuple[str, ...] = OWN_KEYS) -> str:
    """Returns the key to send: the given key, or else the first of these variables that is set, or
    ""."""
    if given:
        return given
    found = (os.environ.get(name, "").replace(",", " ").split() for name in keys)
    return next((named[0] for named in found if named), "")
