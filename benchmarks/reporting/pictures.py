"""Draws a result: one dot a median, a line from the least to the most, and the limit beside them."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

from reporting.panels import Panel, Row

_OURS, _THEIRS, _LIMIT = "#0072B2", "#777777", "#D55E00"
_WIDTH = 8.0  # inches
_ROW, _FRAME = 0.3, 0.95  # inches a row, and for a panel's title and axis
_SEVERAL = 8.0  # from this ratio on, times are drawn on a logarithmic axis


def is_possible() -> bool:
    """Whether matplotlib is installed; a benchmark runs without it."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(panels: list[Panel], title: str, path: Path) -> None:
    """Write the picture, in the format that the path's ending names."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = [panel for panel in panels if panel.rows]
    heights = [_FRAME + _ROW * (len(panel.rows) + (panel.limit is not None)) for panel in panels]
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(_WIDTH, sum(heights) + 0.5), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel)
        figure.savefig(path, dpi=120)


def _draw_panel(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator

    values = [second * 1e3 for row in panel.rows for second in row.seconds]
    if panel.limit is not None:
        values.append(panel.limit * 1e3)
    is_logarithmic = max(values) > _SEVERAL * min(values) > 0
    for place, row in enumerate(panel.rows):
        _draw_row(axis, place, row)
    if panel.limit is not None:
        axis.axvline(panel.limit * 1e3, color=_LIMIT, linestyle="--", linewidth=1.2)
    axis.set_yticks(range(len(panel.rows)), [row.label for row in panel.rows])
    for tick, row in zip(axis.get_yticklabels(), panel.rows, strict=True):
        tick.set_color(_OURS if row.is_ours else "black")
    axis.set_ylim(len(panel.rows) - (0.4 if panel.limit is None else -0.5), -0.6)
    axis.set_title(panel.title, loc="left", fontsize=9.5)
    if is_logarithmic:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_xlim(min(values) / 1.5, max(values) * 3)
        axis.set_xlabel("milliseconds, on a logarithmic axis; left is better")
    else:
        axis.set_xlim(0, max(values) * 1.35)
        axis.set_xlabel("milliseconds; left is better")
    _name_limit(axis, panel)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _name_limit(axis: Any, panel: Panel) -> None:
    """Beside its line, on the side with more room."""
    if panel.limit is None:
        return
    place = panel.limit * 1e3, len(panel.rows)
    share = axis.transAxes.inverted().transform(axis.transData.transform(place))[0]
    side, gap = ("left", 4) if share < 0.5 else ("right", -4)
    text = f"{panel.limit_label}: {_text(panel.limit)} ms"
    axis.annotate(text, place, (gap, 0), textcoords="offset points", color=_LIMIT, va="center", ha=side)


def _draw_row(axis: Any, place: int, row: Row) -> None:
    colour = _OURS if row.is_ours else _THEIRS
    times = [second * 1e3 for second in row.seconds]
    middle = statistics.median(times)
    axis.plot([min(times), max(times)], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
    axis.plot([middle], [place], "o", color=colour, markersize=6)
    axis.annotate(
        _text(middle / 1e3),
        (max(times), place),
        xytext=(7, 0),
        textcoords="offset points",
        color=colour,
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},  # the limit's line may run here
    )


def _text(seconds: float) -> str:
    """Milliseconds, with as many digits as count."""
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
