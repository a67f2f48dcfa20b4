"""Invalid input raises one clear error on every rank, before anything is sent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import autograd
from fusedmoe.comm.all_to_all import AllToAll, Traffic, make_all_to_all
from fusedmoe.comm.one_sided.heaps import open_heap
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.engine.one_sided_experts import fused_experts
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.networks import Custom, FeedForward, Place, SwiGLU
from fusedmoe.kernels.experts import Weights
from fusedmoe.layers.moe import MoELayer, MpInput
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.runtime.cache import cached_profile
from tests.cluster import Cluster
from tests.layers.gate_cases import GATES
from tests.layers.gate_cases import make as make_gate
from tests.marks import slowly

M, H, E = 6, 8, 4
# Far below any time-out. An error takes a fraction of a second, but the machine may be busy.
SOON_S = 60.0

Ending = tuple[str, str, float]


def attempt(rank: int, world: int, function: Callable[..., None], *args: Any) -> Ending:
    """Return how a rank ended: the error's type and text ("" for none), and the elapsed seconds."""
    start = time.monotonic()
    try:
        function(rank, world, *args)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def assert_all_ranks_raise(
    cluster: Cluster, kind: str, match: str, function: Callable[..., None], *args: Any
) -> list[str]:
    """Require each of 4 ranks to end soon with an error of this type and text; return the texts."""
    endings = cluster.run(4, attempt, function, *args)
    for rank, (name, text, seconds) in enumerate(endings):
        assert name == kind and re.search(match, text), (rank, name, text)
        assert seconds < SOON_S, (rank, seconds, text)
    return [text for _, text, _ in endings]


def make(topology: Topology | None = None, dim: int = M, hidden: int = H, **more: Any) -> MoELayer:
    gate = more.pop("gate", None) or fusedmoe.gates.TopK(experts=E, k=2)
    experts = more.pop("experts", None) or SwiGLU(hidden)
    return MoELayer(dim, gate, experts, topology=topology, **more)


# Errors that one process can detect alone.


def test_invalid_sizes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="k = 5 is more than its 4 experts"):
        fusedmoe.gates.TopK(experts=4, k=5)
    with pytest.raises(ConfigError, match="hidden = 0"):
        SwiGLU(0)
    with pytest.raises(ConfigError, match="unknown activation 'swish'"):
        FeedForward(8, activation="swish")
    names: Any = ["balance"]
    with pytest.raises(ConfigError, match=r"aux must map loss names to coefficients.* got \['balance'\]"):
        fusedmoe.gates.TopK(experts=4, aux=names)
    module: Any = nn.Linear(M, M)
    with pytest.raises(ConfigError, match="Custom takes a function that makes one expert.* got Linear"):
        Custom(module)
    with pytest.raises(ConfigError, match="returned an earlier expert's module for expert 1"):
        make(experts=Custom(lambda dim: module))
    with pytest.raises(ConfigError, match="unknown dispatch algorithm '3dh'"):
        make(dispatch="3dh")
    with pytest.raises(ConfigError, match="mp_input = 'both'"):
        make(mp_input="both")
    with pytest.raises(ConfigError, match="model_dim must be an integer of at least 1"):
        make(dim=0)
    layer = make()
    with pytest.raises(ConfigError, match="already belong to a layer"):
        make(experts=layer.experts)


