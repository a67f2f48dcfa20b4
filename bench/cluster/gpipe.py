"""GPipe baseline: the training job's model in stages, with PyTorch's `ScheduleGPipe`.

A stage contains some of the blocks, the first also the embedding and the last the head; ranks of a stage share its
experts. All micro-batches run forward, then all backward; only other micro-batches overlap with communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from fusedmoe.cli.data import Batches, Corpus
from fusedmoe.cli.job import make_model, make_optimizer
from fusedmoe.cli.settings import Settings
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.models.tensor_parallel import TokenSplit
from fusedmoe.models.transformer import Transformer


class Stage(nn.Module):
    """Blocks `number`·L/count to (`number` + 1)·L/count of a model, with its topology if experts are parallel.

    The gates' auxiliary losses are accumulated in a tensor [1] that is sent along with the activations.
    """

    def __init__(self, model: Transformer, number: int, count: int) -> None:
        super().__init__()
        start, stop = (model.config.layers * end // count for end in (number, number + 1))
        self.topology, self.config, self._first, self._last = (
            model.topology,
            model.config,
            start == 0,
            number + 1 == count,
        )
        self.blocks = model.blocks[start:stop]
        if self._first:
            self.symbol_weight, self.position_weight = model.symbol_weight, model.position_weight
        if self._last:
            self.norm, self.head_weight = model.norm, model.head_weight

    def forward(self, x: Tensor, aux_1: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map tokens [b, L] (first stage) or activations [b, L, M] to activations, or logits in the last stage."""
        if self._first:
            length = x.shape[1]
            x = F.embedding(x, self.symbol_weight)
            if self.position_weight is not None:
                x = x + self.position_weight[:length]
        aux_1 = x.new_zeros(1) if aux_1 is None else aux_1
        split = TokenSplit.from_length(x.shape[1], self.topology)
        for block in self.blocks:
            x, own = block(x, split)
            aux_1 = aux_1 + own
        return (F.linear(self.norm(x), self.head_weight) if self._last else x), aux_1

    def examples(self, samples: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return example inputs and outputs without data, which a run could only infer by communicating."""
        shape, config = (samples, self.config.seq_len), self.config
        like = self.blocks[0].attention_norm.weight

        def floats(*width: int) -> tuple[Tensor, Tensor]:
            hidden, aux_1 = (like.new_empty(size, device="meta") for size in ((*shape, *width), (1,)))
            return hidden.requires_grad_(), aux_1.requires_grad_()

        came = (torch.empty(shape, dtype=torch.int64, device="meta"),) if self._first else floats(config.model_dim)
        return came, floats(config.vocabulary if self._last else config.model_dim)


def schedule_of(
    stage: Stage,
    number: int,
    count: int,
    samples: int,
    micro_batches: int,
    aux_weight: float,
    group: ProcessGroup | None,
) -> ScheduleGPipe:
    """Return the schedule for batches of `samples` samples; the loss is the mean over all targets."""
    came, goes = stage.examples(samples // micro_batches)
    made = PipelineStage(stage, number, count, torch.device("cpu"), input_args=came, output_args=goes, group=group)

    def loss(found: Sequence[Tensor], targets_bL: Tensor) -> Tensor:
        logits_bLV, aux_1 = found
        return F.cross_entropy(logits_bLV.flatten(0, 1), targets_bL.flatten()) + aux_weight * aux_1.sum()

    return ScheduleGPipe(made, micro_batches, loss_fn=loss)


def run(schedule: ScheduleGPipe, tokens_BL: Tensor, targets_BL: Tensor, *, first: bool, last: bool) -> float | None:
    """Run both passes of a batch, leaving gradients. Return the loss in the last stage. Collective over all stages."""
    losses: list[Tensor] = []
    schedule.step(*((tokens_BL,) if first else ()), **({"target": targets_BL, "losses": losses} if last else {}))
    return float(torch.stack(losses).detach().mean()) if last else None


def make_step(
    settings: Settings, topology: Topology, corpus: Corpus, micro_batches: int
) -> Callable[[int], float | None]:
    """Return a function that trains a step with GPipe, as `Trainer.step`, and returns the loss in the last stage.
    Collective.

    Each rank is a stage; a batch has as many samples as that of all ranks as replicas.
    """
    model, rank, ranks = settings.model, topology.rank, topology.size
    stage = Stage(make_model(settings, model, Topology(), torch.device("cpu")), rank, ranks)
    optimizer = make_optimizer(stage, settings)  # type: ignore[arg-type]
    samples = model.batch * ranks
    schedule = schedule_of(stage, rank, ranks, samples, micro_batches, settings.aux_weight, None)
    batches = Batches(corpus.train, model.batch, model.seq_len, mask=None)

    def step(number: int) -> float | None:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(number)
        every = [batches.training_batch(settings.seed, number, replica) for replica in range(ranks)]
        tokens_BL = torch.cat([batch.tokens_BL for batch in every])
        targets_BL = torch.cat([batch.targets_BL for batch in every])
        loss = run(schedule, tokens_BL, targets_BL, first=rank == 0, last=rank + 1 == ranks)
        gradients = [p.grad for p in stage.parameters() if p.grad is not None]
        square = sum((gradient.double().square().sum() for gradient in gradients), torch.zeros((), dtype=torch.float64))
        norm = float(all_reduce(topology.world, square).sqrt())
        if not math.isfinite(norm):
            raise RuntimeError(f"rank {rank}: the gradient of step {number} is not finite")
        torch._foreach_mul_(gradients, min(1.0, settings.clip / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step
