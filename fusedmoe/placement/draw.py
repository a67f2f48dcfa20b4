"""One layer of a load trace as a picture: loads over time, the placement, and each rank's work before and after.

matplotlib is imported where it draws, not with this module, and through its object interface: no window, no global
state, any thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fusedmoe.placement.loads import LoadTrace
from fusedmoe.placement.placement import Nodes
from fusedmoe.placement.predict import WINDOW
from fusedmoe.placement.simulate import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _FAINT, _RULE = "#1a1a1a", "#5c5c5c", "#d8d8d8"
_BEFORE, _AFTER, _OWNER, _REPLICA = "#f79a1c", "#0a2f66", "#0a2f66", "#98b8f8"
_OTHERS = "#d9d6d2"
# Neighbours differ in lightness, so that they can be told apart with any colour vision.
_EXPERTS = ("#0a2f66", "#f79a1c", "#1f7350", "#80f2d8", "#8f1fe8", "#f5d878", "#ad380c", "#98b8f8")
_DPI = 130


def draw(
    trace: LoadTrace, before: Outcome, after: Outcome, nodes: Nodes, layer: int, path: str | Path, *, title: str
) -> None:
    """Writes the picture to `path`; its ending chooses the format (.png, .svg, .pdf).

    Args:
        before, after: the trace under two policies. The placement is that of `after` in the last iteration, and each
            rank's work is in that iteration.
    """
    figure(trace, before, after, nodes, layer, title=title).savefig(path, dpi=_DPI)


def figure(trace: LoadTrace, before: Outcome, after: Outcome, nodes: Nodes, layer: int, *, title: str) -> Figure:
    """The picture as a matplotlib figure, bound to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = Figure(figsize=(14, 9), layout="constrained")
    FigureCanvasAgg(found)
    found.suptitle(title, color=_INK)
    (loads, stragglers), (places, work) = found.subplots(2, 2)
    load_IE = trace.load_ILE[:, layer]
    order_E = np.argsort(-load_IE.mean(axis=0), kind="stable")
    _draw_loads(loads, load_IE, order_E)
    _draw_stragglers(stragglers, before.straggler_IL[:, layer], after.straggler_IL[:, layer])
    _draw_placement(places, after, layer, order_E, nodes)
    _draw_work(work, before.work_ILW[-1, layer], after.work_ILW[-1, layer], nodes)
    for axes in (loads, stragglers, places, work):
        axes.tick_params(colors=_FAINT, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return found


def _draw_loads(axes: Any, load_IE: NDArray[np.int64], order_E: NDArray[np.intp]) -> None:
    share_IE = load_IE / np.maximum(load_IE.sum(axis=1, keepdims=True), 1)
    named = order_E[: len(_EXPERTS)]
    rest_I = 1 - share_IE[:, named].sum(axis=1)
    labels = [f"expert {expert}" for expert in named] + ["all others"] * (len(order_E) > len(named))
    layers = [*share_IE[:, named].T, rest_I][: len(labels)]
    axes.stackplot(range(len(load_IE)), layers, labels=labels, colors=[*_EXPERTS[: len(named)], _OTHERS])
    axes.set(title="Loads: share of all tokens", xlabel="iteration", xlim=(0, max(len(load_IE) - 1, 1)), ylim=(0, 1))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", reverse=True, frameon=False)


def _draw_stragglers(axes: Any, before_I: NDArray[np.float64], after_I: NDArray[np.float64]) -> None:
    iterations = range(WINDOW, WINDOW + len(before_I))
    axes.plot(iterations, before_I, color=_BEFORE, label=f"before: {before_I.mean():.2f} in the mean")
    axes.plot(iterations, after_I, color=_AFTER, label=f"after: {after_I.mean():.2f}")
    axes.axhline(1, color=_RULE, zorder=0)
    axes.set(title="Work of the busiest rank over the mean", xlabel="iteration", ylim=(0, None))
    axes.legend(loc="lower right", fontsize="small")  # no busiest rank has less than the mean


def _draw_placement(axes: Any, after: Outcome, layer: int, order_E: NDArray[np.intp], nodes: Nodes) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    placement = after.last[layer]
    holds_EW = placement.holds_EW.astype(np.int64)
    holds_EW[np.arange(placement.experts), list(placement.owners)] = 2
    colours = ListedColormap(["white", _REPLICA, _OWNER])
    axes.pcolormesh(holds_EW[order_E], cmap=colours, vmin=0, vmax=2, edgecolors=_RULE, linewidth=0.4)
    for node in range(1, nodes.count):
        axes.axvline(node * nodes.per_node, color=_INK, linewidth=1.2)
    axes.set(title="Placement in the last iteration", xlabel="rank, by node", ylabel="expert, the most asked for first")
    axes.set_xticks(np.arange(nodes.ranks) + 0.5, [str(rank) for rank in range(nodes.ranks)])
    axes.set_yticks(np.arange(placement.experts) + 0.5, [str(expert) for expert in order_E], fontsize="x-small")
    axes.invert_yaxis()
    axes.legend(
        handles=[Patch(color=_OWNER, label="owner"), Patch(color=_REPLICA, label="replica")],
        loc="upper left",
        bbox_to_anchor=(1, 1),
        fontsize="small",
        frameon=False,
    )


def _draw_work(axes: Any, before_W: NDArray[np.int64], after_W: NDArray[np.int64], nodes: Nodes) -> None:
    ranks_W = np.arange(nodes.ranks)
    axes.bar(ranks_W - 0.2, before_W, 0.4, color=_BEFORE, label="before")
    axes.bar(ranks_W + 0.2, after_W, 0.4, color=_AFTER, label="after")
    axes.axhline(before_W.mean(), color=_FAINT, linewidth=1, linestyle="--", label="mean")
    axes.set(title="Tokens that each rank computes in the last iteration", xlabel="rank")
    axes.set_xticks(ranks_W)
    axes.set_ylim(0, 1.15 * max(before_W.max(), after_W.max(), 1))
    axes.legend(loc="upper right", ncols=3, fontsize="small")  # above the bars