@pytest.mark.parametrize(
    "parts, match",
    [
        ({"gate": "topk"}, r"gate is 'topk', no Gate; give, say, fusedmoe.gates.TopK\("),
        ({"gate": fusedmoe.gates.TopK}, "gate is <class .*TopK'>, no Gate"),
        ({"experts": 8}, r"experts is 8, no Experts; give, say, fusedmoe.experts.SwiGLU\("),
        ({"shared": nn.Linear(M, M)}, r"shared is Linear\(.*, no Experts; .* fusedmoe.experts.Custom"),
        ({"order": "sparse"}, r"order is 'sparse', no Order; give, say, fusedmoe.orders.Sparse\(\)"),
        ({"hooks": [fusedmoe.hooks.WireCast]}, "hook <class .*WireCast'> is not a Hooks"),
        ({"hooks": fusedmoe.hooks.WireCast()}, r"hooks is WireCast\(torch.bfloat16\); pass a list, hooks=\["),
        ({"hooks": None}, "hooks is None; pass a list"),
        ({"hooks": "fp8"}, "hook 'f' is not a Hooks"),
        ({"dtype": "float32"}, "^MoELayer: dtype = 'float32'; give a floating-point dtype of PyTorch, say torch.bf"),
        ({"dtype": torch.int8}, "dtype = torch.int8; give a floating-point dtype"),
        ({"topology": 4}, "topology is 4, no Topology"),
    ],
)
def test_parts_of_wrong_type_are_rejected(parts: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make(**parts)


@pytest.mark.parametrize(
    "call",
    [
        lambda dtype: fusedmoe.gates.TopK(E).setup(M, dtype=dtype),
        lambda dtype: SwiGLU(H).setup(M, Place(), dtype=dtype),
        lambda dtype: Transformer(ModelConfig(layers=1), dtype=dtype),
        lambda dtype: cached_profile(Topology(), torch.device("cpu"), dtype=dtype),
        lambda dtype: ReceiveBuffers(
            open_heap(Topology().ep, torch.device("cpu"), "host"), BufferSizes(8, 2, 4, 8, dtype)
        ),
    ],
)
def test_dtype_names_are_rejected(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match=r"^\w+: dtype = 'bfloat16'; give a .*dtype of PyTorch, say torch.bfloat16$"):
        call("bfloat16")


def test_fused_kernels_without_device_are_rejected() -> None:
    heap = open_heap(Topology().ep, torch.device("cpu"), "host")
    buffers = ReceiveBuffers(heap, BufferSizes(8, 1, 4, M, torch.float32))
    experts = GroupedExperts(Weights(torch.ones(4, 2, H, M), torch.ones(4, M, H)), "swiglu")
    with pytest.raises(ConfigError, match=r"^fused_experts: .* set TRITON_INTERPRET=1 before Python starts$"):
        fused_experts(torch.ones(3, M), None, autograd.order(torch.zeros(3, 1).long(), 4), buffers, experts)


def test_wire_cast_to_integers_is_rejected() -> None:
    with pytest.raises(ConfigError, match="cannot send rows as torch.int8"):
        fusedmoe.hooks.WireCast(torch.int8)


@pytest.mark.parametrize(
    "x, match",
    [
        (torch.randn(3, M + 1), rf"shape \[3, {M + 1}\]; its last dimension must be model_dim = {M}"),
        (torch.tensor(1.0), r"shape \[\]"),
        (torch.randn(3, M, dtype=torch.float64), "input of torch.float64 but its experts are torch.float32"),
        (torch.ones(3, M, dtype=torch.long), "input of torch.int64; it takes floating-point numbers"),
        (torch.randn(3, M, device="meta"), r"input on meta but its experts are on cpu; move one with .to\(\)"),
        (torch.full((3, M), float("nan")), "3 of 3 tokens with router logits that are NaN or infinite"),
        (torch.randn(3, M).index_fill(0, torch.tensor(2), torch.inf), "1 of 3 tokens with router logits that"),
    ],
)
def test_invalid_input_is_rejected(x: Tensor, match: str) -> None:
    layer = make()
    with pytest.raises(ConfigError, match=match):
        layer(x)
    layer(torch.randn(3, M))  # a refusal breaks nothing


class Masked(fusedmoe.gates.TopK):
    """Exclude experts."""

    def __init__(self, mask_SE: Tensor) -> None:
        super().__init__(E, 1)
        self.mask_SE = mask_SE

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        return tuple(score.masked_fill(self.mask_SE, -torch.inf) for score in super().score(x_SM, *drawn))


def test_gate_mask_excluding_all_experts_is_rejected() -> None:
    mask_SE = torch.zeros(3, E, dtype=torch.bool)
    mask_SE[:, 0] = mask_SE[1] = True
    layer = MoELayer(M, Masked(mask_SE), SwiGLU(H))
    with pytest.raises(ConfigError, match=r"1 of 3 tokens with router .* mask must leave each token an expert"):
        layer(torch.randn(3, M))
    mask_SE[1, 2] = False
    assert layer(torch.randn(3, M)).isfinite().all() and not layer.load_E[0]


def test_input_on_other_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match="input on cpu but its experts are on meta"):
        make(device="meta")(torch.randn(3, M))


