"""fp8 between ranks (`Schedule(wire=…)`): errors, equal results of plans and transports, every way to run a layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import MoELayer, Schedule, Topology
from fusedmoe.comm import all_to_all
from fusedmoe.comm.wire_format import find_wire_format
from fusedmoe.engine.run import Plans
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts import Experts, FeedForward, SwiGLU
from fusedmoe.hooks import HookContext, Hooks
from fusedmoe.kernels.wire import define_pack_fp8, define_unpack_fp8
from fusedmoe.layers.schedule import with_wire
from fusedmoe.schedule import CostModel, Workload
from fusedmoe.schedule.cost import Line
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import extract_phase
from fusedmoe.schedule.task import TaskKind
from fusedmoe.training import save_communication
from tests.cluster import Cluster
from tests.marks import slowly

M = 200  # a whole block of 128 columns and a shorter one
WIRES = ("fp8", "fp8-both")


def make_layer(topology: Topology, schedule: Any, dtype: torch.dtype = torch.float64, **options: Any) -> MoELayer:
    torch.manual_seed(1)
    given: dict[str, Any] = {"experts": SwiGLU(96), **options}
    if "shared" in given:
        given["shared"] = SwiGLU(given["shared"])
    gate = fusedmoe.gates.TopK(experts=8, k=3)
    return MoELayer(given.pop("dim", M), gate, topology=topology, schedule=schedule, dtype=dtype, **given)


def batch(topology: Topology, tokens: int, dtype: torch.dtype = torch.float64, dim: int = M) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2 + topology.rank)
    x_SM, dy_SM = torch.randn(2, tokens, dim, dtype=torch.float64).to(dtype)
    return x_SM.requires_grad_(), dy_SM


def step(layer: nn.Module, x_SM: Tensor, dy_SM: Tensor, call: Any = None) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    x = x_SM.detach().requires_grad_()
    y_SM = layer(x) if call is None else call(x)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(y_SM, [x, *parameters], dy_SM.to(y_SM.dtype), allow_unused=True)
    found = dict(zip(("x", *names), gradients, strict=True))
    return {"y": y_SM.detach(), **{name: grad for name, grad in found.items() if grad is not None}}


def require_equal(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max()) if value.numel() else 1.0
        assert float((got[name] - value).abs().max() if value.numel() else 0.0) <= tolerance * scale, name


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the mean over tokens of the relative error per token, and the relative error of each parameter."""
    found = {}
    for name, value in exact.items():
        difference, norm = ((got[name].double() - value.double()), value.double())
        if name in ("y", "x"):
            found[name] = float((difference.norm(dim=1) / norm.norm(dim=1)).mean())
        else:
            found[name] = float(difference.norm() / norm.norm())
    return found


