"""The axis table, operator by operator; the axes of a range; ranges rewritten in chunks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed._functional_collectives import all_to_all_single
from torch.fx.experimental.proxy_tensor import make_fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph.axes import Axis, reshape_axis, shape_of, split_operator
from fusedmoe.graph.instructions import Instructions, is_all_to_all
from fusedmoe.graph.micro_batches import PlanSettings, group_instructions, infer_split, order_constraints, select_ranges
from fusedmoe.graph.rewriting import (
    InstructionRange,
    RangeSplit,
    carry_source,
    join_chunks,
    rewrite,
    run_chunk,
    slice_chunk,
    stage_plan,
)
from fusedmoe.schedule.cost import TaskDurations
from fusedmoe.schedule.simulate import makespan
from tests.graph.models import Steady
from tests.marks import slowly

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("world")


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def indices(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


#: Operators with inputs, and the result dimensions along which each can be chunked.
CASES: dict[str, tuple[Callable[..., Any], list[Tensor], set[int]]] = {
    "broadcast_add": (lambda a, b: a + b, [floats(4, 1, 6), floats(8, 6)], {0, 1, 2}),
    "where": (lambda a, b: torch.where(a > 0, a, b), [floats(4, 6), floats(6)], {0, 1}),
    "cast": (lambda a: a.to(torch.float32), [floats(4, 6)], {0, 1}),
    "gelu": (lambda a: F.gelu(a), [floats(4, 6)], {0, 1}),
    "view": (lambda a: a.view(2, 2, 24), [floats(4, 4, 6)], {0, 1, 2}),
    "reshape_of_transpose": (lambda a: a.transpose(0, 1).reshape(16, 6), [floats(4, 4, 6)], {0, 1}),
    "permute": (lambda a: aten.permute.default(a, [2, 0, 1]), [floats(4, 3, 6)], {0, 1}),
    "t": (lambda a: a.t(), [floats(4, 6)], {0, 1}),
    "expand": (lambda a: a.expand(4, 6, 8), [floats(6, 1)], {1}),
    "squeeze": (lambda a: a.squeeze(1).unsqueeze(0), [floats(4, 1, 6)], {1, 2}),
    "mm": (lambda a, b: a @ b, [floats(4, 5), floats(5, 6)], {0, 1}),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), [floats(6), floats(4, 5), floats(5, 6)], {0, 1}),
    "bmm": (lambda a, b: torch.bmm(a, b), [floats(4, 6, 5), floats(4, 5, 2)], {0, 1, 2}),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), [floats(1, 6, 2), floats(4, 6, 5), floats(4, 5, 2)], {0, 1, 2}),
    "softmax": (lambda a: a.softmax(-1), [floats(4, 6, 5)], {0, 1}),
    "log_softmax": (lambda a: a.log_softmax(0), [floats(4, 6)], {1}),
    "cumsum": (lambda a: a.cumsum(1), [floats(4, 6)], {0, 1}),
    "shift_by_one": (lambda a: aten.constant_pad_nd.default(a, [0, 0, 1, -1]), [floats(4, 6, 2)], {0, 1, 2}),
    "shift_by_two": (lambda a: aten.constant_pad_nd.default(a, [0, 0, 2, -2]), [floats(4, 6, 2)], set()),
    "sum": (lambda a: a.sum(1), [floats(4, 6, 2)], {0, 1}),
    "sum_keepdim": (lambda a: a.sum((0, 2), keepdim=True), [floats(4, 6, 2)], {1}),
    "amax": (lambda a: a.amax(-1), [floats(4, 6)], {0}),
    "full_sum": (lambda a: a.sum(), [floats(4, 6)], set()),
    "layer_norm": (lambda a: F.layer_norm(a, (6,), a[0, 0], a[1, 1]), [floats(4, 2, 6)], {0, 1}),
    "topk": (lambda a: a.topk(2, -1), [floats(4, 6)], {0}),
    "sort": (lambda a: a.sort(0), [floats(4, 6)], {1}),
    "cat": (lambda a, b: torch.cat([a, b], 1), [floats(4, 6), floats(4, 3)], {0}),
    "cat_equal_parts": (lambda a, b: torch.cat([a, b, b]), [floats(4, 6), floats(4, 6)], {0, 1}),
    "repeat": (lambda a: a.repeat(3, 2, 1), [floats(4, 6)], {1, 2}),
    "stack": (lambda a, b: torch.stack([a, b], 1), [floats(4, 6), floats(4, 6)], {0, 2}),
    "split": (lambda a: a.split(4, -1), [floats(4, 6)], {0}),
    "split_equal_parts": (lambda a: a.split(4, -1), [floats(4, 12)], {0, 1}),
    "slice": (lambda a: a[:, 1:3], [floats(4, 6)], {0}),
    "slice_one_of_equal_parts": (lambda a: a[:, 4:8], [floats(4, 12)], {0, 1}),
    "slice_several_equal_parts": (lambda a: a[:, 4:12], [floats(4, 12)], {0, 1}),
    "slice_last": (lambda a: a[-8:], [floats(12, 4)], {0, 1}),
    "slice_from_negative_start": (lambda a: a[-20:8], [floats(12, 4)], {0, 1}),
    "strided_slice": (lambda a: a[:, 0:8:2], [floats(4, 8)], {0}),
    "select": (lambda a: a.select(1, 2), [floats(4, 6, 2)], {0, 1}),
    "embedding": (lambda w, i: F.embedding(i, w), [floats(7, 6), indices(7, 4, 2)], {0, 1, 2}),
    "index_select": (lambda a, i: a.index_select(1, i), [floats(4, 6), indices(6, 2)], {0, 1}),
    "index": (lambda a, i: a[i], [floats(4, 6), indices(4, 8)], {0, 1}),
    "gather": (lambda a, i: a.gather(1, i), [floats(4, 6), indices(6, 4, 2)], {0}),
    "scatter": (lambda a, i, s: a.scatter(1, i, s), [floats(4, 6), indices(6, 4, 6) * 0, floats(4, 6)], {0}),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), [floats(4, 2, 3, 8)], {0, 1}),
    "all-to-all": (lambda a: all_to_all_single(a, None, None, dist.group.WORLD), [floats(4, 6, 2)], {1, 2}),
    "random": (lambda a: torch.bernoulli(a), [torch.rand(4, 6)], set()),
    "view_dtype": (lambda a: a.view(torch.int64), [floats(4, 6)], set()),
    "unknown_operator": (lambda a: torch.linalg.inv_ex(a)[0], [floats(4, 4)], set()),
}


def every_axis(shape: tuple[int, ...]) -> list[Axis]:
    return [Axis(dim, outer) for dim, size in enumerate(shape) for outer in range(1, size + 1)]


def values_of(module: fx.GraphModule, inputs: list[Tensor]) -> dict[fx.Node, Any]:
    values: dict[fx.Node, Any] = {}

    class Keep(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            values[node] = super().run_node(node)
            return values[node]

    Keep(module).run(*inputs)
    return values


@pytest.mark.parametrize("name", [*[*CASES][::2], *slowly(*[*CASES][1::2])])
def test_concatenated_operator_chunks_equal_whole_result(name: str) -> None:
    """Each split of each operator, in two and in three chunks: concatenated chunks of the result equal the result."""
    function, inputs, dims = CASES[name]
    module = make_fx(function, tracing_mode="fake")(*inputs)
    values = values_of(module, inputs)
    found = set()
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    main = next(
        node
        for node in reversed(nodes)
        if not any(word in node.name for word in ("getitem", "wait")) and "detach" not in node.name
    )
    for chunks in (2, 3):
        for node in nodes:
            shape = shape_of(node)
            for axis in every_axis(shape or ()):
                way = split_operator(node, axis, chunks=chunks)
                if way is None:
                    continue
                computed = []
                for chunk in range(chunks):

                    def value(one: fx.Node, wanted: Axis | None, chunk: int = chunk, chunks: int = chunks) -> Any:
                        if wanted is None or isinstance(values[one], (tuple, list)):
                            return values[one]
                        return slice_chunk(call_and_wait, values[one], values[one].shape, wanted, chunk, chunks)

                    if isinstance(values[node.all_input_nodes[0]], (tuple, list)):
                        continue  # an operator with several results is not sliced as a whole
                    before = None
                    if chunk and way.needs_previous:
                        of = carry_source(node)
                        before = computed[-1] if of is node else value(of, axis, chunk - 1)
                    computed.append(run_chunk(call_and_wait, node, way, chunks, value, before))
                if not computed:
                    continue
                if chunks == 2 and node is main:
                    found.add(axis.dim)
                flat = [chunk if isinstance(chunk, (tuple, list)) else (chunk,) for chunk in computed]
                whole = values[node] if isinstance(values[node], (tuple, list)) else (values[node],)
                for column, right in zip(zip(*flat, strict=True), whole, strict=True):
                    joined = join_chunks(call_and_wait, list(column), right, axis)
                    torch.testing.assert_close(joined, right, rtol=1e-12, atol=1e-12)
                    assert joined.stride() == right.stride() or right.numel() < 2 or not is_dense(right)
    assert found == dims


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor covers its memory without gaps or overlap."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) == tensor.numel()


def call_and_wait(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = target(*args, **kwargs)
    return torch.ops._c10d_functional.wait_tensor(result) if "all_to_all" in str(target) else result


def test_reshape_axis_maps_split_axis() -> None:
    # Capacity (6, in three chunks) inside ranks × capacity; tokens (2 × 6) along the first dimension.
    assert reshape_axis((4, 2, 6, 5), Axis(2), (4, 12, 5), 3) == Axis(1, 2)
    assert reshape_axis((4, 12, 5), Axis(1, 2), (4, 2, 6, 5), 3) == Axis(2)
    assert reshape_axis((12, 5), Axis(0), (2, 6, 5), 2) == Axis(0)
    assert reshape_axis((12, 5), Axis(0), (3, 4, 5), 2) is None
    assert reshape_axis((6,), Axis(0), (2, 3), 3) is None


def experts(x_ECM: Tensor, w1_EMH: Tensor, w2_EHM: Tensor, middle: Callable[[Tensor], Tensor]) -> Tensor:
    """Send the rows of two simulated ranks to experts and back (world size 1), with operators before and after."""
    count, capacity, model_dim = x_ECM.shape
    rows_ECM = all_to_all_single(x_ECM * 2, None, None, dist.group.WORLD)
    rows_eRM = rows_ECM.reshape(2, count // 2, capacity, model_dim).transpose(0, 1)
    rows_eRM = rows_eRM.reshape(count // 2, 2 * capacity, model_dim)
    out_eRM = torch.bmm(middle(torch.relu(torch.bmm(rows_eRM, w1_EMH))), w2_EHM)
    out_ECM = out_eRM.reshape(count // 2, 2, capacity, model_dim).transpose(0, 1).reshape(count, capacity, model_dim)
    return all_to_all_single(out_ECM, None, None, dist.group.WORLD).tanh().sum(1)


def traced_example(middle: Callable[[Tensor], Tensor]) -> tuple[fx.GraphModule, list[Tensor]]:
    inputs = [floats(4, 6, 5), floats(2, 5, 8), floats(2, 8, 5)]
    return make_fx(lambda *of: experts(*of, middle), tracing_mode="fake")(*inputs), inputs


def test_expert_range_is_split_along_capacity() -> None:
    """The range is split along the capacity, inside ranks × capacity in the experts; its sum is not split."""
    module, inputs = traced_example(lambda h: h)
    of = Instructions(module.graph)
    split = infer_split(of.nodes, 3, lambda node: 1.0)
    assert split is not None
    assert [node.name for node in split.after] == ["sum_1"]
    assert not split.before
    products = [way for node, way in split.split.items() if node.target is aten.bmm.default]
    assert [way.axis for way in products] == [Axis(1, 2)] * 2
    assert infer_split(of.nodes, 4, lambda node: 1.0) is None  # 6 rows in 4 equal chunks


def test_unsplittable_operator_ends_range() -> None:
    """A softmax over an expert's rows needs all rows, which limits the range to one of the two all-to-alls."""
    module, _ = traced_example(lambda h: h.softmax(1))
    of = Instructions(module.graph)
    assert infer_split(of.nodes, 2, lambda node: 1.0) is None
    place = next(index for index, node in enumerate(of.nodes) if node.target is aten._softmax.default)
    first = infer_split(of.nodes[: place + 1], 2, lambda node: 1.0)
    assert first is not None
    assert of.nodes[place] in first.after and of.nodes[place - 1] in first.split
    last = infer_split(of.nodes[place:], 2, lambda node: 1.0)
    assert last is not None and of.nodes[place] in last.before


