"""First-step check of `own_places=True`: verifies on real data that expert buffer slots are exclusive to one token.

Micro-batches of tokens may pass through the experts separately only if each slot of an expert's buffer has at most one
token, which alone reads it back (Lancet §5.2). The first step runs the graph as captured and returns its results, and
also computes each layer's rows in chunks from the same inputs:

    x_SM, send_SP ── rows_PM = send_SPᵀ·x_SM ── all-to-all, experts, all-to-all ── y_SM = weight_SP·rows_PM
              └─────── rows of each chunk's tokens ── the same, of these rows alone ── y_SM again, chunk by chunk

1. Both y_SM must be equal up to rounding.
2. The captured rows must be zero in unused slots if other instructions read them.
3. Backward runs twice, with synthetic output gradients: with the captured values of unused slots, and with zeros. Both
   must give equal gradients up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fusedmoe.graph.axes import Axis, Rows, shape_of
from fusedmoe.graph.chunk_rows import OWN_PLACES_CURE, IndexedRows, Operation, assemble_rows, check_slots, row_operation
from fusedmoe.graph.graph_ranks import GraphRanks
from fusedmoe.graph.instructions import describe, is_all_to_all, is_view, name_of
from fusedmoe.graph.rewriting import RangeSplit, join_chunks, make_node_caller, plain_call, slice_chunk

_OPERATION = "the first run with own_places=True"


class OwnPlacesCheck:
    """First run of a captured pass: checks that its expert rows may be computed in chunks (`own_places=True`).

    Args:
        module: the captured pass, before its ranges are rewritten into chunks.
        ranges: for each range with expert rows: its last instruction, how it is split, and the number of chunks.
        results: number of leading graph outputs not saved for backward; None: all.
        graph_ranks: ranks that run the graph. If a check fails on any of them, all raise.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        ranges: Sequence[tuple[fx.Node, RangeSplit, int]],
        results: int | None,
        graph_ranks: GraphRanks,
    ) -> None:
        self._graph_ranks = graph_ranks
        self._findings: list[str] = []
        self._outputs: Any = next(iter(reversed(module.graph.nodes))).args[0]
        self._num_unsaved_outputs = len(self._outputs) if results is None else results
        self._zeroed: dict[int, fx.Node] = {}  # output index -> rows with unused slots zeroed
        # Another order of summation changes a result by a few ulps; a result that differs in more than half of its
        # digits is wrong. √ε of the least precise dtype is 0.03% in float32 and 9% in bfloat16.
        self._tolerance = max(_max_machine_epsilon(split) for _, split, _ in ranges) ** 0.5
        self._module: fx.GraphModule | None = self._with_comparisons(module, ranges)
        #: Runs the compiled backward pass; None before it is compiled.
        self.backward: Callable[[list[Any]], Any] | None = None

    def capture_backward(self, graph: fx.Graph, saved: Sequence[str]) -> None:
        """Store inputs and outputs of the captured backward pass. `saved`: names of the forward outputs."""
        self._saved = saved
        self._inputs = [(node.name, node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
        outputs: Any = next(iter(reversed(graph.nodes))).args[0]
        self._gradients = [describe(node) if isinstance(node, fx.Node) else "" for node in outputs]

    def run_check_before(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a function that runs the check until it is complete, and `run` afterwards.

        If backward is compiled after the first forward and reads unused slots, the second step completes the check.
        """
        return lambda args: run(args) if self._module is None else self._run_check(args)

    def _run_check(self, args: list[Any]) -> Any:
        """Run the pass as captured and return its outputs. Raises on all ranks if a comparison fails on any."""
        self._findings.clear()
        assert self._module is not None
        outputs, zeroed = self._graph_ranks.run_guarded(partial(self._module.forward, *args), _OPERATION)
        args.clear()
        # Agree before the comparison below, whose collectives need all ranks.
        self._graph_ranks.raise_findings(_OPERATION, self._findings, OWN_PLACES_CURE)
        if self.backward is not None and self._zeroed:
            compare = partial(self._compare_backward, self.backward, outputs, zeroed)
            self._graph_ranks.run_guarded(compare, _OPERATION)
            self._graph_ranks.raise_findings(_OPERATION, self._findings, OWN_PLACES_CURE)
        if self.backward is not None or not self._zeroed:
            self.backward = self._module = None
        return outputs

    def _compare_backward(
        self, run: Callable[[list[Any]], Any], outputs: Sequence[Any], zeroed: Sequence[Tensor]
    ) -> None:
        """Run backward from synthetic output gradients twice, and record the first gradient that differs. Collective.

        The second run replaces the forward `outputs` in `_zeroed` by `zeroed`. Does nothing if an input has a symbolic
        size.
        """
        captured = dict(zip(self._saved, outputs, strict=True))
        replaced = {self._saved[index]: tensor for index, tensor in zip(self._zeroed, zeroed, strict=True)}
        gradients: dict[str, Tensor] = {}
        for name, like in self._inputs:
            if name in captured:
                continue
            if not isinstance(like, Tensor) or not all(isinstance(size, int) for size in like.shape):
                return
            drawn = torch.Generator(like.device).manual_seed(0)
            gradient = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            gradients[name] = gradient.normal_(generator=drawn) if like.is_floating_point() else gradient.zero_()
        given = captured | gradients
        # Both runs draw the same random numbers, and the following step's are unaffected.
        cuda = {like.device for _, like in self._inputs if isinstance(like, Tensor) and like.device.type == "cuda"}
        with torch.no_grad(), torch.random.fork_rng(devices=sorted(cuda, key=str)):
            expected, found = (run([values[name] for name, _ in self._inputs]) for values in (given, given | replaced))
        for name, right, other in zip(self._gradients, expected, found, strict=True):
            if isinstance(right, Tensor) and right.is_floating_point():
                # Gradients that are non-finite as captured are not comparable.
                finite = right.isfinite()
                right, other = right[finite].double(), other[finite].double()
                if not (right - other).norm() <= self._tolerance * right.norm():
                    self._findings.append(f"{name} of the backward pass depends on unused slots")
                    return

    def _with_comparisons(
        self, module: fx.GraphModule, ranges: Sequence[tuple[fx.Node, RangeSplit, int]]
    ) -> fx.GraphModule:
        """Return the captured graph with comparisons to rows computed in chunks.

        It outputs the captured outputs, and the outputs in `_zeroed` with zeros in unused slots.
        """
        check_graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        outputs = check_graph.graph_copy(module.graph, copies)
        # Compare layer by layer from the same inputs: rounding before a gate may select another expert.
        for last, split, count in ranges:
            with check_graph.inserting_before(copies[last].next):
                chunks = self._rows_in_chunks(check_graph, split, count, copies)
                for node, op_split in split.split.items():
                    captured, readers = copies[node], [user for user in node.users if user not in split.split]
                    if op_split.token_outer and isinstance(op_split.axis, Axis):
                        check_graph.call_function(
                            self._make_row_comparison(node, op_split.axis), (captured, *chunks[node])
                        )
                    if isinstance(op_split.axis, Rows) and readers:
                        zeros = _zero_unused_slots(node, op_split.axis)
                        whole = check_graph.call_function(zeros, (captured, *chunks[node]))
                        whole.meta = {**node.meta}
                        self._add_reader_comparisons(check_graph, node, captured, whole, readers)
        self._zeroed = dict(sorted(self._zeroed.items()))
        check_graph.output((outputs, list(self._zeroed.values())))
        check_graph.lint()
        return fx.GraphModule(module, check_graph)

    def _rows_in_chunks(
        self, check_graph: fx.Graph, split: RangeSplit, count: int, copies: Mapping[fx.Node, fx.Node]
    ) -> dict[fx.Node, list[fx.Node]]:
        """Add nodes to `check_graph` that compute a range's rows in `count` chunks; return them by captured node.

        `copies` maps nodes of the captured graph to nodes of `check_graph`.
        """
        call = make_node_caller(check_graph)
        chunks: dict[fx.Node, list[fx.Node]] = {}

        def operand(node: fx.Node, axis: Axis | Rows | None, number: int) -> fx.Node:
            if isinstance(axis, Rows):
                return chunks[node][number]
            source = copies[node]
            return source if axis is None else slice_chunk(call, source, shape_of(node) or (), axis, number, count)

        for node, op_split in split.split.items():
            if not op_split.has_rows:
                continue
            # Record findings instead of raising: other ranks would wait for this rank.
            operation = row_operation(node, op_split, self._findings.append)
            inputs = [(source, op_split.inputs[source]) for source in node.all_input_nodes]
            chunks[node] = [
                check_graph.call_function(operation, tuple(operand(source, axis, number) for source, axis in inputs))
                for number in range(count)
            ]
            if is_all_to_all(node) and isinstance(op_split.axis, Rows) and op_split.axis.hops == 1:
                (source,) = node.all_input_nodes
                check_graph.call_function(check_slots(node, self._findings.append), tuple(chunks[source]))
        return chunks

    def _make_row_comparison(self, node: fx.Node, axis: Axis) -> Operation:
        """Return a function that compares captured rows of tokens with rows computed in chunks and records findings."""
        text, tolerance = describe(node), self._tolerance

        def same_rows(captured: Tensor, *chunks: Tensor) -> None:
            rows_SM = captured.flatten(0, -2).double()
            distance_S = (rows_SM - join_chunks(plain_call, chunks, captured, axis).flatten(0, -2).double()).norm(dim=1)
            size_S = rows_SM.norm(dim=1)
            finite_S = size_S.isfinite()
            usual = size_S[finite_S].square().mean().sqrt() if finite_S.any() else 0.0
            # Includes the usual norm, because the terms of a row may cancel.
            wrong_S = finite_S & ~(distance_S <= tolerance * (size_S + usual))
            if wrong_S.any():
                token = int(wrong_S.nonzero()[0])
                self._findings.append(
                    f"{text} computes another row for token {token}, and {int(wrong_S.sum())} in all, if tokens run in "
                    f"chunks: error norm {float(distance_S[token]):.2g}, row norm {float(size_S[token]):.2g}"
                )

        return same_rows

    def _add_reader_comparisons(
        self, check_graph: fx.Graph, node: fx.Node, captured: fx.Node, zeroed: fx.Node, readers: Iterable[fx.Node]
    ) -> None:
        """Add checks that readers outside the range find zeros in unused slots; record outputs saved for backward.

        `captured` and `zeroed` are the rows of `node` as captured, and with zeros in unused slots.
        """
        for reader in readers:
            if reader.op == "output":
                indices = [index for index, output in enumerate(self._outputs) if output is node]
                self._zeroed |= {index: zeroed for index in indices if index >= self._num_unsaved_outputs}
                if min(indices) < self._num_unsaved_outputs:
                    check_graph.call_function(self._check_unused_slots(node, "the caller"), (captured, zeroed))
            # Follow operators that only move rows: readers of their results may need the values.
            elif reader.all_input_nodes == [node] and (is_view(reader) or name_of(reader) in _COPIES):
                moved = [check_graph.node_copy(reader, {node: source}.__getitem__) for source in (captured, zeroed)]
                self._add_reader_comparisons(check_graph, reader, moved[0], moved[1], reader.users)
            else:
                check_graph.call_function(self._check_unused_slots(node, describe(reader)), (captured, zeroed))

    def _check_unused_slots(self, node: fx.Node, reader: str) -> Operation:
        finding = f"{reader} reads unused slots, in which {describe(node)} is not zero"

        def check_unused_slots(captured: Tensor, zeroed: Tensor) -> None:
            if not torch.equal(captured.nan_to_num(), zeroed.nan_to_num()):
                self._findings.append(finding)

        return check_unused_slots


_COPIES = frozenset({"clone", "reshape", "_unsafe_view"})


def _zero_unused_slots(node: fx.Node, rows: Rows) -> Operation:
    """Return a function that sets the rows to zero in the slots that no chunk fills."""
    whole = assemble_rows(node, rows)

    def zero_unused_slots(captured: Tensor, *chunks: IndexedRows) -> Tensor:
        # Ones instead of values: a token's row may be all zeros.
        taken = whole(*(chunk._replace(values_NF=torch.ones_like(chunk.values_NF)) for chunk in chunks))
        return torch.where(taken != 0, captured, torch.zeros_like(captured))

    return zero_unused_slots


def _max_machine_epsilon(split: RangeSplit) -> float:
    nodes = {
        one for node, op_split in split.split.items() if op_split.has_rows for one in (node, *node.all_input_nodes)
    }
    values = [node.meta["val"] for node in nodes]
    return max(torch.finfo(one.dtype).eps for one in values if isinstance(one, Tensor) and one.is_floating_point())
