"""Figures of timelines: a group of rows per rank, a row per resource, a bar per span.

    draw(timelines, "step.png", title="Step 200")
    draw({"fsmoe": simulate(one, costs), "mine": simulate(two, costs)}, "policies.png")

Colours on one row differ in lightness for colour-blind readers. A task is on the row of the hardware it uses, not of
its queue. A fused operation is on both rows: an expert with an upper band for received rows and a lower band for sent
rows. Each resource's utilization is on the right, each rank's exposed communication on the left.
"""

# Planning imports this module, so matplotlib is imported lazily. Its object interface works in any thread.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.task import FUSED, KINDS, RESOURCES, SYMBOLS, TaskKind
from fusedmoe.schedule.timeline import Span, Timeline, align_timelines, split_into_lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TIMELINES = 64

#: Colours by kind. Fused operations use those of their parts.
COLOURS: dict[str, str] = {
    TaskKind.GATE: "#35259a",
    TaskKind.PERMUTE: "#8a77ee",
    TaskKind.COUNT_EXCHANGE: "#87871e",
    TaskKind.DISPATCH: "#0a2f66",
    TaskKind.ALL_GATHER: "#1f7350",
    TaskKind.EXPERT: "#f79a1c",
    TaskKind.REDUCE_SCATTER: "#80f2d8",
    TaskKind.COMBINE: "#98b8f8",
    TaskKind.UNPERMUTE: "#d9cbf8",
    TaskKind.SHARED_EXPERT: "#aaeebb",
    TaskKind.ATTENTION: "#f5d878",
    TaskKind.WEIGHT_GRADIENT: "#ad380c",
    TaskKind.ATTENTION_WEIGHT_GRADIENT: "#0490b3",
    TaskKind.GRADIENT_ALL_REDUCE: "#bd559b",
    TaskKind.SPARSE_ALL_GATHER: "#8f1fe8",
    TaskKind.SPARSE_REDUCE_SCATTER: "#dde04a",
    TaskKind.LOSS: "#121220",
    TaskKind.OPTIMIZER: "#5e4c47",
    TaskKind.OTHER: "#a09c98",
}

# Height of a fused operation's bands, as a fraction of its bar.
_BAND_HEIGHT_FRACTION = 0.12

# In inches.
_FIGURE_WIDTH, _LEFT_MARGIN, _RIGHT_MARGIN = 15.0, 1.75, 0.75
# Width of a group's label; bold text is up to a sixth wider than `text_width`.
_GROUP_LABEL_WIDTH = 0.8
_MIN_ROW_HEIGHT, _ROW_GAP, _PASS_LABEL_HEIGHT, _GROUP_GAP, _MIN_LANE_HEIGHT = 0.34, 0.05, 0.2, 0.2, 0.17
_DPI = 130

_TEXT_COLOUR, _FAINT_TEXT_COLOUR, _GRID_COLOUR, _ROW_COLOUR, _BACKWARD_COLOUR = (
    "#1a1a1a",
    "#5c5c5c",
    "#d8d8d8",
    "#f4f4f4",
    "#e2dfd6",
)
# Backgrounds of odd layers.
_ODD_LAYER_COLOURS = {"forward": "#e3e8f0", "backward": "#cdc7b6"}


#: Timelines by label, or labelled by their ranks (and sources, for several timelines of one rank).
Timelines = Timeline | Sequence[Timeline] | Mapping[str, Timeline]


def draw(timelines: Timelines, path: str | Path, *, title: str = "Timeline") -> None:
    """Write the figure of the timelines to `path`; its suffix selects the format (.png, .svg, .pdf).

    Aligns the timelines (`align_timelines`) and draws a group of rows for each. Its label is its key in a mapping, such
    as the policy's name; otherwise its rank and, if a rank has several timelines, its source. Raises `ConfigError` for
    more than `MAX_TIMELINES`.
    """
    figure(timelines, title=title).savefig(path, dpi=_DPI)