def as_range(of: Instructions, split: RangeSplit, chunks: int) -> InstructionRange:
    """A range over all instructions with this split."""
    axes = tuple((of.position[node], tuple(way.axis), way.token_outer) for node, way in split.split.items())
    return InstructionRange(0, len(of.nodes), chunks, axes, tuple(of.position[node] for node in split.before))


@pytest.mark.parametrize("chunks", [2, 3, 6])
def test_chunked_range_equals_original_graph(chunks: int) -> None:
    module, inputs = traced_example(lambda h: h)
    right = module(*inputs)
    of = Instructions(module.graph)
    split = infer_split(of.nodes, chunks, lambda node: 1.0)
    assert split is not None
    rewrite(module.graph, of, as_range(of, split, chunks))
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), right, rtol=1e-12, atol=1e-12)
    targets = [str(node.target) for node in module.graph.nodes]
    starts = [place for place, target in enumerate(targets) if "all_to_all" in target]
    waits = [place for place, target in enumerate(targets) if "wait_tensor" in target]
    products = [place for place, target in enumerate(targets) if target == "aten.bmm.default"]
    assert len(starts) == len(waits) == len(products) == 2 * chunks
    # Every chunk's dispatch starts before the first wait; each combine starts before the next chunk is computed.
    assert starts[chunks - 1] < waits[0] < products[0] < starts[chunks] < waits[1]


