"""Settings of ranks, links and sizes, in each of which communication takes about as long as computation."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Setting:
    """Ranks on two nodes, and the layers that they run.

    Each of E experts gets S/E rows of every rank (S rows of M elements leave each rank); experts are split over the
    nodes (EP = 2), and each one over the ranks of a node (ESP). `hidden` is H of a whole expert.

    Attributes:
        inter_mbit: rate of the inter-node link; None: calibrated before the nodes are created (`balance`).
        bucket_kb: bucket size of the inter-node link (`network`).
        emulated_flops: FLOP/s of an accelerator emulated by timed waits; None: real computation, one thread per rank.
        gradient_bytes: of a layer's dense part; with real computation at least those of dimension M.
        sequence: tokens per sample, if attention is computed.
        blocks: layers are blocks in micro-batches, for schedules of whole models (`blocks.py`).
        placed: experts are not split, and placed under a skewed router (`placed.py`).
        captured: a plain PyTorch model with captured graphs (`captured.py`).
        alone: a single layer, at the rate at which its rows take as long as its computation.
        computation_s: of a step, measured during calibration.
        k: experts per token.
        pairs: compares one row per token and rank with one row per pair (`tokens.py`).
        door: small model of another framework: "hf", "titan" or "megatron" (`doors.py`).
        heads: attention heads of dimension 64 in a Qwen3-like model; None: four heads over M, as in Mixtral.
    """

    name: str
    ranks_per_node: int
    inter_mbit: int | None
    intra_mbit: int
    bucket_kb: int
    layers: int
    S: int
    M: int
    H: int
    E: int
    emulated_flops: float | None = None
    gradient_bytes: int = 0
    sequence: int = 256
    blocks: bool = False
    placed: bool = False
    captured: bool = False
    alone: bool = False
    computation_s: float | None = None
    k: int = 2
    pairs: bool = False
    door: str | None = None
    heads: int | None = None

    @property
    def file(self) -> str:
        if self.captured:
            return "captured.json"
        if self.pairs:
            return "tokens.json"
        if self.door is not None:
            return "doors.json"
        return "placement.json" if self.placed else "blocks.json" if self.blocks else "cluster.json"

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the parts to measure, most important first (`bench.cluster.rank`)."""
        if self.placed:
            return ("placement", "routers")
        if self.captured:
            return ("captured",)
        if self.pairs:
            return ("tokens",)
        if self.door is not None:
            return ("doors", "tuning")
        if self.alone:
            return ("layer", "shared")
        real = ("job", "price") if self.emulated_flops is None and not self.blocks else ()
        if self.emulated_flops is not None:
            real = ("model",) if self.blocks else ("layer", "model")
        return (*real, "steps", "buckets" if self.blocks else "sweep")

    @property
    def unit(self) -> int:
        """Return the granularity of chunks in rows per expert: whole samples, if samples are split."""
        return self.sequence // self.E if self.blocks and self.emulated_flops is None else 1

    @property
    def ranks(self) -> int:
        return 2 * self.ranks_per_node

    @property
    def row_bytes(self) -> int:
        """Return the bytes of all rows that leave a rank in one all-to-all."""
        return 4 * self.S * self.M

    @property
    def esp(self) -> int:
        return 1 if self.placed else self.ranks_per_node

    @property
    def ep(self) -> int:
        return self.ranks // self.esp

    @property
    def expert_flop(self) -> float:
        """Return the forward FLOP of one layer's experts on one rank: two products of R = S·ESP rows."""
        return 2 * 2 * self.S * self.esp * self.M * self.H / self.esp

    @property
    def attention_flop(self) -> float:
        """Return the forward FLOP of one layer's attention on one rank: the projections."""
        return 2 * 4 * self.S * self.M**2 / self.esp


#: Two ranks, one per node, with real computation on one thread each. Wide experts and narrow rows allow a slow link,
#: which uses little processor time. The dense gradient has as many bytes as all rows, as in a model of M = 2048 whose
#: attention has four M×M matrices and whose ranks send 8192 rows. With this number of layers, the first layer's
#: gradient, which cannot be hidden, is a small fraction.
COMPUTED = Setting("computed", 1, None, 400, 64, layers=4, S=8192, M=96, H=10752, E=4, gradient_bytes=4 * 8192 * 96)

