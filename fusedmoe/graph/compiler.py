"""The backend for `torch.compile`: captured passes, planned and put in order.

    model = torch.compile(model, backend=fusedmoe.graph.backend)

    own = fusedmoe.graph.GraphBackend(chunks=4)
    model = torch.compile(model, backend=own)
    ...                                     # a training step
    for report in own.reports:
        print(report)

Results are those of the model as it is. What lies around an all-to-all goes in micro-batches; backward, weight
gradients run while rows are on the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fusedmoe.compat.torch import compile_passes, generate_boxed, tracing_context
from fusedmoe.errors import ConfigError
from fusedmoe.graph.chunk_rows import IrregularAllToAlls
from fusedmoe.graph.instructions import draw_by_shape, is_all_to_all, is_assertion, shift_in_one, wait_once
from fusedmoe.graph.operator_costs import OperatorCosts
from fusedmoe.graph.own_places import CapturedBackward, OwnPlacesCheck
from fusedmoe.graph.planning import PassReport, PlanSettings, planned


class GraphBackend:
    """A backend of `torch.compile` that hides all-to-alls. Every rank of their groups compiles the same graphs.

    Args:
        chunks: the most micro-batches of a range (Lancet's ρ): 2, 4, … up to it are tried; 1: none.
        groups: into how many groups of instructions the way from one MoE layer to the next is cut (its γ); ranges
            consist of whole groups, at most of as many as lie between two MoE layers (its ι).
        own_places: True says of the model that each place of an expert's buffer takes at most one token of a rank's
            batch, and that only this token reads it back, as with any gate that drops what is beyond the capacity. Then
            the rows of some tokens go to the experts and back by themselves, and forward micro-batches go on before and
            behind the layer. The host waits for the counts of each micro-batch's rows. The first run of each graph
            checks it (`fusedmoe.graph.own_places`): it takes about as long as two steps.
        irregular: rows of zeros, such as places that no token took, do not travel (Lancet §5.1). A small all-to-all,
            for which the host waits, tells every rank which rows come; what was not sent is zero again on the other
            side. Only a row whose bits are all 0 stays, so results are the same to the last bit. Plans are made as if
            all rows travelled.
        costs: what operators and all-to-alls take; None: measured by all ranks at the same time, once for each machine,
            and kept on disk by the first of them.
        timeout_s: how long a rank waits for the others to capture the same graph and for the first to plan it.
    Attributes:
        reports: of every pass that was planned, in order.
        irregular: None, or counts of the rows that were to travel and of those that did.
    Raises:
        ConfigError: numbers below 1; and when a graph is planned, splitting without OR-Tools (`fusedmoe[plan]`).
        RankError: when a graph is planned: ranks captured different ones, one did not come, or failed. When it runs for
            the first time: places are not one token's own, though `own_places` says so (on one rank `ConfigError`).
    """

    def __init__(
        self,
        *,
        chunks: int = 8,
        groups: int = 5,
        own_places: bool = False,
        irregular: bool = False,
        costs: OperatorCosts | None = None,
        timeout_s: float = 1200.0,
    ) -> None:
        if min(chunks, groups) < 1 or timeout_s <= 0:
            raise ConfigError(
                f"graph backend: chunks = {chunks} and groups = {groups} must be at least 1, timeout_s = {timeout_s} "
                "above 0"
            )
        self.__name__ = "fusedmoe"
        self.settings = PlanSettings(chunks, groups, own_places, timeout_s)
        self.irregular = IrregularAllToAlls() if irregular else None
        self.costs = costs
        self.reports: list[PassReport] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Called by `torch.compile` with each graph that it has captured."""
        # Older captures keep parameters and buffers in the module; the passes then have them as their first inputs.
        own = [*(True for _ in gm.parameters()), *(False for _ in gm.buffers())]
        is_parameter = [*own, *(isinstance(one, nn.Parameter) for one in example_inputs)]

        # Shared by the passes of this graph, which PyTorch compiles in its own time.
        failed: list[BaseException] = []
        check: OwnPlacesCheck | None = None
        saved: list[str] = []

        def forward(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            nonlocal check
            saved[:] = map(str, _outputs(graph_module.graph))
            run, check = self._compiled(graph_module, "forward", [])
            return run

        def backward(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            # What fails while the forward pass is compiled PyTorch keeps to itself, and comes again when a gradient is
            # asked for. The ranks have ended by then, and would say no more than that.
            if failed:
                raise failed[0]
            captured = CapturedBackward(graph_module.graph, saved)
            try:
                run, _ = self._compiled(graph_module, "backward", is_parameter)
                if check is not None:
                    check.use_backward(captured, run)
                return run
            except BaseException as error:
                failed.append(error)
                raise

        def inference(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return self._compiled(graph_module, "inference", [])[0]

        compilers = {"fw_compiler": forward, "bw_compiler": backward, "inference_compiler": inference}
        return compile_passes(gm, example_inputs, **compilers)

    def _compiled(
        self, module: fx.GraphModule, phase: str, is_parameter: Sequence[bool]
    ) -> tuple[Callable[..., Any], OwnPlacesCheck | None]:
        """Returns the pass as it runs, and the check that its first run makes, if any."""
        began = time.monotonic()
        if phase == "backward":
            # What the forward pass has asserted holds, and what served these assertions only is dead.
            for node in reversed(module.graph.nodes):
                if is_assertion(node) and not node.users:
                    module.graph.erase_node(node)
        # Authors wait where they like; plans need one wait for each collective.
        wait_once(module.graph)
        draw_by_shape(module.graph)
        shift_in_one(module.graph)
        module.graph.eliminate_dead_code()
        if not any(map(is_all_to_all, module.graph.nodes)):
            return _boxed(_runnable(module)), None
        gradients = _gradients(module.graph, is_parameter) if phase == "backward" else set()
        report, check = planned(module, phase, gradients, self.settings, self.costs, _results(phase))
        report.planning_s = time.monotonic() - began
        self.reports.append(report)
        # After planning, which knows captured operators only.
        if self.irregular is not None:
            self.irregular.put_into(module.graph)
        run = _runnable(module)
        if check is not None:
            run = check.first_then(run)
        if report.ranges:
            run = _explained(run, max(one.chunks for one in report.ranges))
        return _boxed(run), check


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The backend as it is by default; a `GraphBackend` of one's own has settings and reports."""
    return GraphBackend()(gm, example_inputs)


def _outputs(graph: fx.Graph) -> Sequence[Any]:
    outputs = next(iter(reversed(graph.nodes))).args[0]
    assert isinstance(outputs, (list, tuple))
    return outputs


def _gradients(graph: fx.Graph, is_parameter: Sequence[bool]) -> set[fx.Node]:
    """Returns the results of a backward pass that are gradients of parameters and nothing else."""
    results = _outputs(graph)
    # One for each input of the forward pass. Where they do not fit together, every result is taken for one: they all
    # are needed at the end only.
    flags = is_parameter if len(is_parameter) == len(results) else [True] * len(results)
    other = {node for node, flag in zip(results, flags, strict=True) if not flag}
    return {node for node in results if isinstance(node, fx.Node)} - other


def _results(phase: str) -> int | None:
    """Returns how many results of the pass are not kept for the backward pass; None: all, or unknown."""
    context = tracing_context()
    metadata = None if context is None else context.fw_metadata
    return metadata.num_forward if phase == "forward" and metadata is not None else None


def _explained(run: Callable[..., Any], chunks: int) -> Callable[..., Any]:
    """Returns a pass with ranges in chunks whose error says what to do where these need too much memory."""

    def call(args: list[Any]) -> Any:
        try:
            return run(args)
        # A rank cannot go back to fewer chunks by itself: the others already send it theirs.
        except torch.OutOfMemoryError as error:
            fewer = f"chunks={chunks // 2}" if chunks > 2 else "chunks=1, which splits nothing"
            raise torch.OutOfMemoryError(
                f"{error}\nThis pass runs in up to {chunks} micro-batches, which are all in memory where they are put "
                f"together: on every rank, compile with fusedmoe.graph.GraphBackend({fewer})"
            ) from error

    return call


def _runnable(module: fx.GraphModule) -> Callable[..., Any]:
    """Returns the graph as a function that empties the list of its inputs, which are freed as soon as they are used."""
    generate_boxed(module.graph)
    module.recompile()
    code = module.forward
    return lambda args: code(args)


def _boxed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as one that takes its inputs as a list, which it empties."""
    from functorch.compile import make_boxed_func

    # Marked alike: PyTorch's own boxed function would keep its inputs.
    marks = vars(make_boxed_func(lambda: None))
    vars(run).update({name: mark for name, mark in marks.items() if name != "__wrapped__"})
    return run
