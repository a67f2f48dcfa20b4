"""The picture of recorded loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fusedmoe.cli.load_trace import MOST_COLUMNS, MOST_PANELS, LoadTrace, draw_loads, figure, over_mean
from tests.marks import slowly


def make(iterations: int, layers: int, experts: int) -> LoadTrace:
    return LoadTrace(np.random.default_rng().integers(0, 9, (iterations, layers, 2, experts)))


def test_loads_are_over_their_mean() -> None:
    trace = LoadTrace(np.array([[[[3, 0, 1, 0], [1, 0, 3, 0]], [[0] * 4, [0] * 4]]]))
    assert over_mean(trace).tolist() == [[[2, 0, 2, 0], [1, 1, 1, 1]]]


@pytest.mark.parametrize(
    ("iterations", "layers", "experts"), [(1, 1, 1), (7, 5, 3), *slowly((MOST_COLUMNS + 7, 30, 4))]
)
def test_a_panel_for_each_layer_and_one_for_all(iterations: int, layers: int, experts: int) -> None:
    trace = make(iterations, layers, experts)
    *panels, bar_or_lines, last = figure(trace, title="Loads of $x_1").axes
    lines = bar_or_lines if bar_or_lines.lines else last
    assert len(panels) == min(layers, MOST_PANELS)
    titles = [axes.get_title() for axes in panels]
    assert titles[0] == "layer 0" and titles[-1] == f"layer {layers - 1}"
    picture = panels[0].images[0].get_array()
    assert picture.shape == (experts, min(iterations, MOST_COLUMNS))
    if iterations <= MOST_COLUMNS:
        np.testing.assert_allclose(picture, over_mean(trace)[:, 0].T)
    drawn = [line for line in lines.lines if len(line.get_xdata()) == picture.shape[1] and line.get_label()]
    assert len(drawn) >= layers


def test_steps_have_the_numbers_that_they_had() -> None:
    """A trace that begins after a resume is not labelled from 1."""
    trace = LoadTrace(np.ones((4, 2, 1, 3), dtype=int), first=41)
    assert LoadTrace.from_json(trace.to_json()).first == 41
    axes = figure(trace, title="Loads").axes
    assert axes[0].images[0].get_extent()[:2] == [40.5, 44.5]
    (lines,) = (one for one in axes if one.get_xlabel() == "step")
    assert lines.get_xlim() == (40.5, 44.5) and list(lines.lines[0].get_xdata()) == [41, 42, 43, 44]


@pytest.mark.slow
def test_it_is_written(tmp_path: Path) -> None:
    draw_loads(make(3, 2, 4), tmp_path / "loads.png", title="Loads")
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")
