"""What `moonpool plan` asks on a terminal if it was not given; elsewhere, the values that it takes
instead.

The questions are about the model, SLOs, nodes and prices, because a plan for other values would
answer another question.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import msgspec

from moonpool.cli.options import POSITIVE
from moonpool.config.hardware import HardwareConfig
from moonpool.config.schema import Values
from moonpool.config.slo import SloConfig
from moonpool.plan.candidate import NodeKind, Priced
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.devices import Price

DEFAULT_DEVICES = "A800-SXM:8"
DEFAULT_SHAPE = HardwareConfig().shape
_LEVELS = (
    ("ttft_s", "--slo-ttft", "Seconds until the first token of an answer (TTFT)"),
    ("tbt_s", "--slo-tbt", "Seconds between its further tokens (TBT)"),
)


def on_terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


class Missing:
    """Model, service levels, devices and prices: those given, those asked for, those taken."""

    def __init__(self, ask: bool) -> None:
        self._ask = ask
        self._taken: list[str] = []

    def shape(self, given: str) -> str:
        """The model that is served; `given` is "" where nothing names one."""
        if given:
            return given
        if self._ask:
            known = ", ".join(shape.name for shape in BUILT_IN.shapes)
            click.echo(f"Models (--catalogue FILE adds yours): {known}.", err=True)
            return str(click.prompt("Model", default=DEFAULT_SHAPE, err=True))
        self._taken.append(f"--shape {DEFAULT_SHAPE}")
        return DEFAULT_SHAPE

    def slo(self, given: SloConfig) -> Values:
        """The levels that a configuration without defaults lacks, as overrides."""
        found = {}
        for key, flag, question in _LEVELS:
            if getattr(given, key) is not None:
                continue
            usual = DEFAULTS["slo"][key]
            if self._ask:
                found[key] = click.prompt(question, default=usual, type=POSITIVE, err=True)
            else:
                self._taken.append(f"{flag} {usual:g}")
        return {"slo": found} if found else {}

    def devices(self, given: str | None) -> str:
        """The devices that nodes have."""
        if given is not None:
            return given
        if self._ask:
            known = ", ".join(device.name for device in BUILT_IN.devices)
            click.echo(
                f"Devices that you can have: {known}. H100-SXM:4 is a node of four; without a"
                " number, nodes of 1, 2, 4 and 8 are tried; several are separated by commas.",
                err=True,
            )
            return str(click.prompt("Devices", default=DEFAULT_DEVICES, err=True))
        self._taken.append(f"--devices {DEFAULT_DEVICES}")
        return DEFAULT_DEVICES

    def prices(self, priced: Priced, kinds: Sequence[NodeKind], prices_file: str | None) -> Priced:
        """The prices of the devices of these nodes."""
        if prices_file is not None:
            return priced
        names = dict.fromkeys(
            name for kind in kinds for name in (kind.device, kind.attention_device) if name
        )
        devices = dict(priced.prices.devices)
        for name in names:
            listed = devices.get(name)
            if not self._ask:
                continue
            if listed is not None:
                source = f"{listed.source}, {listed.date}" if listed.date else listed.source
                click.echo(f"{name}: {listed.usd_per_h:g} USD/h by {source}", err=True)
            usual = None if listed is None else listed.usd_per_h
            question = f"USD per hour of one {name}"
            usd = click.prompt(question, default=usual, type=POSITIVE, err=True)
            if usd != usual:
                devices[name] = Price(usd_per_h=usd, date="", source="your answer")
        change = msgspec.structs.replace
        return change(priced, prices=change(priced.prices, devices=devices))

    def say(self, of_catalogue: bool) -> None:
        """Says in one line what was taken because it was not given."""
        if not self._taken:
            return
        text = f"not given, so taken: {', '.join(self._taken)}"
        if of_catalogue:
            text += ", and the catalogue's list prices (--prices)"
        if f"--devices {DEFAULT_DEVICES}" in self._taken:
            text += (
                "; planning with nodes of 8 A800-SXM, those of Mooncake's paper: name yours, such"
                " as --devices H100-SXM for nodes of any size"
            )
        click.echo(text, err=True)
