"""`torch.compile` backend that plans and reorders captured passes to hide all-to-alls."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fusedmoe.compat.torch import compile_passes, tracing_context
from fusedmoe.errors import ConfigError
from fusedmoe.graph.chunk_rows import PaddingFreeAllToAlls
from fusedmoe.graph.instructions import (
    decouple_random_draws,
    fuse_shifts,
    insert_single_waits,
    is_all_to_all,
    is_assertion,
)
from fusedmoe.graph.operator_costs import OperatorCosts
from fusedmoe.graph.own_places import OwnPlacesCheck
from fusedmoe.graph.planning import PassReport, PlanSettings, plan_pass


class GraphBackend:
    """Backend of `torch.compile` that overlaps all-to-alls with computation.

        backend = fusedmoe.graph.GraphBackend(chunks=4)
        model = torch.compile(model, backend=backend)
        ...                                              # a training step
        print(*backend.reports)

    Results are unchanged. Instructions around an all-to-all run in micro-batches; in backward, weight gradients overlap
    with the all-to-alls. Every rank of the process groups must compile the same graphs in the same order.

    Args:
        chunks: maximum number of micro-batches (Lancet's ρ); powers of two up to it are tried. 1: no micro-batches.
        groups: number of instruction groups per MoE layer (Lancet's γ). A range that runs in micro-batches consists of
            whole groups, at most as many as lie between two MoE layers (Lancet's ι).
        own_places: declares that each slot of an expert's buffer is exclusive: at most one token of a rank's batch
            fills it, and only that token reads it back, as with any gate that drops tokens beyond the capacity. Forward
            micro-batches then extend across the experts, at the cost of one host synchronization per micro-batch. The
            first run of each graph checks the declaration and takes about as long as two steps.
        irregular: do not send rows whose bits are all zero, typically unused slots (Lancet §5.1). A small all-to-all
            first announces the rows sent, and the host waits for it. Results are bitwise equal. Plans assume that all
            rows are sent.
        costs: seconds of operators and all-to-alls. None: all ranks measure them, once per machine, and the first rank
            caches them on disk.
        timeout_s: seconds that a rank waits for the same graph on the other ranks, and for the first rank's plan.
    Attributes:
        reports: one `PassReport` per planned pass, in order.
        irregular: None, or an object whose `rows` and `sent` count buffer rows and rows sent.
    Raises:
        ConfigError: an argument is out of range; at planning: splitting without OR-Tools (`fusedmoe[plan]`).
        RankError: at planning: ranks captured different graphs, or one failed or timed out. At the first run: slots are
            not exclusive although `own_places` is set (`ConfigError` on a single rank).
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
        self.irregular = PaddingFreeAllToAlls() if irregular else None
        self.costs = costs
        self.reports: list[PassReport] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        # Older captures keep parameters and buffers in the module; the passes have them as first inputs.
        own = [*(True for _ in gm.parameters()), *(False for _ in gm.buffers())]
        is_parameter = [*own, *(isinstance(one, nn.Parameter) for one in example_inputs)]

        failed: list[BaseException] = []
        check: OwnPlacesCheck | None = None
        saved: list[str] = []

        def forward(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            nonlocal check
            saved[:] = map(str, _outputs(graph_module.graph))
            run, check = self._compile_pass(graph_module, "forward", [])
            return run

        def backward(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            # PyTorch swallows errors of compiling backward along with forward, and compiles again at the first
            # backward, when the other ranks have ended.
            if failed:
                raise failed[0]
            if check is not None:
                check.capture_backward(graph_module.graph, saved)
            try:
                run, _ = self._compile_pass(graph_module, "backward", is_parameter)
                if check is not None:
                    check.backward = run
                return run
            except BaseException as error:
                failed.append(error)
                raise

        def inference(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return self._compile_pass(graph_module, "inference", [])[0]

        compilers = {"fw_compiler": forward, "bw_compiler": backward, "inference_compiler": inference}
        return compile_passes(gm, example_inputs, **compilers)

    def _compile_pass(
        self, module: fx.GraphModule, phase: str, is_parameter: Sequence[bool]
    ) -> tuple[Callable[..., Any], OwnPlacesCheck | None]:
        """Return the compiled pass, and the check of its first run if rows run in chunks. Appends a report."""
        began = time.monotonic()
        if phase == "backward":
            for node in reversed(module.graph.nodes):
                if is_assertion(node) and not node.users:
                    module.graph.erase_node(node)
        insert_single_waits(module.graph)
        decouple_random_draws(module.graph)
        fuse_shifts(module.graph)
        module.graph.eliminate_dead_code()
        if not any(map(is_all_to_all, module.graph.nodes)):
            return _mark_boxed(_make_function(module)), None
        gradients = _parameter_gradients(module.graph, is_parameter) if phase == "backward" else set()
        report, check = plan_pass(module, phase, gradients, self.settings, self.costs, _num_unsaved_outputs(phase))
        report.planning_s = time.monotonic() - began
        self.reports.append(report)
        # After planning, which supports only captured operators.
        if self.irregular is not None:
            self.irregular.replace_in(module.graph)
        run = _make_function(module)
        if check is not None:
            run = check.run_check_before(run)
        if report.ranges:
            run = _with_memory_advice(run, max(one.chunks for one in report.ranges))
        return _mark_boxed(run), check


def _outputs(graph: fx.Graph) -> Sequence[Any]:
    outputs = next(iter(reversed(graph.nodes))).args[0]
    assert isinstance(outputs, (list, tuple))
    return outputs


def _parameter_gradients(graph: fx.Graph, is_parameter: Sequence[bool]) -> set[fx.Node]:
    results = _outputs(graph)
    # If the counts differ, treat all outputs as parameter gradients.
    flags = is_parameter if len(is_parameter) == len(results) else [True] * len(results)
    other = {node for node, flag in zip(results, flags, strict=True) if not flag}
    return {node for node in results if isinstance(node, fx.Node)} - other


def _num_unsaved_outputs(phase: str) -> int | None:
    """Return the number of leading outputs that are not saved for backward; None means all of them, or unknown."""
    context = tracing_context()
    metadata = None if context is None else context.fw_metadata
    return metadata.num_forward if phase == "forward" and metadata is not None else None


def _with_memory_advice(run: Callable[..., Any], chunks: int) -> Callable[..., Any]:

    def call(args: list[Any]) -> Any:
        try:
            return run(args)
        # A rank cannot reduce its chunks alone: the other ranks already send theirs.
        except torch.OutOfMemoryError as error:
            fewer = f"chunks={chunks // 2}" if chunks > 2 else "chunks=1, which splits nothing"
            raise torch.OutOfMemoryError(
                f"{error}\nThis pass runs in up to {chunks} micro-batches, which are all in memory when they are "
                f"joined: compile with fusedmoe.graph.GraphBackend({fewer}) on every rank"
            ) from error

    return call


def _make_function(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the graph as a function that empties its list of inputs, freeing each after its last use."""
    graph, placeholders = module.graph, module.graph.find_nodes(op="placeholder")
    with graph.inserting_before(next(iter(graph.nodes))):
        inputs = graph.placeholder("inputs")
        for index, node in enumerate(placeholders):
            if node.users:
                node.replace_all_uses_with(graph.call_function(operator.getitem, (inputs, index)))
        graph.call_method("clear", (inputs,))
    for node in placeholders:
        graph.erase_node(node)
    module.recompile()
    code = module.forward
    return lambda args: code(args)


def _mark_boxed(run: Callable[..., Any]) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func

    # Copy the marks: PyTorch's own wrapper would keep the inputs alive.
    marks = vars(make_boxed_func(lambda: None))
    vars(run).update({name: mark for name, mark in marks.items() if name != "__wrapped__"})
    return run
