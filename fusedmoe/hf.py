"""Mixture-of-experts models of Hugging Face transformers with this library's kernels and exchange of rows.

    import fusedmoe.hf

    model = AutoModelForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1", experts_implementation="fusedmoe")

Importing it registers the name "fusedmoe" in both of transformers' registries: of experts, and of how rows reach
experts on other ranks (`DistributedConfig(ep_size=…, ep_implementation="fusedmoe")`). `apply(model)` sets it for a
model that there is already, and says what stands in its way. Nothing of transformers is replaced, and parameters stay
as they are: checkpoints, LoRA, optimizers and `Trainer` see no difference. `Trainer(…, callbacks=[MetricsCallback()])`
logs what the routing is like.
"""

from __future__ import annotations

from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.integrations.moe import ExpertsInterface

from fusedmoe.integrations.hf import NAME, ExpertParallel, apply, experts_forward
from fusedmoe.integrations.hf_metrics import MetricsCallback

__all__ = ["NAME", "ExpertParallel", "MetricsCallback", "apply", "experts_forward"]

ExpertsInterface.register(NAME, experts_forward)
EPImplementationInterface.register(NAME, ExpertParallel)
