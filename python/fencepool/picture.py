"""Pictures, with matplotlib: ``pip install 'fencepool[observe]'``. Needs no display."""

from __future__ import annotations

import errno
import os
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fencepool.timeline import Recorded, Series, Timeline

# Okabe and Ito's colours, told apart with any kind of colour vision; the first for what is held longest.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_PHASES = {
    "quiesce": "#999999",
    "digest": "#332288",
    "provision": "#E69F00",
    "copy": "#0072B2",
    "unmap": "#CC79A7",
    "release": "#D55E00",
    "create": "#009E73",
    "map": "#56B4E9",
    "fence": "#F0E442",
    "other": "#DDDDDD",
}
_MOST_BARS = 12
_MOST_POOLS = 7
_OTHERS = "#999999"


def new_figure(width: float, height: float) -> Any:
    """An empty figure; sizes in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says how to get it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture needs matplotlib: pip install 'fencepool[observe]'", name="matplotlib"
        ) from error
    return Figure(figsize=(width, height), layout="constrained", dpi=130)


def require(path: str | os.PathLike[str]) -> None:
    """Find out whether a picture can be drawn there, before there is anything to draw.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: an ending that matplotlib does not know.
        OSError: it is in no directory.
    """
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    where = PurePath(path)
    if where.suffix[1:].lower() not in known:
        raise ValueError(f"a picture ends in .png, .svg or .pdf, not as {where.name!r} does")
    if not os.path.isdir(where.parent):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(where.parent))


def unit_of(largest: float) -> tuple[str, int]:
    """The unit for an axis that reaches ``largest`` bytes, and how many bytes it has."""
    return ("GiB", 1 << 30) if largest >= 2 << 30 else ("MiB", 1 << 20)


def draw_timeline(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Above, what pools held over time, by device; below, the phases of the transitions.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: an ending that matplotlib does not know.
        OSError: it cannot be written.
    """
    devices = list(dict.fromkeys(name.rpartition(" on ")[2] for name in timeline.pools)) or ["no device"]
    bars = sorted(timeline.transitions, key=lambda one: -one.seconds)[:_MOST_BARS]
    heights = [3.0] * len(devices) + [0.9 + 0.28 * max(1, len(bars))]
    figure = new_figure(10, sum(heights) + 0.6)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    numbers = {id(one): number for number, one in enumerate(timeline.transitions, 1)}
    marked = {numbers[id(one)] for one in bars}
    for axis, device in zip(axes[:-1], devices, strict=True):
        _draw_memory(axis, timeline, device, marked)
    _draw_phases(
        axes[-1], timeline, [one for one in timeline.transitions if numbers[id(one)] in marked], numbers
    )
    figure.savefig(path)