def check_errors(rank: int, world: int, experts: type[Experts], dtype: torch.dtype) -> None:
    topology = Topology.from_sizes(ep=world)
    for dim, hidden in ((128, 256), (M, 96), (512, 256)):
        data = batch(topology, 64, dtype, dim)
        exact, *rounded = (
            step(make_layer(topology, Schedule("off", wire=wire), dtype, experts=experts(hidden), dim=dim), *data)
            for wire in (None, *WIRES)
        )
        for wire, got in zip(WIRES, rounded, strict=True):
            for name, error in errors(got, exact).items():
                # A weight's gradient has the errors of both tokens and gradients.
                bound = (0.04 if wire == "fp8" else 0.05) if name in ("y", "x") else 0.055
                assert 0.01 < error < bound, (wire, dim, name, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("experts", [SwiGLU, FeedForward])
def test_errors_of_one_layer(cluster: Cluster, experts: type[Experts], dtype: torch.dtype) -> None:
    cluster.run(2, check_errors, experts, dtype)


class Rounded(Hooks):
    """The effect of a wire format on the values of each row, by definition."""

    def __init__(self, results: bool = False) -> None:
        self.results = results

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return define_unpack_fp8(define_pack_fp8(rows), rows.dtype)

    def before_combine(self, rows: Tensor, context: HookContext) -> Tensor | None:
        return self.before_dispatch(rows, context) if self.results else None


class Seen(Hooks):
    """Records the dtypes and widths of rows that hooks receive."""

    def __init__(self) -> None:
        self.rows: list[tuple[torch.dtype, int]] = []

    def before_dispatch(self, rows: Tensor, context: HookContext) -> None:
        self.rows.append((rows.dtype, rows.shape[1]))

    after_dispatch = before_combine = after_combine = before_dispatch


def costs() -> CostModel:
    names = ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp")
    return CostModel({**{name: Line(1e-5, 1e-9) for name in names}, "gemm": Line(1e-5, 1e-11)})


def schedules(wire: str | None) -> dict[str, Schedule]:
    return {
        "off": Schedule("off", wire=wire),
        "one chunk": Schedule("sequential", degrees=(1, 1), wire=wire),
        "more chunks than tokens": Schedule("fsmoe", degrees=(3, 17), wire=wire),
        "two orders": Schedule("tutel", degrees=(4, 2), wire=wire),
        "auto": Schedule("auto", costs=costs(), wire=wire),
    }


def check_policies(
    rank: int, world: int, sizes: dict[str, int], tokens: tuple[int, ...], wire: str, options: dict[str, Any]
) -> None:
    """fp8 with every policy equals rows rounded by the definition, in float64."""
    topology = Topology.from_sizes(**sizes)
    data = batch(topology, tokens[rank])
    expected = step(make_layer(topology, "off", hooks=[Rounded(wire == "fp8-both")], **options), *data)
    for name, schedule in schedules(wire).items():
        got = step(make_layer(topology, schedule, **options), *data)
        require_equal(got, expected)
        assert all(torch.isfinite(value).all() for value in got.values()), name


def test_shared_expert_is_not_rounded(cluster: Cluster) -> None:
    cluster.run(2, check_policies, {"ep": 2}, (23, 31), "fp8", {"shared": 40})


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("tokens", [(23, 31), (0, 9), (0, 0)], ids=str)
def test_policies_equal_the_definition(cluster: Cluster, tokens: tuple[int, int], wire: str) -> None:
    cluster.run(2, check_policies, {"ep": 2}, tokens, wire, {})


TWO_NODES = {"ep": 4, "ranks_per_node": 2}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"ep": 2, "esp": 2}, {}),
        *slowly(
            ({"ep": 1, "esp": 4}, {}),
            ({"ep": 2, "mp": 2}, {"mp_input": "split"}),
            (TWO_NODES, {"dispatch": "2dh"}),
            (TWO_NODES, {"dispatch": "1dh"}),
            (TWO_NODES, {"dispatch": "auto"}),
        ),
    ],
    ids=str,
)
def test_transports_equal_the_definition(cluster: Cluster, sizes: dict[str, int], options: dict[str, Any]) -> None:
    # The ranks of a node receive a forwarded token as its own rank has encoded it.
    cluster.run(4, check_policies, sizes, (13, 0, 22, 5), "fp8", options)


def check_two_levels_with_results(rank: int, world: int, dispatch: str) -> None:
    """Partial sums of a node are encoded for the link between nodes, the same with every plan."""
    topology = Topology.from_sizes(**TWO_NODES)
    data = batch(topology, (13, 0, 22, 5)[rank])
    exact = step(make_layer(topology, "off"), *data)
    found = [step(make_layer(topology, each, dispatch=dispatch), *data) for each in schedules("fp8-both").values()]
    for got in found:
        require_equal(got, found[0])
        if len(data[0]):
            assert errors(got, exact)["y"] < 0.06


@pytest.mark.parametrize("dispatch", slowly("2dh", "1dh"))
def test_two_levels_encode_sums(cluster: Cluster, dispatch: str) -> None:
    cluster.run(4, check_two_levels_with_results, dispatch)


def check_ways(rank: int, world: int, wire: str) -> None:
    """Compiled and checkpointed layers equal the eager layer, with a plan and without."""
    topology = Topology.from_sizes(ep=world)
    data = batch(topology, 12 + rank)
    for schedule in (Schedule("off", wire=wire), Schedule("fsmoe", degrees=(3, 2), wire=wire)):
        layer = make_layer(topology, schedule)
        expected = step(layer, *data)
        torch._dynamo.reset()
        require_equal(step(layer, *data, torch.compile(layer, fullgraph=True, backend="aot_eager")), expected)
        torch._dynamo.reset()
        for options in ({"use_reentrant": False}, {"use_reentrant": False, "context_fn": save_communication}):
            require_equal(step(layer, *data, partial(checkpoint, layer, **options)), expected)


@pytest.mark.parametrize("wire", ["fp8", *slowly("fp8-both")])
def test_compiled_and_checkpointed_layers(cluster: Cluster, wire: str) -> None:
    cluster.run(2, check_ways, wire)


