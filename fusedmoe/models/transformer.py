"""The transformer over bytes: embedding, blocks, head and loss, the sequences split over the MP group throughout.

A block is attention, then experts (or a dense feed-forward), each behind a norm. What a config says in words becomes
parts, and a workload for the choice of a schedule; several blocks become one pipeline of micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fusedmoe import Along, MoELayer, Parts, PipelinedBlocks, Placements, Topology, pipeline
from fusedmoe.errors import ConfigError
from fusedmoe.experts import FeedForward
from fusedmoe.experts.networks import require_own_experts
from fusedmoe.gates import GATES, Gate, Hash, SoftMoE
from fusedmoe.hooks import Hooks
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.tensor_parallel import Attention, DenseFeedForward, TokenSplit, fill_parameters, normal_parameter
from fusedmoe.orders import ORDERS, Order, Sparse
from fusedmoe.runtime.recorder import Recorder, recorded
from fusedmoe.schedule import Workload, uniform_share

# Target of a position that does not count, cross_entropy's own.
IGNORE = -100
# Arguments of gates that a model has settings of its own for.
_OF_THE_MODEL = ("experts", "k", "capacity_factor")


def make_gate(config: ModelConfig) -> Gate:
    """Makes the gate named in the config."""
    if config.gate not in GATES:
        raise ConfigError(f"gate = {config.gate!r} is not one of {', '.join(GATES)}")
    if config.experts is None:
        raise ConfigError("the number of experts is not settled: give `experts`, or call with_experts(ranks)")
    kind = GATES[config.gate]
    known = inspect.signature(kind).parameters
    # Some gates fix k, and some have no capacity: such settings of a model are not theirs.
    arguments = {name: getattr(config, name) for name in _OF_THE_MODEL if name in known}
    for name in config.gate_options:
        if name in _OF_THE_MODEL:
            raise ConfigError(f"gate option {name!r} is a setting of the model: give it as such")
        if name not in known:
            options = ", ".join(option for option in known if option not in _OF_THE_MODEL)
            raise ConfigError(f"gate {config.gate} has no option {name!r}; it has {options}")
    try:
        return kind(**arguments, **config.gate_options)
    except TypeError as error:
        if not config.gate_options:
            raise
        given = ", ".join(f"{name}={value!r}" for name, value in config.gate_options.items())
        raise ConfigError(f"gate {config.gate} does not take the options {given}: {error}") from error


def make_experts(config: ModelConfig, hidden: int | None = None) -> FeedForward:
    """Makes the experts of one layer, or one of another hidden dim."""
    return FeedForward(hidden or config.hidden, config.nonlinearity, config.bias)


def make_order(config: ModelConfig) -> Order | None:
    """Makes the order named in the config; None leaves it to the layer."""
    if config.order is None:
        return None
    if config.order not in ORDERS:
        raise ConfigError(f"order = {config.order!r} is not one of {', '.join(ORDERS)}")
    return ORDERS[config.order]()


class Block(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)), on this MP rank's slice of each sequence."""

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        layer: int,
        *,
        dispatch: str = "direct",
        hooks: Sequence[Hooks] = (),
        placement: Placements = "ep",
        **make: Any,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, **make)
        # Blocks without experts go with the next one that has them.
        number = layer // config.moe_every
        self.attention = Attention(config, topology, number, **make)
        self.experts_norm = make_norm(config, **make)
        self.experts: MoELayer | DenseFeedForward
        # With `moe_every` = n, the last of every n blocks.
        if (layer + 1) % config.moe_every == 0:
            self.experts = MoELayer(
                config.model_dim,
                make_gate(config),
                make_experts(config),
                order=make_order(config),
                topology=topology,
                dispatch=dispatch,
                hooks=hooks,
                shared=make_experts(config, config.shared_hidden) if config.shared_hidden else None,
                mp_input="split",
                placement=placement,
                **make,
            )
            self.experts.number = number
        else:
            self.experts = DenseFeedForward(config, topology, **make)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> tuple[Tensor, Tensor]:
        """Maps samples, [B, P, M] -> [B, P, M], of which this rank has P positions each; also returns this rank's share
        of their auxiliary loss (a scalar)."""
        x_BPM = x_BPM + self.attention(self.attention_norm(x_BPM), split)
        if isinstance(self.experts, DenseFeedForward):
            return x_BPM + self.experts(self.experts_norm(x_BPM), split), x_BPM.new_zeros(())
        # A layer's auxiliary loss is that of its last forward.
        return x_BPM + self.experts(self.experts_norm(x_BPM)), self.experts.aux_loss