def test_chunking_preserves_reads_before_in_place_updates() -> None:
    def with_a_state(state: Tensor, *of: Tensor) -> Tensor:
        before = torch.linalg.inv_ex(state)[0]  # no chunked instruction depends on it
        state.mul_(2)
        return experts(*of, lambda h: h).sum() + (before * state).sum()

    inputs = [torch.eye(3, dtype=torch.double), *traced_example(lambda h: h)[1]]
    module = make_fx(with_a_state, tracing_mode="fake")(*inputs)
    right = with_a_state(inputs[0].clone(), *inputs[1:])
    of = Instructions(module.graph)
    split = infer_split(of.nodes, 2, lambda node: 1.0, order_constraints(of, 0, len(of.nodes)))
    assert split is not None and {"linalg_inv_ex", "mul_"} <= {node.name for node in split.before}
    rewrite(module.graph, of, as_range(of, split, 2))
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), right, rtol=1e-12, atol=1e-12)


def test_selected_ranges_depend_on_costs() -> None:
    module, _ = traced_example(lambda h: h)
    of = Instructions(module.graph)
    work = Steady(number_s=1e-6, byte_s=1e-6, start_s=1e-6)

    def found(costs: Steady, most: int = 8) -> list[int]:
        seconds = lambda node: costs.operator_s(None, tuple(one.meta["val"] for one in node.all_input_nodes), {})  # noqa: E731
        shown: list[tuple[int, int]] = []
        settings = PlanSettings(most, 2)
        ranges = select_ranges(of, seconds, {}, costs, settings, lambda *step: shown.append(step), {})
        assert [done for done, _ in shown] == list(range(1, shown[-1][1] + 1))
        return [one.chunks for one, _ in ranges]

    assert found(work) == [2]
    assert found(work, most=1) == []
    assert found(Steady(number_s=1e-6, byte_s=0.0, start_s=1.0)) == []  # a chunk takes as long as the whole


