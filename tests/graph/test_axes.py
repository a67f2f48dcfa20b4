"""The table of axes, operator by operator; which axes a range gets; ranges rewritten in chunks."""

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
from fusedmoe.graph.axes import Axis, relocate, shape_of, way_of
from fusedmoe.graph.instructions import Instructions, is_all_to_all
from fusedmoe.graph.micro_batches import PlanSettings, chosen_ranges, grouped, in_order, infer
from fusedmoe.graph.rewriting import (
    InstructionRange,
    RangeSplit,
    carried_from,
    cut,
    join,
    rewrite,
    run_chunk,
    stage_plan,
)
from fusedmoe.schedule.cost import Durations
from fusedmoe.schedule.simulate import makespan
from tests.graph.models import Steady
from tests.marks import slowly

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("world")


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def indices(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


#: Operators with inputs, and the dimensions of the result along which each can be in two chunks.
CASES: dict[str, tuple[Callable[..., Any], list[Tensor], set[int]]] = {
    "add, broadcast": (lambda a, b: a + b, [floats(4, 1, 6), floats(8, 6)], {0, 1, 2}),
    "where": (lambda a, b: torch.where(a > 0, a, b), [floats(4, 6), floats(6)], {0, 1}),
    "cast": (lambda a: a.to(torch.float32), [floats(4, 6)], {0, 1}),
    "gelu": (lambda a: F.gelu(a), [floats(4, 6)], {0, 1}),
    "view": (lambda a: a.view(2, 2, 24), [floats(4, 4, 6)], {0, 1, 2}),
    "reshape of a transposed": (lambda a: a.transpose(0, 1).reshape(16, 6), [floats(4, 4, 6)], {0, 1}),
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
    "moved on by one": (lambda a: aten.constant_pad_nd.default(a, [0, 0, 1, -1]), [floats(4, 6, 2)], {0, 1, 2}),
    "padded": (lambda a: aten.constant_pad_nd.default(a, [0, 0, 2, -2]), [floats(4, 6, 2)], set()),
    "sum": (lambda a: a.sum(1), [floats(4, 6, 2)], {0, 1}),
    "sum, kept": (lambda a: a.sum((0, 2), keepdim=True), [floats(4, 6, 2)], {1}),
    "amax": (lambda a: a.amax(-1), [floats(4, 6)], {0}),
    "sum of all": (lambda a: a.sum(), [floats(4, 6)], set()),
    "layer_norm": (lambda a: F.layer_norm(a, (6,), a[0, 0], a[1, 1]), [floats(4, 2, 6)], {0, 1}),
    "topk": (lambda a: a.topk(2, -1), [floats(4, 6)], {0}),
    "sort": (lambda a: a.sort(0), [floats(4, 6)], {1}),
    "cat": (lambda a, b: torch.cat([a, b], 1), [floats(4, 6), floats(4, 3)], {0}),
    "cat of equal parts": (lambda a, b: torch.cat([a, b, b]), [floats(4, 6), floats(4, 6)], {0, 1}),
    "repeat": (lambda a: a.repeat(3, 2, 1), [floats(4, 6)], {1, 2}),
    "stack": (lambda a, b: torch.stack([a, b], 1), [floats(4, 6), floats(4, 6)], {0, 2}),
    "split": (lambda a: a.split(4, -1), [floats(4, 6)], {0}),
    "split into equal parts": (lambda a: a.split(4, -1), [floats(4, 12)], {0, 1}),
    "slice": (lambda a: a[:, 1:3], [floats(4, 6)], {0}),
    "slice of equal parts": (lambda a: a[:, 4:8], [floats(4, 12)], {0, 1}),
    "slice of some equal parts": (lambda a: a[:, 4:12], [floats(4, 12)], {0, 1}),
    "slice of the last": (lambda a: a[-8:], [floats(12, 4)], {0, 1}),
    "slice from before the first": (lambda a: a[-20:8], [floats(12, 4)], {0, 1}),
    "slice of every second": (lambda a: a[:, 0:8:2], [floats(4, 8)], {0}),
    "select": (lambda a: a.select(1, 2), [floats(4, 6, 2)], {0, 1}),
    "embedding": (lambda w, i: F.embedding(i, w), [floats(7, 6), indices(7, 4, 2)], {0, 1, 2}),
    "index_select": (lambda a, i: a.index_select(1, i), [floats(4, 6), indices(6, 2)], {0, 1}),
    "index": (lambda a, i: a[i], [floats(4, 6), indices(4, 8)], {0, 1}),
    "gather": (lambda a, i: a.gather(1, i), [floats(4, 6), indices(6, 4, 2)], {0}),
    "scatter": (lambda a, i, s: a.scatter(1, i, s), [floats(4, 6), indices(6, 4, 6) * 0, floats(4, 6)], {0}),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), [floats(4, 2, 3, 8)], {0, 1}),
    "all-to-all": (lambda a: all_to_all_single(a, None, None, dist.group.WORLD), [floats(4, 6, 2)], {1, 2}),
    "random": (lambda a: torch.bernoulli(a), [torch.rand(4, 6)], set()),
    "bits of another dtype": (lambda a: a.view(torch.int64), [floats(4, 6)], set()),
    "unknown": (lambda a: torch.linalg.inv_ex(a)[0], [floats(4, 4)], set()),
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
def test_chunks_give_the_whole(name: str) -> None:
    """Each way to split each operator: chunks of the inputs give chunks of the result, in two and in three."""
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
                way = way_of(node, axis, chunks=chunks)
                if way is None:
                    continue
                computed = []
                for chunk in range(chunks):

                    def value(one: fx.Node, wanted: Axis | None, chunk: int = chunk, chunks: int = chunks) -> Any:
                        if wanted is None or isinstance(values[one], (tuple, list)):
                            return values[one]
                        return cut(called, values[one], values[one].shape, wanted, chunk, chunks)

                    if isinstance(values[node.all_input_nodes[0]], (tuple, list)):
                        continue  # one of several results: nothing is cut off them at once
                    before = None
                    if chunk and way.carries:
                        of = carried_from(node)
                        before = computed[-1] if of is node else value(of, axis, chunk - 1)
                    computed.append(run_chunk(called, node, way, chunks, value, before))
                if not computed:
                    continue
                if chunks == 2 and node is main:
                    found.add(axis.dim)
                flat = [chunk if isinstance(chunk, (tuple, list)) else (chunk,) for chunk in computed]
                whole = values[node] if isinstance(values[node], (tuple, list)) else (values[node],)
                for column, right in zip(zip(*flat, strict=True), whole, strict=True):
                    joined = join(called, list(column), right, axis)
                    torch.testing.assert_close(joined, right, rtol=1e-12, atol=1e-12)
                    assert joined.stride() == right.stride() or right.numel() < 2 or not dense(right)
    assert found == dims


