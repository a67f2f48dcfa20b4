"""The plot of recorded loads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fusedmoe.cli.load_trace import MAX_COLUMNS, MAX_PANELS, LoadTrace, plot_loads, relative_load
from tests.marks import slowly


def random_trace(iterations: int, layers: int, experts: int) -> LoadTrace:
    return LoadTrace(np.random.default_rng().integers(0, 9, (iterations, layers, 2, experts)))


def test_relative_load_is_load_over_mean() -> None:
    trace = LoadTrace(np.array([[[[3, 0, 1, 0], [1, 0, 3, 0]], [[0] * 4, [0] * 4]]]))
    assert relative_load(trace).tolist() == [[[2, 0, 2, 0], [1, 1, 1, 1]]]


@pytest.mark.parametrize(("iterations", "layers", "experts"), [(1, 1, 1), (7, 5, 3), *slowly((MAX_COLUMNS + 7, 30, 4))])
def test_figure_has_panel_per_layer_and_summary(iterations: int, layers: int, experts: int) -> None:
    trace = random_trace(iterations, layers, experts)
    *panels, bar_or_lines, last = plot_loads(trace, title="Loads of $x_1").axes
    lines = bar_or_lines if bar_or_lines.lines else last
    assert len(panels) == min(layers, MAX_PANELS)
    titles = [axes.get_title() for axes in panels]
    assert titles[0] == "layer 0" and titles[-1] == f"layer {layers - 1}"
    picture = panels[0].images[0].get_array()
    assert picture.shape == (experts, min(iterations, MAX_COLUMNS))
    if iterations <= MAX_COLUMNS:
        np.testing.assert_allclose(picture, relative_load(trace)[:, 0].T)
    drawn = [line for line in lines.lines if len(line.get_xdata()) == picture.shape[1] and line.get_label()]
    assert len(drawn) >= layers


def test_step_axis_starts_at_first_recorded_step() -> None:
    """A trace recorded after a resume is labelled from its first step."""
    trace = LoadTrace(np.ones((4, 2, 1, 3), dtype=int), first=41)
    assert LoadTrace.from_json(trace.to_json()).first == 41
    axes = plot_loads(trace, title="Loads").axes
    assert axes[0].images[0].get_extent()[:2] == [40.5, 44.5]
    lines = axes[-1] if axes[-1].lines else axes[-2]
    assert lines.get_xlim() == (40.5, 44.5) and list(lines.lines[0].get_xdata()) == [41, 42, 43, 44]


@pytest.mark.parametrize(("layers", "labelled"), [(1, [0]), (4, [0, 1, 2, 3]), (6, [2, 3, 4, 5])])
def test_step_axis_is_labelled_below_each_column(layers: int, labelled: list[int]) -> None:
    axes = plot_loads(random_trace(3, layers, 4), title="Loads").axes
    assert [n for n, panel in enumerate(axes[:layers]) if panel.get_xlabel() == "step"] == labelled
    (lines,) = (panel for panel in axes[layers:] if panel.lines)
    assert lines.get_xlabel() == "step"


def test_lines_of_layers_differ() -> None:
    axes = plot_loads(random_trace(3, 30, 4), title="Loads").axes
    (lines,) = (panel for panel in axes[MAX_PANELS:] if panel.lines)
    drawn = [line for line in lines.lines if len(line.get_xdata()) == 3]
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == len(drawn) == 30
    assert all(one.get_color() != two.get_color() for one, two in pairwise(drawn))


@pytest.mark.slow
def test_draw_loads_writes_png(tmp_path: Path) -> None:
    plot_loads(random_trace(3, 2, 4), title="Loads").savefig(tmp_path / "loads.png")
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")
