"""The check of `own_places=True`: what the user says of a model is measured, in the first step of each captured graph.

Chunks of tokens may go through a layer of experts by themselves only where each place of an expert's buffer has one
token at most, and only that token reads it back (Lancet §5.2). The first step therefore runs the graph as it was
captured, and returns its results; beside each layer the same rows go in chunks, from the same inputs:

    x_SM, send_SP ── rows_PM = send_SPᵀ·x_SM ── all-to-all, experts, all-to-all ── y_SM = weight_SP·rows_PM
            └─────── rows of each chunk's tokens ── the same, of these rows alone ── y_SM again, chunk by chunk

    1. Both y_SM are the same but for rounding.
    2. What else reads rows finds zeros later, in places that no token took. So there must be zeros as captured, too.
    3. The backward pass finds these zeros as well. It runs twice, from made-up gradients of the results: with what was
       captured in places that no token took, and with zeros. Both give the same gradients but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fusedmoe.graph.axes import Axis, Rows, shape_of
from fusedmoe.graph.chunk_rows import ChunkRows, Operation, check_places, operation_of, whole_of
from fusedmoe.graph.graph_ranks import GraphRanks
from fusedmoe.graph.instructions import describe, is_all_to_all, is_view, name_of
from fusedmoe.graph.rewriting import RangeSplit, cut, join, node_call, plain_call

_OPERATION = "the first run with own_places=True"
_CURE = (
    "Each place was to be one token's own, as own_places=True says: leave own_places out of the GraphBackend, on "
    "every rank"
)


class OwnPlacesCheck:
    """The first run of a captured pass whose rows go in chunks: as captured, with a comparison beside each layer.

    Args:
        module: the pass before ranges of it are rewritten.
        ranges: of each range with such rows the last instruction, how it is split, and into how many chunks.
        results: how many of the graph's results, the first ones, are not kept for the backward pass; None: all.
        graph_ranks: the ranks that run the graph; they agree on what was found.
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
        self._results = len(self._outputs) if results is None else results
        self._emptied: dict[int, fx.Node] = {}  # by its place among the outputs, what the backward pass reads of rows
        # Of rounding: the same numbers are summed in another order, which moves a result by a few units of its last
        # digit times the square root of their number. A token's row, or a gradient, that differs by more than half of
        # the digits is another one: by √ε of the least precise dtype on the way, 0.03% in float32, 9% in bfloat16.
        self._tolerance = max(_epsilon(split) for _, split, _ in ranges) ** 0.5
        self._module: fx.GraphModule | None = self._beside(module, ranges)
        self._over = False
        self._backward: Callable[..., list[str]] | None = None  # finds gradients that differ

    def use_backward(self, backward: CapturedBackward, run: Callable[[list[Any]], Any]) -> None:
        """Takes the compiled backward pass, `run`, whose gradients are to be compared."""
        self._backward = partial(backward.differences, run)

    def first_then(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Returns the pass as a function that runs the check until it is over, and `run` from then on."""
        # Most backward passes are compiled when the first gradient is asked for: there the second step ends the check.
        return lambda args: run(args) if self._over else self._first(args)

    def _first(self, args: list[Any]) -> Any:
        """Runs the pass as captured. Raises `RankError`, on all ranks, where some rank found that its rows differ."""
        self._findings.clear()
        assert self._module is not None
        outputs, emptied = self._graph_ranks.guarded(partial(self._module.forward, *args), _OPERATION)
        args.clear()  # as any compiled pass does: inputs are freed as soon as they are used
        # Before anything else is sent: what follows has collectives, and no rank may be missing there.
        self._graph_ranks.require_none(_OPERATION, self._findings, _CURE)
        if self._backward is not None and self._emptied:
            replaced = dict(zip(self._emptied, emptied, strict=True))
            compare = partial(self._backward, outputs, replaced, self._tolerance)
            self._findings.extend(self._graph_ranks.guarded(compare, _OPERATION))
            self._graph_ranks.require_none(_OPERATION, self._findings, _CURE)
        # What was kept of the captured rows serves any backward pass; zeros in their places only one that was compared.
        self._over = self._backward is not None or not self._emptied
        if self._over:
            self._backward = self._module = None
        return outputs

    def _beside(self, module: fx.GraphModule, ranges: Sequence[tuple[fx.Node, RangeSplit, int]]) -> fx.GraphModule:
        """Returns the graph as captured, with each range's rows once more, in chunks, and comparisons behind it.

        Its results are the graph's outputs, and those of `_emptied` with zeros in places that no token took.
        """
        beside = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        outputs = beside.graph_copy(module.graph, copies)
        # Layers are compared one by one from the same inputs: rounding in front of a gate may choose another expert,
        # and then nothing behind it is alike.
        for last, split, count in ranges:
            # Right behind the range, so that what it compares is freed before the next one.
            with beside.inserting_before(copies[last].next):
                chunks = self._rows_in_chunks(beside, split, count, copies)
                for node, way in split.split.items():
                    captured, readers = copies[node], [user for user in node.users if user not in split.split]
                    if way.crosses and isinstance(way.axis, Axis):
                        beside.call_function(self._same_rows(node, way.axis), (captured, *chunks[node]))
                    if isinstance(way.axis, Rows) and readers:
                        zeros = _zeros_in_empty_places(node, way.axis)
                        whole = beside.call_function(zeros, (captured, *chunks[node]))
                        whole.meta = {**node.meta}
                        self._follow(beside, node, captured, whole, readers)
        self._emptied = dict(sorted(self._emptied.items()))
        beside.output((outputs, list(self._emptied.values())))
        beside.lint()
        return fx.GraphModule(module, beside)

    def _rows_in_chunks(
        self, beside: fx.Graph, split: RangeSplit, count: int, copies: Mapping[fx.Node, fx.Node]
    ) -> dict[fx.Node, list[fx.Node]]:
        """Adds what a range computes by rows, in chunks, to a graph; from inputs as captured."""
        call = node_call(beside)
        chunks: dict[fx.Node, list[fx.Node]] = {}

        def given(node: fx.Node, axis: Axis | Rows | None, number: int) -> fx.Node:
            if isinstance(axis, Rows):
                return chunks[node][number]
            source = copies[node]
            return source if axis is None else cut(call, source, shape_of(node) or (), axis, number, count)

        for node, way in split.split.items():
            if not way.by_rows:
                continue
            # Refusals are noted, not raised: a rank that raised here would leave the others waiting.
            operation = operation_of(node, way, self._findings.append)
            inputs = [(source, way.inputs[source]) for source in node.all_input_nodes]
            chunks[node] = [
                beside.call_function(operation, tuple(given(source, axis, number) for source, axis in inputs))
                for number in range(count)
            ]
            if is_all_to_all(node) and isinstance(way.axis, Rows) and way.axis.trips == 1:
                (source,) = node.all_input_nodes
                beside.call_function(check_places(node, self._findings.append), tuple(chunks[source]))
        return chunks

    def _same_rows(self, node: fx.Node, axis: Axis) -> Operation:
        """Returns a function that compares the rows of tokens as captured with those of its chunks."""
        text, tolerance = describe(node), self._tolerance

        def same_rows(captured: Tensor, *chunks: Tensor) -> None:
            rows_SM = captured.flatten(0, -2).double()
            away_S = (rows_SM - join(plain_call, chunks, captured, axis).flatten(0, -2).double()).norm(dim=1)
            size_S = rows_SM.norm(dim=1)
            finite_S = size_S.isfinite()  # of rows that are not, nothing can be said
            usual = size_S[finite_S].square().mean().sqrt() if finite_S.any() else 0.0
            # A row is measured by its own size, and by that of the others where its terms happen to cancel.
            wrong_S = finite_S & ~(away_S <= tolerance * (size_S + usual))
            if wrong_S.any():
                token = int(wrong_S.nonzero()[0])
                self._findings.append(
                    f"{text} gives another row for token {token}, and {int(wrong_S.sum())} in all, where tokens go in "
                    f"chunks: it is {float(away_S[token]):.2g} away, at a length of {float(size_S[token]):.2g}"
                )

        return same_rows

    def _follow(
        self, beside: fx.Graph, node: fx.Node, captured: fx.Node, emptied: fx.Node, readers: Iterable[fx.Node]
    ) -> None:
        """Adds comparisons for who reads rows outside of their layer, and notes in `_emptied` which of them are saved.

        `captured` and `emptied` are the node's rows in `beside`, and these with zeros in places that no token took.
        """
        for reader in readers:
            if reader.op == "output":
                places = [index for index, output in enumerate(self._outputs) if output is node]
                self._emptied |= {index: emptied for index in places if index >= self._results}
                if min(places) < self._results:
                    beside.call_function(self._zeros_as_captured(node, "the caller"), (captured, emptied))
            # What only moves rows is followed: not it, but who reads its result, may need the numbers.
            elif reader.all_input_nodes == [node] and (is_view(reader) or name_of(reader) in _COPIES):
                moved = [beside.node_copy(reader, {node: source}.__getitem__) for source in (captured, emptied)]
                self._follow(beside, reader, moved[0], moved[1], reader.users)
            else:
                beside.call_function(self._zeros_as_captured(node, describe(reader)), (captured, emptied))

    def _zeros_as_captured(self, node: fx.Node, reader: str) -> Operation:
        """Returns a function that looks for numbers in places that no token took."""
        finding = f"{reader} reads places that no token took, in which {describe(node)} has other numbers than 0"

        def zeros_as_captured(captured: Tensor, emptied: Tensor) -> None:
            if not torch.equal(captured.nan_to_num(), emptied.nan_to_num()):
                self._findings.append(finding)

        return zeros_as_captured


_COPIES = frozenset({"clone", "reshape", "_unsafe_view"})


def _zeros_in_empty_places(node: fx.Node, rows: Rows) -> Operation:
    """Returns a function of all rows, and of each chunk's: these rows, and zeros in places that no chunk has."""
    whole = whole_of(node, rows)

    def zeros_in_empty_places(captured: Tensor, *chunks: ChunkRows) -> Tensor:
        # Places are taken where a chunk has them, not where numbers are: a token's row may be all zeros.
        taken = whole(*(chunk._replace(values_NF=torch.ones_like(chunk.values_NF)) for chunk in chunks))
        return torch.where(taken != 0, captured, torch.zeros_like(captured))

    return zeros_in_empty_places


def _epsilon(split: RangeSplit) -> float:
    """Returns the epsilon of the least precise dtype in which a range computes by rows."""
    nodes = {one for node, way in split.split.items() if way.by_rows for one in (node, *node.all_input_nodes)}
    values = [node.meta["val"] for node in nodes]
    return max(torch.finfo(one.dtype).eps for one in values if isinstance(one, Tensor) and one.is_floating_point())


class CapturedBackward:
    """A captured backward pass, to be run from made-up gradients of the results.

    `saved`: the names of the forward pass' outputs as it was captured; the backward pass' inputs have the same ones.
    """

    def __init__(self, graph: fx.Graph, saved: Sequence[str]) -> None:
        self._saved = saved
        self._inputs = [(node.name, node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
        outputs: Any = next(iter(reversed(graph.nodes))).args[0]
        self._names = [describe(node) if isinstance(node, fx.Node) else "" for node in outputs]

    def differences(
        self, run: Callable[[list[Any]], Any], outputs: Sequence[Any], replaced: Mapping[int, Tensor], tolerance: float
    ) -> list[str]:
        """Returns which gradient changes where some outputs of the forward pass are replaced. Collective.

        `run` is the pass as it was compiled; `tolerance` is of a gradient's difference, in its own length.
        """
        captured = dict(zip(self._saved, outputs, strict=True))
        emptied = captured | {self._saved[index]: tensor for index, tensor in replaced.items()}
        gradients: dict[str, Tensor] = {}
        for name, like in self._inputs:
            if name in captured:
                continue
            if not isinstance(like, Tensor) or not all(isinstance(size, int) for size in like.shape):
                return []  # of sizes that are known late no gradient can be made up
            drawn = torch.Generator(like.device).manual_seed(0)
            gradient = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            gradients[name] = gradient.normal_(generator=drawn) if like.is_floating_point() else gradient.zero_()
        # Numbers that the pass draws are the same both times, and those of the step that follows are as they were.
        cuda = {like.device for _, like in self._inputs if isinstance(like, Tensor) and like.device.type == "cuda"}
        with torch.no_grad(), torch.random.fork_rng(devices=sorted(cuda, key=str)):
            expected, found = (
                run([(given | gradients)[name] for name, _ in self._inputs]) for given in (captured, emptied)
            )
        for name, right, other in zip(self._names, expected, found, strict=True):
            if isinstance(right, Tensor) and right.is_floating_point():
                # Gradients that are not finite as captured say nothing of zeros.
                finite = right.isfinite()
                right, other = right[finite].double(), other[finite].double()
                if not (right - other).norm() <= tolerance * right.norm():
                    return [f"{name} of the backward pass needs what lies in places that no token took"]
        return []
