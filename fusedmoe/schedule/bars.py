"""What the bar of a span looks like in a picture of a timeline: its colours, and the words that fit into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fusedmoe.schedule.task import FUSED
from fusedmoe.schedule.timeline import SYMBOLS, Span

#: Of each kind but fused operations, which have those of their parts.
COLOURS = {
    "gate": "#35259a",
    "order": "#8a77ee",
    "dispatch": "#0a2f66",
    "all-gather": "#1f7350",
    "expert": "#f79a1c",
    "reduce-scatter": "#80f2d8",
    "combine": "#98b8f8",
    "unorder": "#d9cbf8",
    "attention": "#f5d878",
    "weight-gradient": "#ad380c",
    "attention-weight-gradient": "#0490b3",
    "gradient-all-reduce": "#bd559b",
    "sparse-all-gather": "#8f1fe8",
    "sparse-reduce-scatter": "#dde04a",
    "loss": "#121220",
    "optimizer": "#5e4c47",
    "other": "#a09c98",
}

# The height of a fused operation's bands, as a share of its bar's.
_BAND = 0.12


class Stripe(NamedTuple):
    """A part of a bar; top and bottom are shares of its height, from above."""

    top: float
    bottom: float
    colour: str


def stripes_of(kind: str) -> list[Stripe]:
    """What a bar is painted with, one over the other: its ground, and a fused operation's bands."""
    if kind not in FUSED:
        return [Stripe(0.0, 1.0, COLOURS[kind])]
    there, expert, back = (COLOURS[part] for part in FUSED[kind])
    return [Stripe(0.0, 1.0, expert), Stripe(0.0, _BAND, there), Stripe(1 - _BAND, 1.0, back)]


def free_of(bands: Sequence[Stripe]) -> tuple[float, float]:
    """Top and bottom of what bands leave of a bar."""
    top = max((band.bottom for band in bands if band.bottom < 0.5), default=0.0)
    return top, min((band.top for band in bands if band.top > 0.5), default=1.0)


def label_of(span: Span, width: float, height: float, measure: Measure) -> list[tuple[float, str, float]]:
    """What fits into a bar of so many inches: lines of (offset from the middle, text, size in points)."""
    room = width - 0.04
    chunk = "" if span.chunk is None else str(span.chunk)
    name, short, time = f"{span.name} {chunk}".strip(), SYMBOLS[span.kind] + chunk, ms(span.duration_s)
    if height >= 0.28 and measure.width(time, 6.5) <= room:
        for text in filter(None, (name, short)):
            if measure.width(text, 7.5) <= room:
                return [(-0.065, text, 7.5), (0.075, time, 6.5)]
    for text, size in ((f"{name} {time}", 7.0), (name, 7.0), (short, 7.0), (short, 5.5), (chunk, 5.5)):
        if text and measure.width(text, size) <= room:
            return [(0.0, text, size)]
    return []


class Measure:
    """Widths of text in inches, at a font size in points."""

    def __init__(self, canvas: Any) -> None:
        self._canvas = canvas
        self._known: dict[tuple[str, float], float] = {}

    def width(self, text: str, size: float) -> float:
        key = (text, size)
        if key not in self._known:
            from matplotlib.font_manager import FontProperties

            renderer = self._canvas.get_renderer()
            wide, _, _ = renderer.get_text_width_height_descent(text, FontProperties(size=size), False)
            self._known[key] = wide / self._canvas.figure.dpi
        return self._known[key]


def ms(seconds: float) -> str:
    """Milliseconds with three digits that count: 123 ms, 12.3 ms, 1.23 ms, 0.123 ms."""
    value = seconds * 1e3
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:.{decimals}f} ms"


def is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance: float = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return luminance < 0.3
