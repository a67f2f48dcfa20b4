"""The transformer over bytes: embedding, blocks, head and loss, the sequences split over the MP group throughout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fusedmoe import Along, MoELayer, PipelinedBlocks, Placements, Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts import require_own_experts
from fusedmoe.gates import Hash
from fusedmoe.hooks import Hooks
from fusedmoe.measuring import Recorder, recorded
from fusedmoe.models.block import Block, BlockPipeline, make_norm
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.tensor_parallel import Attention, DenseFeedForward, TokenSplit, normal_parameter

#: Target of a position that does not count.
IGNORE = -100  # cross_entropy's own


@dataclass(frozen=True)
class Loss:
    """This rank's part of the loss of its replica's batch: the parts of the ranks of an MP group add up to it.

    Attributes:
        nats: scalar, this rank's tokens' cross-entropy over the number of targets of the *whole* batch: the sum over
            the MP group is the mean over the batch.
        aux: scalar, the same for the gates' auxiliary losses, summed over the layers.
        targets: how many targets the whole batch has.
    """

    nats: Tensor
    aux: Tensor
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
    Raises:
        ConfigError: a dimension does not split over the topology, or experts are not settled.
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
        self.config = config
        self.topology = Topology() if topology is None else topology
        self.recompute = recompute
        self.recorder: Recorder | None = None
        self._micro: BlockPipeline | None = None
        dim = config.model_dim
        make: dict[str, Any] = {"device": device, "dtype": dtype}
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

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Loss:
        """The loss of a batch; collective over all ranks.

        Args:
            tokens_BL, targets_BL: [B, L] int64, the same on every rank of the MP group; `IGNORE` asks for nothing.
        Raises:
            ConfigError: sequences longer than learned positions, or tensors of different shapes.
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
        """The logits of this rank's P positions of each sequence, [B, P, vocabulary]; collective over all ranks."""
        y_BPM, _, _ = self._hidden(tokens_BL)
        return F.linear(self.norm(y_BPM), self.head_weight)

    def moe_layers(self) -> Iterator[MoELayer]:
        """The layers with experts, from the first block to the last."""
        for block in self.blocks:
            if isinstance(block.experts, MoELayer):
                yield block.experts

    def in_micro_batches(self, along: Along = "samples") -> PipelinedBlocks:
        """Has the blocks run in micro-batches from now on, by the plans of the blocks that it returns. Collective.

        Args:
            along: "positions": of each sequence, so that one sample is enough; of causal models with mp = 1.
        Raises:
            ConfigError: a model whose blocks cannot be split (so) (`fusedmoe.pipeline`).
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
            if recorder is not None and self._micro.pipelined.plans is not None:  # tasks are spans, with all in them
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
            if isinstance(layer.gate, Hash):  # hash layers route by what a token is, not by where it came to
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