def check_hooks(rank: int, world: int, wire: str) -> None:
    topology = Topology.from_sizes(ep=world)
    data = batch(topology, 12 + rank)
    for schedule in (Schedule("off", wire=wire), Schedule("fsmoe", degrees=(2, 3), wire=wire)):
        seen = Seen()
        got = step(make_layer(topology, schedule, hooks=[seen]), *data)
        require_equal(got, step(make_layer(topology, schedule), *data))
        assert set(seen.rows) == {(torch.float64, M)}


def test_hooks_receive_decoded_rows(cluster: Cluster) -> None:
    for wire in WIRES:
        cluster.run(2, check_hooks, wire)


def check_hooks_with_two_levels(rank: int, world: int, dispatch: str) -> None:
    """With hooks, no encoded rows are summed inside a node."""
    topology = Topology.from_sizes(**TWO_NODES)
    data = batch(topology, (13, 0, 22, 5)[rank])
    expected = step(make_layer(topology, Schedule("off", wire="fp8-both"), hooks=[Hooks()]), *data)
    exact = step(make_layer(topology, "off"), *data)
    for schedule in schedules("fp8-both").values():
        got = step(make_layer(topology, schedule, hooks=[Hooks()], dispatch=dispatch), *data)
        require_equal(got, expected)
        if len(data[0]):
            assert errors(got, exact)["y"] < 0.06


@pytest.mark.parametrize("dispatch", slowly("2dh", "1dh"))
def test_hooks_with_two_levels(cluster: Cluster, dispatch: str) -> None:
    cluster.run(4, check_hooks_with_two_levels, dispatch)


