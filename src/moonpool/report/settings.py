"""How to make the same report again: command, seed, configuration, and what followed from it."""

from __future__ import annotations

from html import escape
from typing import Any

import msgspec

from moonpool.config import parse_config
from moonpool.report.figure import table
from moonpool.report.words import byte_size, counted
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.simulation import Simulation
from moonpool.types import Role

TABLES = ("cluster", "hardware", "pool", "slo", "engine", "conductor")
"""Those that a simulation reads. Others may hold secrets, and never come here."""
LIVE_ONLY = ("threads", "device")  # of [engine]
AGAIN = (
    "The same command with the same trace gives this page again, byte for byte. "
    "Settings in bold differ from the defaults."
)


def settings(simulation: Simulation, command: str, trace_name: str) -> str:
    given = msgspec.to_builtins(simulation.config)
    default = msgspec.to_builtins(parse_config("", defaults=DEFAULTS))
    for name in LIVE_ONLY:
        given["engine"].pop(name, None)
    groups = [_group(name, given[name], default[name]) for name in TABLES]
    timeout = "request_timeout_s"
    groups.append(_group("api", *({timeout: one["api"][timeout]} for one in (given, default))))
    return "\n".join(
        (
            f'<p class="small">Command</p><pre>{escape(command)}</pre>',
            f'<p class="small">{_origin(simulation, trace_name)} {AGAIN}</p>',
            f'<div class="settings">{"".join(groups)}</div>',
            '<h3 class="small">What follows for an instance</h3>',
            _instances(simulation),
        )
    )


def _origin(simulation: Simulation, trace_name: str) -> str:
    return f"Trace <b>{escape(trace_name)}</b>, seed <b>{simulation.seed}</b>."


def _group(name: str, given: dict[str, Any], default: dict[str, Any]) -> str:
    lines = []
    for key, value in given.items():
        words = escape(_toml(value))
        shown = words if value == default[key] else f"<b>{words}</b>"
        lines.append(f"<div><dt>{escape(key)}</dt><dd>{shown}</dd></div>")
    return f"<section><h4>[{escape(name)}]</h4><dl>{''.join(lines)}</dl></section>"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _instances(simulation: Simulation) -> str:
    hardware, layout = simulation.hardware, simulation.hardware.layout
    counts = {
        role: sum(node.info.role is role for node in simulation.nodes.values()) for role in Role
    }
    rows = []
    for role, number in counts.items():
        if not number:
            continue
        node = hardware.of_role(role)
        pool_bytes = node.num_blocks * layout.block_bytes
        rows.append(
            (
                counted(number, f"{role.value} instance"),
                f"{node.num_blocks * layout.block_tokens:,} tokens ({byte_size(pool_bytes)})",
                f"{node.engine_tokens:,} tokens" if node.engine_tokens else "-",
                f"{byte_size(node.nic_bytes_per_s)}/s each way",
                f"{byte_size(node.pcie_bytes_per_s)}/s",
                str(node.truth.num_stages),
            )
        )
    head = ("", "Pool in DRAM", "KVCache in accelerators", "Network", "PCIe", "Pipeline stages")
    block = (
        f"A block is {layout.block_tokens} tokens, {byte_size(layout.block_bytes)} of KVCache "
        f"over {layout.num_layers} layers."
    )
    return f'{table(head, rows)}<p class="small">{escape(block)}</p>'