def test_groups_keep_all_to_all_with_its_users() -> None:
    module, _ = traced_example(lambda h: h)
    of = Instructions(module.graph)
    groups, layers = group_instructions(of, lambda node: 1.0, 5)
    assert layers == 1
    assert [index for start, stop in groups for index in range(start, stop)] == list(range(len(of.nodes)))
    where = {of.nodes[index]: number for number, (start, stop) in enumerate(groups) for index in range(start, stop)}
    for node in of.nodes:
        if is_all_to_all(node):
            assert {where[user] for user in node.users} == {where[node]}


def test_stage_makespan_equals_hand_computation() -> None:
    """Two chunks, 1 s compute, 2 s communication, 1 s compute: 1 + 2 + 2 + 1, as chunk 2 waits for the link."""
    plan, seconds = stage_plan({0: 1.0, 1: 1.0}, {0: 2.0}, 0.0, 2)
    assert makespan(plan, TaskDurations(seconds)) == 6.0
    # Independent work runs during communication.
    plan, seconds = stage_plan({0: 1.0, 1: 1.0}, {0: 2.0}, 1.0, 2)
    assert makespan(plan, TaskDurations(seconds)) == 6.0


def test_missing_ortools_error_names_pip_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = traced_example(lambda h: h)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ConfigError, match=r"pip install 'fusedmoe\[plan\]', or give the backend chunks=1"):
        infer_split(Instructions(module.graph).nodes, 2, lambda node: 1.0)
