from __future__ import annotations

from functools import partial

import pytest

from fusedmoe.placement.draw import draw, figure
from fusedmoe.placement.loads import make_loads
from fusedmoe.placement.placement import Nodes
from fusedmoe.placement.policies import expert_parallelism, hecate
from fusedmoe.placement.price import CLUSTER_A
from fusedmoe.placement.simulate import simulate

NODES = Nodes(4, 2)


def followed(experts: int):
    trace = make_loads(9, 2, 4, experts, tokens=200)
    before, after = (simulate(trace, one, NODES, CLUSTER_A) for one in (expert_parallelism, partial(hecate, t=2, m=1)))
    return trace, before, after


@pytest.mark.parametrize("experts", [3, 12])
def test_what_is_drawn(experts):
    trace, before, after = followed(experts)
    found = figure(trace, before, after, NODES, 1, title="A layer")
    loads, stragglers, places, work = found.axes
    assert found.get_suptitle() == "A layer"
    named = loads.get_legend_handles_labels()[1]
    top = trace.load_ILE[:, 1].mean(axis=0).argmax()
    assert named[0] == f"expert {top}" and len(named) == (9 if experts > 8 else 3)
    lines = [line.get_ydata() for line in stragglers.get_lines()]
    assert list(lines[0]) == list(before.straggler_IL[:, 1]) and list(lines[1]) == list(after.straggler_IL[:, 1])
    cells = places.collections[0].get_array().reshape(experts, 4)
    assert (cells == 2).sum(axis=1).tolist() == [1] * experts, "one owner"
    assert (cells == 1).sum() == after.last[1].extra_W().sum()
    heights = [bar.get_height() for bar in work.patches]
    assert heights == [*before.work_ILW[-1, 1], *after.work_ILW[-1, 1]]


def test_legends_cover_no_bar_and_no_line():
    found = figure(*followed(12), NODES, 1, title="A layer")
    found.canvas.draw()
    _, stragglers, _, work = found.axes
    box = stragglers.get_legend().get_window_extent()
    ends = [stragglers.transData.transform(line.get_xydata()) for line in stragglers.get_lines()[:2]]
    assert min(y for end in ends for _, y in end) > box.y1
    assert max(bar.get_window_extent().y1 for bar in work.patches) < work.get_legend().get_window_extent().y0


@pytest.mark.parametrize(("ending", "starts"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats(tmp_path, ending, starts):
    path = tmp_path / f"loads.{ending}"
    draw(*followed(4), NODES, 0, path, title="A layer")
    assert path.read_bytes().startswith(starts)
