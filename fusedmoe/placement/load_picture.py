"""Loads of experts over time, as they were recorded, as a picture: a panel for each layer, and how uneven all are.

matplotlib is imported where it draws, and through its object interface: no window, no global state, any thread.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fusedmoe.placement.load_trace import LoadTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Panels in a picture: of more layers, some that are evenly spread.
MOST_PANELS = 12
#: Columns of a panel: of more steps, means of neighbours.
MOST_COLUMNS = 400

_INK, _FAINT, _RULE = "#1a1a1a", "#5c5c5c", "#d8d8d8"
_ACROSS, _DPI = 4, 130


def draw_loads(trace: LoadTrace, path: str | Path, *, title: str) -> None:
    """Writes the picture; the ending of `path` chooses the format (.png, .svg, .pdf).

    A panel is a layer: each expert's load over the mean, step by step, 1 where loads are even. The last panel has every
    layer's max_vio, how much more than the mean its busiest expert has.
    """
    figure(trace, title=title).savefig(path, dpi=_DPI)


def figure(trace: LoadTrace, *, title: str) -> Figure:
    """The picture as a matplotlib figure, bound to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    over_ILE = over_mean(trace)
    shown = np.unique(np.linspace(0, trace.layers - 1, min(trace.layers, MOST_PANELS)).round().astype(int))
    across = min(len(shown), _ACROSS)
    rows = math.ceil(len(shown) / across)
    found = Figure(figsize=(14, 2.4 * rows + 3), layout="constrained", facecolor="white")
    FigureCanvasAgg(found)
    found.suptitle(title, color=_INK, parse_math=False)
    grid = found.add_gridspec(rows + 1, across, height_ratios=[1] * rows + [1.1])
    top = max(2.0, float(np.quantile(over_ILE, 0.995)))
    colours = LinearSegmentedColormap.from_list("loads", ["white", "#98b8f8", "#0a2f66"])
    # Columns stand for several steps each where there are many.
    begins, ends = trace.first - 0.5, trace.first + len(trace) - 0.5
    extent = (begins, ends, trace.experts - 0.5, -0.5)
    panels, picture = [], None
    for place, layer in enumerate(shown):
        axes = found.add_subplot(grid[place // across, place % across])
        options: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "extent": extent, "cmap": colours}
        picture = axes.imshow(_columns(over_ILE[:, layer]).T, vmin=0, vmax=top, **options)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_title(f"layer {layer}", size=9, color=_INK)
        axes.set_ylabel("expert" if place % across == 0 else "", color=_FAINT)
        panels.append(axes)
    assert picture is not None
    found.colorbar(picture, ax=panels, label="load over the mean", fraction=0.03)
    uneven = found.add_subplot(grid[rows, :])
    middle_I = np.linspace(begins + 0.5, ends - 0.5, len(_columns(over_ILE[:, 0])))
    vio_IL = over_ILE.max(axis=2) - 1
    for layer in range(trace.layers):
        line: dict[str, Any] = {"color": colours(0.25 + 0.7 * layer / max(1, trace.layers - 1)), "linewidth": 1.0}
        label = f"layer {layer}" if layer in shown else None
        uneven.plot(middle_I, _columns(vio_IL[:, layer, None])[:, 0], label=label, **line)
    uneven.axhline(0, color=_RULE, zorder=0)
    uneven.set(
        title="max_vio: the busiest expert's load over the mean, less 1",
        xlabel="step",
        xlim=(begins, ends),
        ylim=(0, None),
    )
    uneven.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
    for axes in (*panels, uneven):
        axes.tick_params(colors=_FAINT, length=0, labelsize=8)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return found


def over_mean(trace: LoadTrace) -> NDArray[np.float64]:
    """[I, L, E]: each expert's load over the mean of its layer's in that step; 1 where a layer had none."""
    load_ILE = trace.load_ILE.astype(np.float64)
    mean_IL1 = load_ILE.mean(axis=2, keepdims=True)
    return np.where(mean_IL1 > 0, load_ILE / np.maximum(mean_IL1, 1e-300), 1.0)


def _columns(value_IX: NDArray[np.float64]) -> NDArray[np.float64]:
    """[at most MOST_COLUMNS, X]: means of neighbouring steps."""
    parts = np.array_split(value_IX, min(len(value_IX), MOST_COLUMNS))
    return np.stack([part.mean(axis=0) for part in parts])