def dense(tensor: Tensor) -> bool:
    """Whether it fills its memory without gaps, once."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) == tensor.numel()


def called(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = target(*args, **kwargs)
    return torch.ops._c10d_functional.wait_tensor(result) if "all_to_all" in str(target) else result


def test_where_elements_lie_after_a_reshape() -> None:
    # Capacity (6, in three chunks) inside ranks × capacity, and of tokens (2 × 6) along the first.
    assert relocate((4, 2, 6, 5), Axis(2), (4, 12, 5), 3) == Axis(1, 2)
    assert relocate((4, 12, 5), Axis(1, 2), (4, 2, 6, 5), 3) == Axis(2)
    assert relocate((12, 5), Axis(0), (2, 6, 5), 2) == Axis(0)
    assert relocate((12, 5), Axis(0), (3, 4, 5), 2) is None
    assert relocate((6,), Axis(0), (2, 3), 3) is None


def experts(x_ECM: Tensor, w1_EMH: Tensor, w2_EHM: Tensor, middle: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of two ranks (each its own, in this world of one) to experts and back, with something before and after."""
    count, capacity, model_dim = x_ECM.shape
    rows_ECM = all_to_all_single(x_ECM * 2, None, None, dist.group.WORLD)
    rows_eRM = rows_ECM.reshape(2, count // 2, capacity, model_dim).transpose(0, 1)
    rows_eRM = rows_eRM.reshape(count // 2, 2 * capacity, model_dim)
    out_eRM = torch.bmm(middle(torch.relu(torch.bmm(rows_eRM, w1_EMH))), w2_EHM)
    out_ECM = out_eRM.reshape(count // 2, 2, capacity, model_dim).transpose(0, 1).reshape(count, capacity, model_dim)
    return all_to_all_single(out_ECM, None, None, dist.group.WORLD).tanh().sum(1)


def an_example(middle: Callable[[Tensor], Tensor]) -> tuple[fx.GraphModule, list[Tensor]]:
    inputs = [floats(4, 6, 5), floats(2, 5, 8), floats(2, 8, 5)]
    return make_fx(lambda *of: experts(*of, middle), tracing_mode="fake")(*inputs), inputs


def test_axes_of_experts_between_all_to_alls() -> None:
    """All is split along the capacity, which lies within ranks × capacity in the experts; but not its sum."""
    module, inputs = an_example(lambda h: h)
    of = Instructions(module.graph)
    split = infer(of.nodes, 3, lambda node: 1.0)
    assert split is not None
    assert [node.name for node in split.after] == ["sum_1"]
    assert not split.before
    products = [way for node, way in split.split.items() if node.target is aten.bmm.default]
    assert [way.axis for way in products] == [Axis(1, 2)] * 2
    assert infer(of.nodes, 4, lambda node: 1.0) is None  # 6 rows in 4 equal chunks


def test_what_cannot_be_split_ends_the_range() -> None:
    """A softmax over the rows of an expert sees them all: then only one of the all-to-alls can be in a range."""
    module, _ = an_example(lambda h: h.softmax(1))
    of = Instructions(module.graph)
    assert infer(of.nodes, 2, lambda node: 1.0) is None
    place = next(index for index, node in enumerate(of.nodes) if node.target is aten._softmax.default)
    first = infer(of.nodes[: place + 1], 2, lambda node: 1.0)
    assert first is not None
    assert of.nodes[place] in first.after and of.nodes[place - 1] in first.split
    last = infer(of.nodes[place:], 2, lambda node: 1.0)
    assert last is not None and of.nodes[place] in last.before


def as_range(of: Instructions, split: RangeSplit, chunks: int) -> InstructionRange:
    """All instructions, split so."""
    axes = tuple((of.place[node], tuple(way.axis), way.crosses) for node, way in split.split.items())
    return InstructionRange(0, len(of.nodes), chunks, axes, tuple(of.place[node] for node in split.before))


@pytest.mark.parametrize("chunks", [2, 3, 6])
def test_a_range_in_chunks_gives_the_same(chunks: int) -> None:
    module, inputs = an_example(lambda h: h)
    right = module(*inputs)
    of = Instructions(module.graph)
    split = infer(of.nodes, chunks, lambda node: 1.0)
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
    # All rows are on the wire before the first is waited for; each chunk goes back before the next one is computed.
    assert starts[chunks - 1] < waits[0] < products[0] < starts[chunks] < waits[1]


def test_what_reads_memory_before_it_changes_still_does() -> None:
    def with_a_state(state: Tensor, *of: Tensor) -> Tensor:
        before = torch.linalg.inv_ex(state)[0]  # for which nothing in chunks waits
        state.mul_(2)
        return experts(*of, lambda h: h).sum() + (before * state).sum()

    inputs = [torch.eye(3, dtype=torch.double), *an_example(lambda h: h)[1]]
    module = make_fx(with_a_state, tracing_mode="fake")(*inputs)
    right = with_a_state(inputs[0].clone(), *inputs[1:])
    of = Instructions(module.graph)
    split = infer(of.nodes, 2, lambda node: 1.0, in_order(of, 0, len(of.nodes)))
    assert split is not None and {"linalg_inv_ex", "mul_"} <= {node.name for node in split.before}
    rewrite(module.graph, of, as_range(of, split, 2))
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), right, rtol=1e-12, atol=1e-12)


def test_the_programme_splits_what_is_worth_it() -> None:
    module, _ = an_example(lambda h: h)
    of = Instructions(module.graph)
    work = Steady(number_s=1e-6, byte_s=1e-6, start_s=1e-6)

    def found(costs: Steady, most: int = 8) -> list[int]:
        seconds = lambda node: costs.operator_s(None, tuple(one.meta["val"] for one in node.all_input_nodes), {})  # noqa: E731
        shown: list[tuple[int, int]] = []
        settings = PlanSettings(most, 2)
        ranges = chosen_ranges(of, seconds, {}, costs, settings, lambda *step: shown.append(step), {})
        assert [done for done, _ in shown] == list(range(1, shown[-1][1] + 1))
        return [one.chunks for one, _ in ranges]

    assert found(work) == [2]
    assert found(work, most=1) == []
    assert found(Steady(number_s=1e-6, byte_s=0.0, start_s=1.0)) == []  # each chunk takes as long as the whole


def test_groups_hold_together() -> None:
    module, _ = an_example(lambda h: h)
    of = Instructions(module.graph)
    groups, layers = grouped(of, lambda node: 1.0, 5)
    assert layers == 1
    assert [index for start, stop in groups for index in range(start, stop)] == list(range(len(of.nodes)))
    where = {of.nodes[index]: number for number, (start, stop) in enumerate(groups) for index in range(start, stop)}
    for node in of.nodes:
        if is_all_to_all(node):
            assert {where[user] for user in node.users} == {where[node]}


def test_stages_by_hand() -> None:
    """Two chunks: 1 s, 2 s on the wire, 1 s. The second chunk's rows wait for the wire: 1 + 2 + 2 + 1."""
    plan, seconds = stage_plan({0: 1.0, 1: 1.0}, {0: 2.0}, 0.0, 2)
    assert makespan(plan, Durations(seconds)) == 6.0
    # What waits for nothing runs meanwhile.
    plan, seconds = stage_plan({0: 1.0, 1: 1.0}, {0: 2.0}, 1.0, 2)
    assert makespan(plan, Durations(seconds)) == 6.0


def test_without_or_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = an_example(lambda h: h)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ConfigError, match=r"pip install 'fusedmoe\[plan\]', or give the backend chunks=1"):
        infer(Instructions(module.graph).nodes, 2, lambda node: 1.0)
