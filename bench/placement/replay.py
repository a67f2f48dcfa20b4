"""Replay of a load trace under a policy: each rank's work, inter-node traffic, and cost; and its plot.

matplotlib is imported when plotting, through its object interface: no window, no global state, any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.placement.baselines import Decision, Policy, Situation
from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.errors import ConfigError
from fusedmoe.placement.hecate import WINDOW
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import PlacementCosts, compute_s, exchange_s, placement_load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _FAINT, _RULE = "#1a1a1a", "#5c5c5c", "#d8d8d8"
_BEFORE, _AFTER, _OWNER, _REPLICA = "#f79a1c", "#0a2f66", "#0a2f66", "#98b8f8"
_OTHERS = "#d9d6d2"
# Adjacent colours differ in lightness, for readers with any colour vision.
_EXPERTS = ("#0a2f66", "#f79a1c", "#1f7350", "#80f2d8", "#8f1fe8", "#f5d878", "#ad380c", "#98b8f8")
_DPI = 130


@dataclass(frozen=True, eq=False)
class Outcome:
    """Result of a policy on a trace, from the sixth iteration (earlier ones serve the first prediction).

    Attributes:
        last: [L], placements of the last iteration.
        work_ILW: tokens computed by each rank.
        ingress_IL: maximum over ranks of bytes received from other nodes in one all-to-all.
        exchange_IL, compute_IL: seconds of the all-to-alls, and of the busiest rank's experts.
        waits_I: exposed seconds of sending parameters.
        sent_I: bytes of parameters, replica gradients and state, hidden or not.
        replicas_I: maximum replicas per rank, over all layers together.
        owned_I: maximum owned experts per rank, over all layers together.
        peak_I: maximum bytes of a rank's experts, over all layers together: parameters, gradients and state of owned
            experts (for a layer with changing owners, before and after), and replicas.
    """

    last: tuple[Placement, ...]
    work_ILW: NDArray[np.int64]
    ingress_IL: NDArray[np.int64]
    exchange_IL: NDArray[np.float64]
    compute_IL: NDArray[np.float64]
    waits_I: NDArray[np.float64]
    sent_I: NDArray[np.int64]
    replicas_I: NDArray[np.int64]
    owned_I: NDArray[np.int64]
    peak_I: NDArray[np.int64]

    @property
    def straggler_IL(self) -> NDArray[np.float64]:
        """Return the busiest rank's work divided by the mean; 1 without work."""
        mean_IL = self.work_ILW.mean(axis=2)
        return np.where(mean_IL > 0, self.work_ILW.max(axis=2) / np.maximum(mean_IL, 1e-300), 1.0)

    @property
    def straggler(self) -> float:
        return float(self.straggler_IL.mean())

    @property
    def ingress_bytes(self) -> float:
        """Return the busiest rank's mean bytes from other nodes in the all-to-all of one layer."""
        return float(self.ingress_IL.mean())

    @property
    def layers_s(self) -> float:
        """Return the mean seconds per iteration of all layers' all-to-alls and experts."""
        return float((self.exchange_IL + self.compute_IL).sum(axis=1).mean())

    @property
    def waits_s(self) -> float:
        """Return the mean exposed seconds of sending parameters per iteration."""
        return float(self.waits_I.mean())

    @property
    def iteration_s(self) -> float:
        """Return the mean seconds of the expert layers per iteration, including `waits_s`."""
        return self.layers_s + self.waits_s

    def speedup_L(self, of: Outcome) -> NDArray[np.float64]:
        """Return [L]: the layers' speed-up over `of`, without exposed transfers (Hecate, Fig. 11)."""
        ours_L, theirs_L = ((one.exchange_IL + one.compute_IL).sum(axis=0) for one in (self, of))
        return theirs_L / ours_L