def make_norm(config: ModelConfig, **make: Any) -> nn.Module:
    return (nn.LayerNorm if config.norm == "layer" else nn.RMSNorm)(config.model_dim, **make)


class BeforeExperts(nn.Module):
    """Blocks without experts, if any, and the attention of the one with experts."""

    # Set before each batch: the pipeline passes rows alone.
    split: TokenSplit

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        *dense, last = blocks
        self.before = nn.ModuleList(dense)
        self.attention_norm, self.attention, self.experts_norm = last.attention_norm, last.attention, last.experts_norm

    def forward(self, x_BPM: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.before:
            x_BPM, _ = block(x_BPM, self.split)
        y_BPM = x_BPM + self.attention(self.attention_norm(x_BPM), self.split)
        return y_BPM, self.experts_norm(y_BPM)


class BeforeExpertsInPositions(BeforeExperts):
    """`BeforeExperts` for some positions of all samples, on one MP rank; keys and values go on to later positions."""

    def forward(  # type: ignore[override]
        self, x_BPM: Tensor, past: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        own: list[Tensor] = []

        def attend(norm: nn.Module, attention: Attention) -> Tensor:
            at = len(own)
            y_BPM, found = attention.continued(norm(x_BPM), [(of[at], of[at + 1]) for of in past])
            own.extend(found)
            return x_BPM + y_BPM

        # The micro-batch's own positions are all that this rank, the only one, has to feed forward.
        positions = x_BPM.shape[1]
        part = TokenSplit(positions, (positions,), 0, positions)
        for block in self.before:
            assert isinstance(block, Block) and isinstance(block.experts, DenseFeedForward)
            x_BPM = attend(block.attention_norm, block.attention)
            x_BPM = x_BPM + block.experts(block.experts_norm(x_BPM), part)
        x_BPM = attend(self.attention_norm, self.attention)
        return x_BPM, self.experts_norm(x_BPM), tuple(own)


class BlockPipeline:
    """Blocks up to the last one with experts, as one pipeline; the parameters stay the blocks' own.

    Attributes:
        pipelined: the blocks with experts.   rest: the blocks after the last of them.
    """

    def __init__(self, blocks: Sequence[Block], recompute: bool, along: Along) -> None:
        # Blocks that follow each other, of which only the last has experts.
        groups, group = list[list[Block]](), list[Block]()
        for block in blocks:
            group.append(block)
            if isinstance(block.experts, MoELayer):
                groups.append(group)
                group = []
        if not groups:
            raise ConfigError("micro-batches: the model has no experts, so there is nothing to overlap")
        attention = groups[0][-1].attention
        if along == "positions" and (attention.config.objective != "causal" or attention.topology.mp.size > 1):
            raise ConfigError("micro-batches along positions: only causal models with whole sequences on a rank (mp=1)")
        kind = BeforeExperts if along == "samples" else BeforeExpertsInPositions
        self._parts = [kind(blocks) for blocks in groups]
        experts: list[Any] = [blocks[-1].experts for blocks in groups]
        parts = [Parts(dense, layer) for dense, layer in zip(self._parts, experts, strict=True)]
        self.pipelined: PipelinedBlocks = pipeline(parts, along=along, recompute=recompute)
        self.rest = group

    def __call__(self, x_BPM: Tensor, split: TokenSplit) -> tuple[Tensor, Tensor]:
        """Returns the last block's output, and this rank's share of all auxiliary losses."""
        for part in self._parts:
            part.split = split
        y_BPM = self.pipelined(x_BPM)
        aux = x_BPM.new_zeros(())
        for layer in self.pipelined.experts:
            assert isinstance(layer, MoELayer)
            aux = aux + layer.aux_loss
        return y_BPM, aux


@dataclass(frozen=True)
class Loss:
    """This rank's part of the loss of its replica's batch: the parts of the ranks of an MP group add up to it."""

    # Scalar, this rank's tokens' cross-entropy over the number of targets of the whole batch.
    nats: Tensor
    # Scalar, the gates' auxiliary losses of this rank's tokens, summed over the layers.
    aux: Tensor
    # Of the whole batch.
    targets: int


class Transformer(nn.Module):
    """A causal (GPT, LLaMA, Mixtral) or masked (BERT) transformer with mixture-of-experts layers.

    Every rank of an MP group passes the same batch; each embeds, normalises, routes and judges its own slice of
    every sequence (`TokenSplit`), attention and dense feed-forwards bring them together. The ranks of a DP group pass
    different batches.

    Args:
        config: `config.experts` must be settled (`with_experts`).
        dispatch, hooks, placement: of every `MoELayer`.
        recompute: keep only the blocks' inputs for the backward pass and compute the rest again there.
    """

    position_weight: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology | None = None,
        *,
        dispatch: str = "direct",
        hooks: Sequence[Hooks] = (),
        recompute: bool = False,
        placement: Placements = "ep",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(dtype, torch.dtype | None):
            raise ConfigError(f"Transformer: dtype = {dtype!r}; give a dtype of PyTorch, say torch.bfloat16")
        self.config = config
        self.topology = Topology() if topology is None else topology
        self.recompute = recompute
        self.recorder: Recorder | None = None
        self._micro: BlockPipeline | None = None
        dim = config.model_dim
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        # Embeddings and head as in GPT-2.
        self.symbol_weight = normal_parameter(config.vocabulary, dim, std=0.02, **make)
        learned = config.positions == "learned"
        self.register_parameter(
            "position_weight", normal_parameter(config.seq_len, dim, std=0.02, **make) if learned else None
        )
        self.blocks = nn.ModuleList(
            Block(config, self.topology, layer, dispatch=dispatch, hooks=hooks, placement=placement, **make)
            for layer in range(config.layers)
        )
        self.norm = make_norm(config, **make)
        self.head_weight = normal_parameter(config.vocabulary, dim, std=0.02, **make)
        self.register_load_state_dict_pre_hook(require_own_experts)

    def reset_parameters(self) -> None:
        """Draw embeddings and head anew, as after `to_empty`; a construction draws the head after the blocks."""
        fill_parameters(self, dict.fromkeys(("symbol_weight", "position_weight", "head_weight"), 0.02))

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Loss:
        """Returns the loss of a batch; collective over all ranks.

        Args:
            tokens_BL, targets_BL: [B, L] int64, the same on every rank of the MP group; `IGNORE` asks for nothing.
        """
        if tokens_BL.shape != targets_BL.shape:
            raise ConfigError(f"tokens are {list(tokens_BL.shape)}, targets {list(targets_BL.shape)}: they must agree")
        y_BPM, aux, split = self._hidden(tokens_BL)
        targets_S = targets_BL[:, split.start : split.stop].flatten()
        targets = int((targets_BL != IGNORE).sum())

        def judge(y_BPM: Tensor) -> Tensor:
            logits_SV = F.linear(self.norm(y_BPM), self.head_weight).flatten(0, 1)
            # At least float32: under autocast the head's product is bfloat16.
            logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
            nats = F.cross_entropy(logits_SV, targets_S, ignore_index=IGNORE, reduction="sum")
            return nats / max(1, targets)

        return Loss(recorded(self.recorder, judge, y_BPM, kind="loss"), aux, targets)

    def logits(self, tokens_BL: Tensor) -> Tensor:
        """Returns the logits of this rank's P positions of each sequence, [B, P, vocabulary]; collective."""
        y_BPM, _, _ = self._hidden(tokens_BL)
        return F.linear(self.norm(y_BPM), self.head_weight)

    def moe_layers(self) -> Iterator[MoELayer]:
        """Yields the layers with experts, from the first block to the last."""
        return (block.experts for block in self.blocks if isinstance(block.experts, MoELayer))

    def in_micro_batches(self, along: Along = "samples") -> PipelinedBlocks:
        """Has the blocks run in micro-batches from now on, by the plans of the blocks that it returns. Collective.

        Args:
            along: "positions": of each sequence, so that one sample is enough; of causal models with mp = 1.
        """
        self._micro = BlockPipeline(list(self.blocks), self.recompute, along)  # type: ignore[arg-type]
        return self._micro.pipelined

    def update_gates(self) -> None:
        """Updates gates that learn outside the gradient: call it after each optimizer step."""
        for layer in self.moe_layers():
            layer.update_gate()

    def record(self, recorder: Recorder | None) -> None:
        """Has `recorder` take spans of all that the model does from now on; None ends it."""
        self.recorder = recorder
        modules: Iterable[nn.Module] = self.modules()
        if self._micro is not None:
            self._micro.pipelined.recorder = recorder
            # Tasks of a plan are spans, with all in them: modules inside would count twice.
            if recorder is not None and self._micro.pipelined.plans is not None:
                modules = (module for block in self._micro.rest for module in block.modules())
        for module in modules:
            if isinstance(module, (Attention, DenseFeedForward, MoELayer)):
                module.recorder = recorder

    def _hidden(self, tokens_BL: Tensor) -> tuple[Tensor, Tensor, TokenSplit]:
        """Returns the last block's output for this rank's positions, [B, P, M], its share of the auxiliary loss, and
        the split."""
        length = tokens_BL.shape[1]
        split = TokenSplit.from_length(length, self.topology)
        tokens_BP = tokens_BL[:, split.start : split.stop]
        x_BPM = F.embedding(tokens_BP, self.symbol_weight)
        if self.position_weight is not None:
            if length > self.config.seq_len:
                raise ConfigError(f"sequences of {length} tokens, but the model learns {self.config.seq_len} positions")
            x_BPM = x_BPM + self.position_weight[split.start : split.stop]
        for layer in self.moe_layers():
            # Hash layers route by what a token is, not by where it came to.
            if isinstance(layer.gate, Hash):
                layer.gate.token_ids = tokens_BP
        aux, blocks = x_BPM.new_zeros(()), list(self.blocks)
        if self._micro is not None:
            x_BPM, aux = self._micro(x_BPM, split)
            blocks = list(self._micro.rest)
        for block in blocks:
            if self.recompute and torch.is_grad_enabled():
                # To the end of the block: where recomputation stops must not differ between ranks, it communicates.
                with set_checkpoint_early_stop(False):
                    x_BPM, own = checkpoint(block, x_BPM, split, use_reentrant=False)
            else:
                x_BPM, own = block(x_BPM, split)
            aux = aux + own
        return x_BPM, aux, split


def block_workload(config: ModelConfig, ep: int, esp: int, mp: int, itemsize: int) -> Workload:
    """Returns the attention and the experts of one block, as one rank sees them.

    The tokens are those of the ranks that share an expert's shards: each has 1/mp of its replica's batch. Blocks
    without experts (`moe_every`) are not in it.

    Args:
        ep, esp, mp: ranks along these axes.
        itemsize: bytes of an element that travels.
    """
    assert config.experts is not None
    batch = max(1, config.batch * esp // mp)
    tokens = max(1, batch * config.seq_len // esp)
    # Of the gate and the order as they are made: some take one expert a token, or no capacity, whatever is asked for.
    gate, order = make_gate(config), make_order(config) or Sparse()
    rows = order.rows_per_token(gate, tokens)
    # Rows that are made of tokens, and no copies of them, travel each by itself.
    copies = order.copies and not isinstance(gate, SoftMoE)
    return Workload(
        batch=batch,
        seq_len=config.seq_len,
        model_dim=config.model_dim,
        hidden=config.hidden,
        experts=config.experts,
        k=1,
        capacity_factor=rows,
        expert="swiglu" if ACTIVATIONS[config.nonlinearity].gated else "ffn",
        ep=ep,
        esp=esp,
        itemsize=itemsize,
        share=uniform_share(config.experts, gate.k, ep) if copies else 1.0,
    )