def check_autocast(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world)
    x_SM, dy_SM = batch(topology, 20, torch.float32)
    results = []
    for schedule in ("off", Schedule("off", wire="fp8"), Schedule("fsmoe", degrees=(2, 2), wire="fp8")):
        layer = make_layer(topology, schedule, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y_SM = layer(x_SM)
        assert y_SM.dtype == torch.bfloat16
        results.append((y_SM, *torch.autograd.grad(y_SM, [x_SM, layer.experts.w1], dy_SM.to(y_SM.dtype))))
    exact, off, planned = ([value.double() for value in each] for each in results)
    for value, expected, chunked in zip(off, exact, planned, strict=True):
        assert 0.01 < float((value - expected).norm() / expected.norm()) < 0.06
        assert float((chunked - value).norm() / value.norm()) < 0.01  # sums of chunks round differently


def test_autocast(cluster: Cluster) -> None:
    cluster.run(2, check_autocast)


def check_nonfinite(rank: int, world: int, wire: str) -> None:
    """A gradient that is not finite stays so, and does not spoil other tokens."""
    topology = Topology.from_sizes(ep=world)
    for schedule in (Schedule("off", wire=wire), Schedule("fsmoe", degrees=(2, 2), wire=wire)):
        x_SM, dy_SM = batch(topology, 16, torch.float32)
        dy_SM[3, 5], dy_SM[7, 130] = float("nan"), float("inf")
        dy_SM[9] = 0
        layer = make_layer(topology, schedule, torch.float32)
        dx_SM = step(layer, x_SM, dy_SM)["x"]
        is_finite = dx_SM.isfinite().all(1)
        assert is_finite.tolist() == [number not in (3, 7) for number in range(16)]
        assert not is_finite[[3, 7]].any() and float(dx_SM[9].abs().max()) == 0


def test_nonfinite_gradients_arrive_as_such(cluster: Cluster) -> None:
    for wire in WIRES:
        cluster.run(2, check_nonfinite, wire)


def count_bytes(rank: int, world: int, dim: int) -> dict[str, dict[str, int]]:
    """Return the bytes of rows that this rank sends to the other, in both passes, by format and operation."""
    topology = Topology.from_sizes(ep=world)
    call = all_to_all.all_to_all_rows
    sent: dict[str, int] = {}

    def counting(group: Any, rows: Tensor, send: list[int], recv: list[int], operation: str, **more: Any) -> Tensor:
        if rows.shape[1] >= dim:  # rows of tokens
            sent[operation] = sent.get(operation, 0) + send[1 - group.index] * rows.stride(0) * rows.itemsize
        return call(group, rows, send, recv, operation, **more)

    all_to_all.all_to_all_rows = counting
    found = {}
    try:
        for wire in (None, *WIRES):
            sent = {}
            layer = make_layer(topology, Schedule("fsmoe", degrees=(2, 2), wire=wire), torch.bfloat16, dim=dim)
            step(layer, *batch(topology, 40, torch.bfloat16, dim))
            found[str(wire)] = sent
    finally:
        all_to_all.all_to_all_rows = call
    return found


@pytest.mark.parametrize("dim", [256, 200])
def test_bytes_on_links(cluster: Cluster, dim: int) -> None:
    share = (dim + 4 * 2) / (2 * dim)
    assert share <= 0.53
    for found in cluster.run(2, count_bytes, dim):
        dispatched, combined = found["None"]["dispatch"], found["None"]["combine"]
        assert dispatched > 0 < combined
        assert found["fp8"] == {"dispatch": share * dispatched, "combine": combined}
        assert found["fp8-both"] == {"dispatch": share * dispatched, "combine": share * combined}


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(M, M, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tanh(self.linear(x))


def check_pipeline(rank: int, world: int, wire: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Micro-batches equal sequential blocks, whether the layers or the pipeline name the format."""
    topology = Topology.from_sizes(**sizes)
    torch.manual_seed(5 + rank)
    x, dy = torch.randn(2, 4, 5, M, dtype=torch.float64)

    def make_blocks(schedule: Any) -> list[tuple[nn.Module, MoELayer]]:
        torch.manual_seed(3)
        return [(Dense(), make_layer(topology, schedule, **options)) for _ in range(2)]

    def run(blocks: list[tuple[nn.Module, MoELayer]], call: Any) -> dict[str, Tensor]:
        return step(nn.ModuleList(nn.ModuleList(block) for block in blocks), x, dy, call)

    def sequentially(blocks: list[tuple[nn.Module, MoELayer]], x: Tensor) -> Tensor:
        for dense, layer in blocks:
            y, u = dense(x)
            x = y + layer(u)
        return x

    blocks = make_blocks(Schedule("off", wire=wire))
    expected = run(blocks, partial(sequentially, blocks))
    for schedule, given in ((Schedule("off", wire=wire), None), ("off", wire)):
        blocks = make_blocks(schedule)
        require_equal(run(blocks, fusedmoe.pipeline(blocks, (2, 4), wire=given)), expected, 1e-9)
    run_blocks = fusedmoe.pipeline(blocks)
    step_costs = run_blocks.workload(x).step_costs(costs(), [0, 0], blocks[0][1].parts, whole=True)
    plan = micro_schedule(step_costs, StepSplit(2, 2, weights=True)).plan()
    assert TaskKind.WEIGHT_GRADIENT in plan.kinds
    run_blocks.set_plan(Plans(extract_phase(plan, "forward"), extract_phase(plan, "backward")))
    require_equal(run(blocks, run_blocks), expected, 1e-9)
    # Layers outside of the pipeline use its format, too.
    require_equal(run(blocks, partial(sequentially, blocks)), expected, 1e-9)


@pytest.mark.parametrize("wire", WIRES)
def test_pipeline(cluster: Cluster, wire: str) -> None:
    cluster.run(2, check_pipeline, wire, {"ep": 2}, {})


@pytest.mark.parametrize(
    ("sizes", "options"),
    slowly(
        ({"ep": 2, "esp": 2}, {}), (TWO_NODES, {"dispatch": "2dh"}), ({"ep": 2}, {"hooks": [Hooks()]}),
        ({"ep": 2}, {"order": fusedmoe.orders.Einsum()}),
    ),
    ids=str,
)  # fmt: skip
def test_pipeline_with_other_transports(cluster: Cluster, sizes: dict[str, int], options: dict[str, Any]) -> None:
    cluster.run(sizes["ep"] * sizes.get("esp", 1), check_pipeline, "fp8", sizes, options)


def check_placement(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world)
    data = batch(topology, 20 + rank)
    for schedule in (Schedule("off", wire="fp8"), Schedule("fsmoe", degrees=(2, 2), wire="fp8")):
        got, expected = (step(make_layer(topology, schedule, placement=way), *data) for way in ("fssdp", "ep"))
        require_equal({name: got[name] for name in ("y", "x")}, {name: expected[name] for name in ("y", "x")})


def test_placed_experts(cluster: Cluster) -> None:
    cluster.run(2, check_placement)


def check_refusals(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world)
    layer = make_layer(topology, "fused")
    with pytest.raises(ConfigError, match="one-sided kernels"):
        layer.set_wire("fp8")
    with pytest.raises(RankError, match="schedule"):
        make_layer(topology, Schedule("off", wire="fp8" if rank else "fp8-both"))


def check_default_format_again(rank: int, world: int) -> None:
    """A layer that returns to the default format equals a new one, also compiled, and allows one-sided kernels."""
    topology = Topology.from_sizes(ep=world)
    data = batch(topology, 12 + rank)
    layer = make_layer(topology, Schedule("joint", costs=costs(), puts=True))
    puts = layer.plans.puts
    for wire in ("fp8", None, "fp8-both", "bf16"):
        layer.set_wire(wire)
        assert layer.plans.puts == (puts and wire in (None, "bf16"))
        assert layer.plans.schedule.puts == (wire in (None, "bf16"))
        expected = step(make_layer(topology, Schedule("off", wire=wire)), *data)
        require_equal(step(layer, *data), expected)
    assert puts
    compiled_layer = make_layer(topology, Schedule("fsmoe", degrees=(2, 2)))
    compiled = torch.compile(compiled_layer, fullgraph=True, backend="aot_eager")
    for wire in (None, "fp8", "fp8-both", None):
        compiled_layer.set_wire(wire)
        expected = step(make_layer(topology, Schedule("off", wire=wire)), *data)
        require_equal(step(compiled_layer, *data, compiled), expected)


def test_formats_replaced_between_steps(cluster: Cluster) -> None:
    cluster.run(2, check_default_format_again)


def test_refusals(cluster: Cluster) -> None:
    for options in ({"policy": "fused"}, {"puts": True}):
        with pytest.raises(ConfigError, match="one-sided kernels put rows in the tensors' own dtype.*leave out"):
            Schedule(**options, wire="fp8")
    for wire in ("fp4", 8, "FP8"):
        with pytest.raises(ConfigError, match="choose bf16, fp8, fp8-both"):
            Schedule(wire=wire)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='"off" has neither chunks'):
        Schedule("off", degrees=(2, 2), wire="fp8")
    assert with_wire("auto", "bf16") == "auto" and with_wire(Schedule("joint"), "fp8") == Schedule("auto", wire="fp8")
    assert Schedule(wire="bf16") == Schedule() and str(Schedule("auto", wire="fp8")) == "joint, fp8"
    cluster.run(2, check_refusals)


def exchange_in_two_formats(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    layer = make_layer(topology, "off")
    collectives = layer.dispatcher.collectives
    assert collectives is not None
    wire = find_wire_format("fp8" if rank == 1 else None)
    collectives.all_to_all = all_to_all.make_all_to_all("direct", topology, wire)
    with pytest.raises(
        RankError, match=r"formats between ranks \(wire\) cannot be exchanged: bf16 on rank 0, fp8 on rank 1"
    ):
        layer(torch.randn(4, M, dtype=torch.float64))
    topology.close()


def test_formats_are_compared_before_rows_are_sent(cluster: Cluster) -> None:
    cluster.run(2, exchange_in_two_formats)


def test_one_rank_sends_nothing_and_rounds_nothing() -> None:
    topology = Topology()
    data = batch(topology, 9)
    expected = step(make_layer(topology, "off"), *data)
    for schedule in schedules("fp8-both").values():
        require_equal(step(make_layer(topology, schedule), *data), expected, 0.0)
    hooked = (step(make_layer(topology, Schedule("off", wire=wire), hooks=[Hooks()]), *data) for wire in (None, "fp8"))
    require_equal(*hooked, tolerance=0.0)


def test_costs_and_choices_depend_on_the_format() -> None:
    work = Workload.of_rows(4096, 4096, 2048, 8, True, 2, 8, 1)
    fp8, both = (work.encoded(*find_wire_format(wire).element_bytes(4096)) for wire in WIRES)  # type: ignore[union-attr]
    volumes = [each.volumes() for each in (work, fp8, both)]
    assert [each["dispatch"] / volumes[0]["dispatch"] for each in volumes] == [1, 0.515625, 0.515625]
    assert [each["combine"] / volumes[0]["combine"] for each in volumes] == [1, 1, 0.515625]
    assert len({each.shapes for each in (work, fp8, both)}) == 3
    model = CostModel({"all-to-all/ep": Line(1e-5, 2e-11), "gemm": Line(1e-5, 2e-15)})
    plans = [
        Schedule("joint", costs=model).plans(("dispatch", "expert", "combine"), each) for each in (work, fp8, both)
    ]
    times = [
        sum(makespan(plan, each.step_costs(model, [0], each.volumes())) for plan in (found.forward, found.backward))
        for found, each in zip(plans, (work, fp8, both), strict=True)
    ]
    assert times[0] > times[1] > times[2]
    assert len({plan.degrees for plan in plans}) == 3