def replay(
    trace: LoadTrace,
    policy: Policy,
    node_layout: NodeLayout,
    costs: PlacementCosts,
    *,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Replay the trace, starting from even shardings.

    Args:
        show: called after each iteration with the number of finished iterations and the total.
    Raises:
        ConfigError: the trace has another number of ranks, or is too short for a prediction.
    """
    if trace.ranks != node_layout.num_ranks:
        raise ConfigError(f"simulation: a trace of {trace.ranks} ranks, but {node_layout.num_ranks} ranks in nodes")
    if len(trace) <= WINDOW:
        raise ConfigError(
            f"simulation: {len(trace)} iterations; the first {WINDOW} are for the prediction, give more than that"
        )
    load_ILE = trace.load_ILE
    placements = (Placement.even(trace.ranks, trace.experts),) * trace.layers
    rows = []
    for iteration in range(WINDOW, len(trace)):
        tokens_LWE = trace.tokens_ILWE[iteration]
        decision = policy(Situation(iteration, placements, load_ILE[:iteration], tokens_LWE, node_layout, costs))
        if not all(isinstance(one, Placement) for one in decision.placements):
            name = getattr(policy, "__qualname__", "the policy")
            kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in decision.placements))
            raise ConfigError(f"{name}: expected a Decision with a Placement for each layer, not with {kinds}")
        peak_bytes = _peak_bytes(placements, decision, costs)
        placements = decision.placements
        found = decision.loads or [
            placement_load(tokens, one, node_layout) for tokens, one in zip(tokens_LWE, placements, strict=True)
        ]
        rows.append(
            (
                [one.work_W for one in found],
                [costs.token_bytes * one.inter_node_received_W.max() for one in found],
                [exchange_s(one, costs) for one in found],
                [compute_s(one, costs) for one in found],
                decision.waits_s,
                decision.sent_bytes,
                np.sum([one.extra_W() for one in placements], axis=0).max(),
                np.sum([np.bincount(one.owners, minlength=one.num_ranks) for one in placements], axis=0).max(),
                peak_bytes,
            )
        )
        show(iteration + 1 - WINDOW, len(trace) - WINDOW)
    return Outcome(placements, *(np.array(column) for column in zip(*rows, strict=True)))


def _peak_bytes(before: Sequence[Placement], decision: Decision, costs: PlacementCosts) -> int:
    """Return the peak bytes of a rank's experts: during owner changes, layer by layer, or in the iteration."""
    after = decision.placements
    old_LW, new_LW = (
        np.array([np.bincount(one.owners, minlength=one.num_ranks) for one in of]) for of in (before, after)
    )
    trained, moved = costs.move_bytes + costs.expert_bytes, costs.move_bytes  # gradients are freed before a move
    replica = trained if decision.replica_state else 2 * costs.expert_bytes
    step_W = trained * new_LW.sum(axis=0) + replica * np.sum([one.extra_W() for one in after], axis=0)
    changing = [n for n, (one, other) in enumerate(zip(before, after, strict=True)) if one.owners != other.owners]
    moving = [moved * (new_LW[: n + 1].sum(axis=0) + old_LW[n:].sum(axis=0)) for n in changing]
    return int(np.max([step_W, *moving]))


def draw(
    trace: LoadTrace,
    before: Outcome,
    after: Outcome,
    node_layout: NodeLayout,
    layer: int,
    path: str | Path,
    *,
    title: str,
) -> None:
    """Write the plot to `path`, in the format of its suffix (.png, .svg, .pdf).

    Args:
        before, after: outcomes of two policies. Placement (of `after`) and work are those of the last iteration.
    """
    figure(trace, before, after, node_layout, layer, title=title).savefig(path, dpi=_DPI)


def figure(
    trace: LoadTrace, before: Outcome, after: Outcome, node_layout: NodeLayout, layer: int, *, title: str
) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = Figure(figsize=(14, 9), layout="constrained")
    FigureCanvasAgg(found)
    found.suptitle(title, color=_INK)
    (loads, stragglers), (places, work) = found.subplots(2, 2)
    load_IE = trace.load_ILE[:, layer]
    order_E = np.argsort(-load_IE.mean(axis=0), kind="stable")
    _draw_loads(loads, load_IE, order_E, trace.first)
    _draw_stragglers(stragglers, before.straggler_IL[:, layer], after.straggler_IL[:, layer], trace.first + WINDOW)
    _draw_placement(places, after, layer, order_E, node_layout)
    _draw_work(work, before.work_ILW[-1, layer], after.work_ILW[-1, layer], node_layout)
    for axes in (loads, stragglers, places, work):
        axes.tick_params(colors=_FAINT, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return found


def _draw_loads(axes: Any, load_IE: NDArray[np.int64], order_E: NDArray[np.intp], first: int) -> None:
    share_IE = load_IE / np.maximum(load_IE.sum(axis=1, keepdims=True), 1)
    named = order_E[: len(_EXPERTS)]
    rest_I = 1 - share_IE[:, named].sum(axis=1)
    labels = [f"expert {expert}" for expert in named] + ["all others"] * (len(order_E) > len(named))
    layers = [*share_IE[:, named].T, rest_I][: len(labels)]
    last = first + len(load_IE) - 1
    axes.stackplot(range(first, last + 1), layers, labels=labels, colors=[*_EXPERTS[: len(named)], _OTHERS])
    axes.set(title="Loads: share of all tokens", xlabel="iteration", xlim=(first, max(last, first + 1)), ylim=(0, 1))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", reverse=True, frameon=False)


def _draw_stragglers(axes: Any, before_I: NDArray[np.float64], after_I: NDArray[np.float64], first: int) -> None:
    iterations = range(first, first + len(before_I))
    axes.plot(iterations, before_I, color=_BEFORE, label=f"before: {before_I.mean():.2f} in the mean")
    axes.plot(iterations, after_I, color=_AFTER, label=f"after: {after_I.mean():.2f}")
    axes.axhline(1, color=_RULE, zorder=0)
    axes.set(title="Work of the busiest rank over the mean", xlabel="iteration", ylim=(0, None))
    axes.legend(loc="lower right", fontsize="small")  # the busiest rank is never below the mean


def _draw_placement(axes: Any, after: Outcome, layer: int, order_E: NDArray[np.intp], node_layout: NodeLayout) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    placement = after.last[layer]
    holds_EW = placement.holds_EW.astype(np.int64)
    holds_EW[np.arange(placement.experts), list(placement.owners)] = 2
    colours = ListedColormap(["white", _REPLICA, _OWNER])
    axes.pcolormesh(holds_EW[order_E], cmap=colours, vmin=0, vmax=2, edgecolors=_RULE, linewidth=0.4)
    for node in range(1, node_layout.num_nodes):
        axes.axvline(node * node_layout.per_node, color=_INK, linewidth=1.2)
    axes.set(title="Placement in the last iteration", xlabel="rank, by node", ylabel="expert, the most asked for first")
    axes.set_xticks(np.arange(node_layout.num_ranks) + 0.5, [str(rank) for rank in range(node_layout.num_ranks)])
    axes.set_yticks(np.arange(placement.experts) + 0.5, [str(expert) for expert in order_E], fontsize="x-small")
    axes.invert_yaxis()
    axes.legend(
        handles=[Patch(color=_OWNER, label="owner"), Patch(color=_REPLICA, label="replica")],
        loc="upper left",
        bbox_to_anchor=(1, 1),
        fontsize="small",
        frameon=False,
    )


def _draw_work(axes: Any, before_W: NDArray[np.int64], after_W: NDArray[np.int64], node_layout: NodeLayout) -> None:
    ranks_W = np.arange(node_layout.num_ranks)
    axes.bar(ranks_W - 0.2, before_W, 0.4, color=_BEFORE, label="before")
    axes.bar(ranks_W + 0.2, after_W, 0.4, color=_AFTER, label="after")
    axes.axhline(before_W.mean(), color=_FAINT, linewidth=1, linestyle="--", label="mean")
    axes.set(title="Tokens that each rank computes in the last iteration", xlabel="rank")
    axes.set_xticks(ranks_W)
    axes.set_ylim(0, 1.15 * max(before_W.max(), after_W.max(), 1))
    axes.legend(loc="upper right", ncols=3, fontsize="small")  # above the bars