#: A single such layer, at the link rate at which its all-to-alls take as long as its computation.
LAYER = replace(COMPUTED, name="layer", layers=1, gradient_bytes=0, alone=True)

#: The same ranks with a plain PyTorch model, whose one-hot products are quadratic in the tokens.
CAPTURED = replace(COMPUTED, name="captured", bucket_kb=16, S=2048, gradient_bytes=0, captured=True)

#: Two ranks per node. Two cores cannot compute for four ranks: computation is a timed wait, communication is real.
EMULATED = Setting(
    "emulated", 2, 100, 400, 16, layers=3, S=1024, M=256, H=4096, E=4, emulated_flops=4e10, gradient_bytes=256 * 1024
)

#: Four ranks per node. A rank's share of the inter-node link is the same; each gathers twice as much.
EMULATED_8 = replace(EMULATED, name="emulated-8", ranks_per_node=4, inter_mbit=200, intra_mbit=1600)

#: Four ranks with wider rows and narrower experts, so that attention computes half as much as the experts; gradients
#: take a quarter of the all-to-alls' time.
BLOCKS = Setting(
    "blocks",
    2,
    100,
    400,
    16,
    layers=4,
    S=192,
    M=1024,
    H=2048,
    E=4,
    emulated_flops=2.1e10,
    gradient_bytes=448 * 1024,
    blocks=True,
)

#: Two ranks with real computation and short samples, so that micro-batches have about equal sizes.
BLOCKS_COMPUTED = Setting(
    "blocks-computed", 1, None, 400, 64, layers=4, S=3072, M=96, H=10752, E=4, sequence=64, blocks=True
)

#: Two ranks per node, experts on all four. At even loads, experts take about as long as attention.
PLACED = Setting("placement", 2, 100, 400, 16, layers=4, S=1024, M=256, H=64, E=16, emulated_flops=1e9, placed=True)

#: One layer on two ranks per node, whose pairs occupy the inter-node link for as long as computation takes, and twice
#: as long; with eight, four and two experts per token, sent once per node. And on two ranks with real computation, with
#: that ratio, or with a link as fast as memory.
_TOKENS = replace(EMULATED, layers=1, S=4096, gradient_bytes=0, pairs=True)
_FAST = replace(LAYER, alone=False, pairs=True)
_CHOICES = ((16, 8), (16, 4), (8, 2))
TOKENS = (
    *(
        replace(_TOKENS, name=f"tokens-{k}" + ("-slow" if inter_mbit < 100 else ""), E=E, k=k, inter_mbit=inter_mbit)
        for E, k in _CHOICES
        for inter_mbit in (100, 50)
    ),
    *(replace(LAYER, name=f"tokens-{k}-computed", E=E, k=k, pairs=True) for E, k in _CHOICES),
    *(
        replace(_FAST, name=f"tokens-{k}-fast", E=E, k=k, S=8192 * k, M=512, H=64, inter_mbit=40_000, bucket_kb=65_536)
        for E, k in _CHOICES
    ),
)

#: Small models of other frameworks, with as many products as `COMPUTED`, in SwiGLU's three matrices.
DOORS = tuple(
    replace(COMPUTED, name=f"door-{door}", H=7168, gradient_bytes=0, door=door) for door in ("hf", "titan", "megatron")
)

#: Qwen3's proportions (30B-A3B at 4096 positions): attention takes longer than the experts, which take 0.47 of the
#: computation.
DOORS += (replace(DOORS[0], name="door-hf-qwen3", H=2048, heads=24),)

_ALL = (COMPUTED, LAYER, CAPTURED, EMULATED, EMULATED_8, BLOCKS, BLOCKS_COMPUTED, PLACED, *TOKENS, *DOORS)
SETTINGS = {setting.name: setting for setting in _ALL}

#: Maximum number of chunks per pass: smaller messages would pass the links' buckets without delay.
LIMIT = 8