@pytest.mark.parametrize("name", GATES)
def test_nan_input_is_rejected_by_learned_gates(name: str) -> None:
    layer = MoELayer(M, make_gate(name, E), SwiGLU(H))
    x = torch.randn(8, M)
    layer(x)
    x[3, 2] = torch.nan
    if name in ("hash", "random"):
        assert layer(x)[:3].isfinite().all()  # logits are not checked; a NaN stays with its token
    else:
        with pytest.raises(ConfigError, match=r"[1-9]\d* of \d+ tokens with router logits that are NaN or infinite"):
            layer(x)


# Errors that need several ranks: functions of (rank, world) that must end alike on all of them.


def experts_not_divisible(rank: int, world: int) -> None:
    make(Topology.from_sizes(4), gate=fusedmoe.gates.TopK(experts=6))


def hidden_not_divisible(rank: int, world: int) -> None:
    make(Topology.from_sizes(1, 4), hidden=6)


def uneven_nodes(rank: int, world: int) -> None:
    make(Topology.from_sizes(4, ranks_per_node=3), dispatch="2dh")


def unsharded_expert(rank: int, world: int) -> None:
    make(Topology.from_sizes(2, 2), experts=Custom(lambda dim: nn.Linear(dim, dim)))


def gate_larger_on_one(rank: int, world: int) -> None:
    make(Topology.from_sizes(4), gate=fusedmoe.gates.TopK(experts=8 if rank == 3 else 4))


def dims_differ(rank: int, world: int) -> None:
    make(Topology.from_sizes(2, 2), M + 2 * (rank == 2))


def replicas_differ(rank: int, world: int) -> None:
    make(Topology.from_sizes(), M + 2 * (rank == 2))


def hidden_differs(rank: int, world: int) -> None:
    make(Topology.from_sizes(4), hidden=H + 4 * (rank == 1))


def top_k_differs(rank: int, world: int) -> None:
    make(Topology.from_sizes(2, 2, 2), gate=fusedmoe.gates.TopK(experts=E, k=1 + (rank == 1)))


def wire_differs(rank: int, world: int) -> None:
    make(Topology.from_sizes(4), hooks=[fusedmoe.hooks.WireCast(torch.float16 if rank == 1 else torch.bfloat16)])


def dtype_differs(rank: int, world: int) -> None:
    make(Topology.from_sizes(4), dtype=torch.float64 if rank == 1 else torch.float32)


def dtype_differs_later(rank: int, world: int) -> None:
    layer = make(Topology.from_sizes(2, 2))
    layer(torch.randn(3, M))
    dtype = torch.bfloat16 if rank == 3 else torch.float32
    layer.to(dtype)(torch.randn(3, M, dtype=dtype))


def nan_on_one(rank: int, world: int, ep: int, esp: int, mp: int, mp_input: MpInput) -> None:
    layer = make(Topology.from_sizes(ep, esp, mp), mp_input=mp_input)
    layer(torch.randn(5, M))
    x = torch.randn(5 if mp_input != "split" else 5 + rank, M)
    if rank == 2:
        x[0] = torch.nan
    layer(x)


def wrong_width_on_one(rank: int, world: int, ep: int, esp: int, mp: int, mp_input: MpInput) -> None:
    layer = make(Topology.from_sizes(ep, esp, mp), mp_input=mp_input)
    for step in range(2):
        layer(torch.randn(5, M + (step == 1 and rank == 1)))


