"""`fencepool doctor`: what this machine, its packages and its environment mean for fencepool."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from .checks import Finding, Status, examine, worst
from .facts import Facts

SCHEMA = "fencepool.doctor/1"

_COLOURS = {Status.OK: "green", Status.NOTE: "cyan", Status.WARN: "yellow", Status.FAIL: "bold red"}
_VERDICTS = {
    Status.OK: "ready",
    Status.NOTE: "ready",
    Status.WARN: "limited",
    Status.FAIL: "broken",
}


def verdict(facts: Facts, findings: list[Finding]) -> str:
    """The report in one sentence."""
    status = worst(findings)
    failed = [finding.name for finding in findings if finding.status is Status.FAIL]
    warned = [finding.name for finding in findings if finding.status is Status.WARN]
    if failed:
        return f"Broken: repair {_listed(failed)} first."
    if not facts.gpus:
        return "Works with limits: no GPU can be used, device='cpu' (the embedded driver) works."
    if status is Status.WARN:
        return f"Works with limits on {_devices(facts)}: see {_listed(warned)}."
    return f"Ready on {_devices(facts)}."


def show(console: Console, facts: Facts, findings: list[Finding]) -> None:
    """Write the report for people."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(min_width=14, max_width=28)
    table.add_column(ratio=1)
    for finding in findings:
        colour = _COLOURS[finding.status]
        says = escape(finding.says)
        if finding.do and finding.status is not Status.OK:
            says += f"\n[italic]do: {escape(finding.do)}[/]"
        table.add_row(f"[{colour}]{finding.status.value}[/]", finding.name, says)
    console.print(table)
    console.print(
        Padding(f"[bold {_COLOURS[worst(findings)]}]{escape(verdict(facts, findings))}[/]", (1, 0, 0, 0))
    )


def as_json(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    """The report for programs. The schema's number changes when a key changes its meaning or goes away."""
    status = worst(findings)
    return {
        "schema": SCHEMA,
        "verdict": _VERDICTS[status],
        "says": verdict(facts, findings),
        "exit_status": status.exit_status,
        "findings": [{**asdict(finding), "status": finding.status.value} for finding in findings],
        "facts": asdict(facts),
    }


def run(console: Console, as_json_text: bool) -> int:
    """Examine this machine, write the report, and return the exit status."""
    # Here, since it imports the core: what shows facts must be testable with facts alone.
    from .gather import gather

    facts = gather()
    findings = examine(facts)
    if as_json_text:
        console.print_json(data=as_json(facts, findings))
    else:
        show(console, facts, findings)
    return worst(findings).exit_status


def _devices(facts: Facts) -> str:
    return _listed([gpu.device for gpu in facts.gpus if gpu.can("vmm")])


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