def figure(timelines: Timelines, *, title: str = "Timeline") -> Figure:
    """Return the figure of `draw` without writing it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    given = [*timelines.values()] if isinstance(timelines, Mapping) else timelines
    aligned = align_timelines([given] if isinstance(given, Timeline) else given)
    if len(aligned) > MAX_TIMELINES:
        raise ConfigError(f"draw: {len(aligned)} timelines are too many for a figure; pass at most {MAX_TIMELINES}")
    labels = [*timelines] if isinstance(timelines, Mapping) else _rank_labels(aligned)
    groups, rows_height = _lay_out_groups(aligned, labels)
    kinds = [kind for kind in KINDS if any(span.kind == kind for t in aligned for span in t.spans)]
    has_backward = any(span.phase == "backward" for t in aligned for span in t.spans)
    span_ms = max((t.end_s for t in aligned), default=0.0) * 1e3

    result = Figure(dpi=_DPI, facecolor="white")
    FigureCanvasAgg(result)
    entries = [(str(kind), f"{SYMBOLS[kind]}  {kind}".strip()) for kind in kinds]
    legend, legend_height = _lay_out_legend(entries + [("", "backward pass")] * has_backward)
    head, foot = 0.75 + legend_height, 0.55
    height = head + rows_height + foot
    result.set_size_inches(_FIGURE_WIDTH, height)

    page = result.add_axes((0, 0, 1, 1), xlim=(0, _FIGURE_WIDTH), ylim=(height, 0))
    page.set_axis_off()
    plot_width = _FIGURE_WIDTH - _LEFT_MARGIN - _RIGHT_MARGIN
    area = (_LEFT_MARGIN / _FIGURE_WIDTH, foot / height, plot_width / _FIGURE_WIDTH, rows_height / height)
    chart = result.add_axes(area, xlim=(0, span_ms or 1.0), ylim=(rows_height, 0))
    _draw_heading(page, title, _summary_text(aligned, span_ms), legend)
    _style_chart(chart)
    inches_per_ms = plot_width / (span_ms or 1.0)
    # Abbreviate all brackets or none.
    runs = [(group.pass_label(run, brief=False), run) for group in groups for run in group.pass_intervals]
    brief = not all(_fits_width(name, 1e3 * (run.end_s - run.start_s) * inches_per_ms) for name, run in runs if name)
    for group in groups:
        _draw_group(page, chart, group, head, span_ms, inches_per_ms, brief)
    if not kinds:
        chart.text(0.5, 0.5, "no spans", transform=chart.transAxes, ha="center", va="center", color=_FAINT_TEXT_COLOUR)
    return result


class _PassInterval(NamedTuple):
    start_s: float
    end_s: float
    phase: str
    layer: int | None


class _ResourceRow(NamedTuple):
    resource: str
    top: float
    height: float
    lanes: list[list[Span]]
    busy_s: float


class _TimelineGroup(NamedTuple):
    label: str
    note: str
    top: float  # top of the strip with pass names
    rows: list[_ResourceRow]
    pass_intervals: list[_PassInterval]

    @property
    def bottom(self) -> float:
        return self.rows[-1].top + self.rows[-1].height

    def pass_label(self, run: _PassInterval, brief: bool) -> str:
        """Return the label above an interval: its pass and layer, abbreviated if `brief`.

        An interval without a layer (the loss) has no label if others have layers.
        """
        name = {"forward": "fwd", "backward": "bwd"}[run.phase] if brief else run.phase
        if run.layer is not None:
            return f"{name} {run.layer}" if brief else f"{name}, layer {run.layer}"
        return "" if any(other.layer is not None for other in self.pass_intervals) else name


def _rank_labels(timelines: Sequence[Timeline]) -> list[str]:
    several = len({(t.source, t.rank) for t in timelines}) > len({t.rank for t in timelines})
    return [f"rank {t.rank}" + (f"\n{t.source}" if several else "") for t in timelines]


def _lay_out_groups(timelines: Sequence[Timeline], labels: Sequence[str]) -> tuple[list[_TimelineGroup], float]:
    used = {resource for timeline in timelines for resource in timeline.resources}
    shown = [resource for resource in RESOURCES if resource in used or resource == "compute"]
    groups: list[_TimelineGroup] = []
    y = 0.0
    for timeline, label in zip(timelines, labels, strict=True):
        top, runs = y, _pass_intervals(timeline)
        y += _PASS_LABEL_HEIGHT
        rows = []
        for resource in shown:
            parts = split_into_lanes(timeline.on(resource))
            height = max(_MIN_ROW_HEIGHT, len(parts) * _MIN_LANE_HEIGHT)
            rows.append(_ResourceRow(resource, y, height, parts, timeline.busy_s(resource)))
            y += height + _ROW_GAP
        note = f"{format_ms(timeline.exposed_s())} exposed" if len(shown) > 1 else ""
        groups.append(_TimelineGroup(label, note, top, rows, runs))
        y += _GROUP_GAP - _ROW_GAP
    return groups, max(y - _GROUP_GAP, _MIN_ROW_HEIGHT) + 0.06


def _pass_intervals(timeline: Timeline) -> list[_PassInterval]:
    result: list[_PassInterval] = []
    for span in timeline.on("compute") or timeline.spans:
        if span.phase is None:
            continue
        last = result[-1] if result else None
        if last is not None and last[2:] == (span.phase, span.layer):
            result[-1] = last._replace(end_s=max(last.end_s, span.end_s))
        else:
            if last is not None:  # runs do not overlap
                result[-1] = last._replace(end_s=min(last.end_s, span.start_s))
            result.append(_PassInterval(span.start_s, span.end_s, span.phase, span.layer))
    return result


def _summary_text(timelines: Sequence[Timeline], span_ms: float) -> str:
    ranks = len({timeline.rank for timeline in timelines})
    parts = [f"{ranks} rank{'s' if ranks != 1 else ''}", format_ms(span_ms * 1e-3)]
    sources = {timeline.source for timeline in timelines}
    if len(sources) == 1:
        parts.insert(0, sources.pop())
        if any(resource != "compute" for timeline in timelines for resource in timeline.resources):
            exposed_s = sum(timeline.exposed_s() for timeline in timelines) / len(timelines)
            parts.append(f"exposed communication: {format_ms(exposed_s)} per rank")
    return "   ·   ".join(parts)


def _lay_out_legend(entries: list[tuple[str, str]]) -> tuple[list[tuple[float, float, str, str]], float]:
    """Return (x, y, kind, label) of each legend entry, and the height."""
    x, y, result = 0.15, 0.0, []
    for kind, label in entries:
        width = 0.22 + text_width(label, 8.0) + 0.14
        if x + width > _FIGURE_WIDTH:
            x, y = 0.15, y + 0.21
        result.append((x, y, kind, label))
        x += width
    return result, y + 0.21 if result else 0.0


def _draw_heading(page: Axes, title: str, summary: str, legend: list[tuple[float, float, str, str]]) -> None:
    from matplotlib.patches import Rectangle

    page.text(0.15, 0.22, title, size=13, weight="bold", color=_TEXT_COLOUR, va="center", parse_math=False)
    page.text(0.15, 0.46, summary, size=8.5, color=_FAINT_TEXT_COLOUR, va="center")
    for x, y, kind, label in legend:
        for top, bottom, colour in bar_stripes(kind) if kind else [Stripe(0.0, 1.0, _BACKWARD_COLOUR)]:
            where, height = (x, 0.625 + y + 0.13 * top), 0.13 * (bottom - top)
            page.add_patch(
                Rectangle(where, 0.17, height, facecolor=colour, edgecolor=_FAINT_TEXT_COLOUR, linewidth=0.4)
            )
        page.text(x + 0.22, 0.69 + y, label, size=8.0, color=_TEXT_COLOUR, va="center")


def _style_chart(chart: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    chart.set_yticks([])
    chart.xaxis.set_major_locator(MaxNLocator(12))
    chart.tick_params(axis="x", labelsize=8.5, colors=_FAINT_TEXT_COLOUR, length=3)
    chart.set_xlabel("time, ms", size=8.5, color=_FAINT_TEXT_COLOUR)
    chart.grid(axis="x", color=_GRID_COLOUR, linewidth=0.6)
    chart.set_axisbelow(True)
    chart.patch.set_visible(False)
    for side, spine in chart.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_FAINT_TEXT_COLOUR)


def _draw_group(
    page: Axes, chart: Axes, group: _TimelineGroup, head: float, span_ms: float, inches_per_ms: float, brief: bool
) -> None:
    from matplotlib.patches import Rectangle

    middle = head + (group.rows[0].top + group.bottom) / 2
    size = (
        10.0
        * _GROUP_LABEL_WIDTH
        / max(_GROUP_LABEL_WIDTH, *(text_width(line, 10.0) for line in group.label.split("\n")))
    )
    page.text(0.15, middle, group.label, size=size, weight="bold", color=_TEXT_COLOUR, va="center", parse_math=False)
    below = middle + 0.1 + 0.09 * group.label.count("\n")
    page.text(0.15, below, group.note, size=7.5, color=_FAINT_TEXT_COLOUR, va="top")
    page.text(
        _FIGURE_WIDTH - 0.1, head + group.top + 0.1, "busy", size=7, color=_FAINT_TEXT_COLOUR, ha="right", va="center"
    )
    for row in group.rows:
        y = head + row.top + row.height / 2
        page.text(_LEFT_MARGIN - 0.1, y, row.resource, size=9, color=_TEXT_COLOUR, ha="right", va="center")
        share = f"{100 * row.busy_s / (span_ms * 1e-3):.0f}%" if span_ms else ""
        page.text(_FIGURE_WIDTH - 0.1, y, share, size=8.5, color=_FAINT_TEXT_COLOUR, ha="right", va="center")
        chart.add_patch(Rectangle((0, row.top), span_ms or 1.0, row.height, facecolor=_ROW_COLOUR, zorder=0.1))
    for run in group.pass_intervals:
        left, width = run.start_s * 1e3, (run.end_s - run.start_s) * 1e3
        if ground := background_colour(run.phase, run.layer):
            height = group.bottom - group.rows[0].top
            chart.add_patch(Rectangle((left, group.rows[0].top), width, height, facecolor=ground, zorder=0.2))
        name = group.pass_label(run, brief)
        if not name:
            continue
        gap = min(0.02 / inches_per_ms, width / 4)
        y = group.top + _PASS_LABEL_HEIGHT - 0.025
        chart.plot((left + gap, left + width - gap), (y, y), color=_FAINT_TEXT_COLOUR, linewidth=0.7, zorder=1)
        if _fits_width(name, width * inches_per_ms):
            chart.text(
                left + width / 2, group.top + 0.08, name, size=7.5, color=_FAINT_TEXT_COLOUR, ha="center", va="center"
            )
    _draw_bars(chart, group, inches_per_ms)


def background_colour(phase: str, layer: int | None) -> str | None:
    """Return the background colour of a layer's pass; None: the row's own colour."""
    if layer is not None and layer % 2:
        return _ODD_LAYER_COLOURS[phase]
    return _BACKWARD_COLOUR if phase == "backward" else None


def _fits_width(name: str, inches: float) -> bool:
    return text_width(name, 7.5) < inches - 0.06


def _draw_bars(chart: Axes, group: _TimelineGroup, inches_per_ms: float) -> None:
    from matplotlib.collections import PolyCollection

    corners, colours, edges = [], [], []
    for row in group.rows:
        lane_height = row.height / max(1, len(row.lanes))
        for index, lane in enumerate(row.lanes):
            top = row.top + index * lane_height
            bottom = top + lane_height - (0.015 if len(row.lanes) > 1 else 0.0)
            for span in lane:
                # At least one pixel wide, also at the right edge.
                width = max(span.duration_s * 1e3, 1.0 / _DPI / inches_per_ms)
                left = min(span.start_s * 1e3, chart.get_xlim()[1] - width)
                right = left + width
                ground, *bands = bar_stripes(span.kind)
                for stripe in (ground, *bands):
                    y0, y1 = (top + share * (bottom - top) for share in (stripe.top, stripe.bottom))
                    corners.append([(left, y0), (right, y0), (right, y1), (left, y1)])
                    colours.append(stripe.colour)
                    edges.append(0.5 if width * inches_per_ms > 0.03 and stripe is ground else 0.0)
                free = (_BAND_HEIGHT_FRACTION, 1 - _BAND_HEIGHT_FRACTION) if bands else (0.0, 1.0)
                y0, y1 = (top + share * (bottom - top) for share in free)
                ink = "white" if is_dark(ground.colour) else _TEXT_COLOUR
                for dy, text, size in bar_label_lines(span, width * inches_per_ms, y1 - y0):
                    at = left + width / 2, (y0 + y1) / 2 + dy
                    chart.text(*at, text, size=size, color=ink, ha="center", va="center_baseline", parse_math=False)
    # One collection for all bars: a patch per bar takes seconds for thousands of tasks.
    bars = PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=edges or [0.0], zorder=2)
    chart.add_collection(bars, autolim=False)


class Stripe(NamedTuple):
    """A horizontal stripe of a bar. `top` and `bottom` are fractions of its height, from above."""

    top: float
    bottom: float
    colour: str


def bar_stripes(kind: str) -> list[Stripe]:
    """Return the stripes of a bar in painting order: background, then bands."""
    if kind not in FUSED:
        return [Stripe(0.0, 1.0, COLOURS[kind])]
    there, expert, back = (COLOURS[part] for part in FUSED[kind])
    return [
        Stripe(0.0, 1.0, expert),
        Stripe(0.0, _BAND_HEIGHT_FRACTION, there),
        Stripe(1 - _BAND_HEIGHT_FRACTION, 1.0, back),
    ]


def bar_label_lines(span: Span, width: float, height: float) -> list[tuple[float, str, float]]:
    """Return the lines of text that fit into a bar (inches): (offset from the middle, text, points)."""
    room = width - 0.04
    chunk = "" if span.chunk is None else str(span.chunk)
    name, short, time = f"{span.name} {chunk}".strip(), SYMBOLS[span.kind] + chunk, format_ms(span.duration_s)
    if height >= 0.28 and text_width(time, 6.5) <= room:
        for text in filter(None, (name, short)):
            if text_width(text, 7.5) <= room:
                return [(-0.065, text, 7.5), (0.075, time, 6.5)]
    for text, size in ((f"{name} {time}", 7.0), (name, 7.0), (short, 7.0), (short, 5.5), (chunk, 5.5)):
        if text and text_width(text, size) <= room:
            return [(0.0, text, size)]
    return []


@lru_cache(maxsize=4096)  # ranks have equal labels
def text_width(text: str, size: float) -> float:
    """Return the width in inches of a text at a font size in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    points: float = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)[0]
    return points / 72


def format_ms(seconds: float) -> str:
    """Format seconds as milliseconds with three significant digits, from 10 s as seconds."""
    if seconds >= 9.9995:
        return f"{seconds:.{int(seconds < 99.95)}f} s"
    value = seconds * 1e3
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:.{decimals}f} ms"


def is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance: float = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return luminance < 0.3