def _draw_memory(axis: Any, timeline: Timeline, device: str, marked: set[int]) -> None:
    here = {name: one for name, one in timeline.pools.items() if name.rpartition(" on ")[2] == device}
    pools = _few(here)
    used = timeline.devices.get(device, [])
    heights = [
        sum(held) for held in zip(*([count for _, count in one] for one in pools.values()), strict=True)
    ]
    largest = max([*heights, *(count for _, count in used), 1])
    unit, size = unit_of(largest)
    if pools:
        axis.stackplot(
            [at for at, _ in next(iter(pools.values()))],
            [[count / size for _, count in series] for series in pools.values()],
            labels=list(pools),
            colors=[*COLOURS[:_MOST_POOLS], _OTHERS],
            linewidth=0,
        )
    if used:
        axis.plot(
            [at for at, _ in used],
            [count / size for _, count in used],
            color="black",
            linestyle="--",
            linewidth=1,
            label="in use, all processes",
        )
    _mark(axis, timeline, marked)
    axis.set_xlim(0, max(timeline.seconds, 1e-3))
    axis.set_ylim(0, largest / size * 1.15)
    axis.set_ylabel(unit)
    axis.set_xlabel("seconds since the recording began")
    has_failed = any(one.error for one in timeline.transitions)
    bands = "grey: transitions, red: failed ones" if has_failed else "grey: transitions"
    axis.set_title(f"Memory of {device} by pool ({bands})", loc="left", fontsize=11, pad=18)
    axis.spines[["top", "right"]].set_visible(False)
    if pools or used:
        # From the top down, as the areas lie.
        axis.legend(reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _few(pools: dict[str, Series]) -> dict[str, Series]:
    """By tag, those that held most at some time; colours are told apart for so many. The others as one."""
    by_size = sorted(pools, key=lambda name: -max((count for _, count in pools[name]), default=0))
    most = set(by_size[:_MOST_POOLS])
    shown = {name.rpartition(" on ")[0]: series for name, series in pools.items() if name in most}
    others = [pools[name] for name in by_size[_MOST_POOLS:]]
    if others:
        summed = [(one[0][0], sum(count for _, count in one)) for one in zip(*others, strict=True)]
        shown[f"{len(others)} smaller pools"] = summed
    return shown


def _mark(axis: Any, timeline: Timeline, marked: set[int]) -> None:
    """A grey band for each transition, and its number above, where there is room for it."""
    last = -1.0
    for number, one in enumerate(timeline.transitions, 1):
        colour = "#D00000" if one.error else "#666666"
        axis.axvspan(one.began, one.began + one.seconds, color=colour, alpha=0.25, linewidth=0, zorder=0)
        middle = (one.began + one.seconds / 2) / max(timeline.seconds, 1e-3)
        if one.error or number in marked:
            axis.axvline(one.began, color=colour, linewidth=0.6, alpha=0.6)
        if number in marked and middle - last > 0.02:
            axis.text(
                middle, 1.01, str(number), transform=axis.transAxes, ha="center", fontsize=8, color=colour
            )
            last = middle


def _draw_phases(axis: Any, timeline: Timeline, bars: list[Recorded], numbers: dict[int, int]) -> None:
    shown: set[str] = set()
    longest = max((one.seconds for one in bars), default=0.0)
    for row, one in enumerate(bars):
        at = 0.0
        for phase, seconds in _with_rest(one):
            axis.barh(
                row,
                seconds * 1e3,
                left=at * 1e3,
                height=0.7,
                color=_PHASES.get(phase, "#333333"),
                label=phase if phase not in shown else "_",
            )
            shown.add(phase)
            at += seconds
        text = f" {one.seconds * 1e3:,.1f} ms" + (", failed" if one.error else "")
        axis.text(one.seconds * 1e3, row, text, va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [f"{numbers[id(one)]}  {_name(one)}" for one in bars], fontsize=8)
    axis.set_ylim(max(len(bars), 1) - 0.4, -0.6)
    axis.set_xlim(0, max(longest * 1e3 * 1.15, 1e-3))
    axis.set_xlabel("milliseconds for the thread that called")
    left_out = len(timeline.transitions) - len(bars)
    title = "Phases" + (
        f" of the {len(bars)} longest of {len(timeline.transitions)} transitions" if left_out else ""
    )
    axis.set_title(title, loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    if shown:
        handles, labels = axis.get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True))
        # In the order of the phases, whichever bar had one first.
        names = [*(name for name in _PHASES if name in entries), *(shown - _PHASES.keys())]
        axis.legend(
            [entries[name] for name in names],
            names,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            fontsize=9,
        )


def _with_rest(one: Recorded) -> list[tuple[str, float]]:
    """The phases, and what is left of the whole: callbacks, waiting for other threads."""
    rest = one.seconds - sum(seconds for _, seconds in one.phases)
    return [*one.phases, *([("other", rest)] if rest > 0 else [])]


def _name(one: Recorded) -> str:
    tags = ", ".join(one.tags)
    return f"{one.kind} {tags if len(tags) <= 24 else tags[:23] + '…'}"