def integers_on_one(rank: int, world: int, ep: int, esp: int, mp: int, mp_input: MpInput) -> None:
    layer = make(Topology.from_sizes(ep, esp, mp), mp_input=mp_input)
    layer(torch.randn(5, M))
    layer(torch.ones(5, M, dtype=torch.long if rank == 1 else torch.float32))


def other_device_on_one(rank: int, world: int, ep: int, esp: int, mp: int, mp_input: MpInput) -> None:
    layer = make(Topology.from_sizes(ep, esp, mp), mp_input=mp_input)
    layer(torch.randn(5, M))
    layer(torch.randn(5, M, device="meta" if rank == 1 else "cpu"))


def unequal_mp_tokens(rank: int, world: int, mp_input: MpInput) -> None:
    make(Topology.from_sizes(2, 2, 2), mp_input=mp_input)(torch.randn(5 + (rank == 1), M))


@pytest.mark.parametrize(
    "function, match",
    [
        (experts_not_divisible, "6 experts cannot be split over ep = 4 ranks; choose a multiple of 4"),
        *slowly(
            (hidden_not_divisible, "hidden = 6 cannot be split over esp = 4 shards; choose a multiple"),
            (uneven_nodes, r"same number of ranks .* hold \[\[0, 1, 2\], \[3\]\]. Use dispatch='direct'"),
            (unsharded_expert, "esp = 2 splits every expert, but .* takes no `shard` and `shards`"),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_impossible_parallel_layouts_are_rejected(cluster: Cluster, function: Callable[..., None], match: str) -> None:
    assert_all_ranks_raise(cluster, "ConfigError", match, function)


def rows_differ(rank: int, world: int, width: int, weights: torch.dtype | None) -> None:
    """Parameters that differ, but are not compared at construction; the next batch succeeds.

    Other libraries' integrations have such parameters.
    """
    topology = Topology.from_sizes(2, 2)
    exchange = Collectives(topology, make_all_to_all("direct", topology))
    layout = autograd.order(torch.tensor([[0, 3], [2, 1]]), E)
    weight_SK, own = torch.ones(2, 2), rank == 2
    wrong_SK = None if own and weights is None else weight_SK.to(weights if own and weights else torch.float32)
    try:
        exchange.dispatch(Routed(torch.zeros(2, width if own else M), layout, wrong_SK))
    finally:
        exchange.dispatch(Routed(torch.zeros(2, M), layout, weight_SK))


@pytest.mark.parametrize(
    "width, weights, match",
    [
        *slowly(
            (
                M + 1,
                torch.float32,
                f"rows of different widths .*: {M} on ranks .0, 1, 3., {M + 1} on rank 2",
            ),
            (
                M,
                torch.float64,
                "different dtypes of router weights .*torch.float32 on ranks .0, 1, 3., torch.float64 on rank 2",
            ),
        ),
        (M, None, "different dtypes of router weights .*float32 on ranks .0, 1, 3., None on rank 2"),
    ],
)
def test_different_row_forms_across_ranks_are_rejected(
    cluster: Cluster, width: int, weights: torch.dtype | None, match: str
) -> None:
    assert_all_ranks_raise(cluster, "RankError", match, rows_differ, width, weights)


@pytest.mark.parametrize(
    "function, match",
    [
        (gate_larger_on_one, r"gate argument experts is 4 on ranks \[0, 1, 2\] and 8 on ranks \[3\]"),
        *slowly(
            (dims_differ, r"model_dim is 6 on ranks \[0, 1, 3\] and 8 on ranks \[2\]. Build MoELayer from the same"),
            (replicas_differ, r"model_dim is 6 on ranks \[0, 1, 3\] and 8 on ranks \[2\]"),
            (hidden_differs, r"experts argument hidden is 8 on ranks \[0, 2, 3\] and 12 on ranks \[1\]"),
            (top_k_differs, r"gate argument k is 1 on ranks \[0, 2, 3\] and 2 on ranks \[1\]"),
            (
                wire_differs,
                r"hooks\[0\] argument dtype is .*bfloat16 on ranks \[0, 2, 3\] and torch.float16 on ranks \[1\]",
            ),
        ),
        (dtype_differs, r"dtype is 'torch.float32' on ranks \[0, 2, 3\] and 'torch.float64' on ranks \[1\]"),
        (dtype_differs_later, "float32 on ranks .0, 1, 2., torch.bfloat16 on rank 3"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_different_layers_across_ranks_are_rejected(
    cluster: Cluster, function: Callable[..., None], match: str
) -> None:
    assert_all_ranks_raise(cluster, "RankError", match, function)


PLACES = [(2, 2, 2, "replicated")]
MORE = slowly(*((of,) for of in ((4, 1, 1, "split"), (2, 2, 4, "partial"), (2, 2, 2, "split"), (1, 4, 1, "split"))))


@pytest.mark.parametrize("place", [*PLACES, *MORE], ids=lambda place: "-".join(map(str, place)))
def test_invalid_input_of_one_rank_raises_on_all(cluster: Cluster, place: tuple[int, int, int, MpInput]) -> None:
    # Of 5 tokens, each of 2 MP ranks routes a part; of 7 tokens, rank 2 routes all.
    mp, mp_input = place[2:]
    found = {"split": "1 of 7", "replicated": "1 of 3", "partial": "1 of 2"}[mp_input]
    culprit = "rank 2" if mp_input != "partial" else "rank 0"  # with partial sums, the NaN is in the first slice
    assert_all_ranks_raise(
        cluster, "RankError", f"{culprit}.*{found} tokens with router logits that are NaN", nan_on_one, *place
    )
    texts = assert_all_ranks_raise(
        cluster, "RankError", rf"rank 1.*input of shape \[5, {M + 1}\]", wrong_width_on_one, *place
    )
    assert all(f"must be model_dim = {M}" in text for text in texts)
    assert_all_ranks_raise(cluster, "RankError", "rank 1.*input of torch.int64", integers_on_one, *place)
    assert_all_ranks_raise(
        cluster, "RankError", "rank 1.*input on meta but its experts are on cpu", other_device_on_one, *place
    )


@pytest.mark.parametrize("mp_input", ["replicated", "partial"])
def test_unequal_mp_tokens_are_rejected(cluster: Cluster, mp_input: MpInput) -> None:
    assert_all_ranks_raise(
        cluster,
        "RankError",
        "5 tokens of 32-bit numbers on rank 0, 6 tokens of 32-bit numbers on rank 1",
        unequal_mp_tokens,
        mp_input,
    )


def count_rows_sent_before_rejection(rank: int, world: int) -> int:
    """Count the rows of tokens that left this rank before a refusal."""
    layer = make(Topology.from_sizes(2, 2, 2))
    layer(torch.randn(5, M))
    moved = []
    layer.dispatcher.all_to_all = Spy(layer.dispatcher.all_to_all, moved)
    x = torch.randn(5, M)
    x[0] = torch.nan if rank == 0 else 1.0
    with pytest.raises(RankError):
        layer(x)
    return len(moved)


class Spy(AllToAll):
    """All-to-all that records its row exchanges."""

    def __init__(self, algorithm: AllToAll, moved: list[str]) -> None:
        self._algorithm, self._moved = algorithm, moved
        self.group = algorithm.group

    def make_traffic(self, send: list[int], recv: list[int]) -> Traffic:
        return self._algorithm.make_traffic(send, recv)

    def exchange(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        self._moved.append(operation)
        return self._algorithm.exchange(rows, traffic, operation)

    def exchange_back(self, rows: Tensor, traffic: Traffic, operation: str) -> Tensor:
        self._moved.append(operation)
        return self._algorithm.exchange_back(rows, traffic, operation)


def test_nothing_is_sent_before_rejection(cluster: Cluster) -> None:
    assert cluster.run(4, count_rows_sent_before_rejection) == [0, 0, 0, 0]
