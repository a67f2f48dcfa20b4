"""Hugging Face transformers' mixture-of-experts models with this library's kernels and token dispatch.

    import fusedmoe.hf

    model = AutoModelForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1", experts_implementation="fusedmoe")

The import registers "fusedmoe" in transformers' registries of expert implementations and of expert parallelism
(`DistributedConfig(ep_size=…, ep_implementation="fusedmoe")`), as well as "fusedmoe-auto" and the names of other
schedules, which overlap communication with computation. `apply(model)` selects the implementation for an existing
model. Parameters are unchanged: checkpoints, LoRA, optimizers and `Trainer` work as before.
"""

from __future__ import annotations

from fusedmoe.compat import require_version

require_version("transformers", "5.23", "6", "fusedmoe.hf")

from functools import partial

from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.integrations.moe import ExpertsInterface

from fusedmoe.compat.peft import call_after_injection, replace_activation
from fusedmoe.hf.callbacks import MetricsCallback, PlanTuningCallback
from fusedmoe.hf.decoder_blocks import pipeline
from fusedmoe.hf.expert_parallel import ExpertParallel
from fusedmoe.hf.module_experts import NAME, experts_forward, is_fused
from fusedmoe.hf.padding import mask_padding
from fusedmoe.hf.peft_adapters import factor_activation
from fusedmoe.hf.set_experts import apply
from fusedmoe.kernels.derivatives import count_flops
from fusedmoe.schedule.policies import layer_policies

__all__ = ["MetricsCallback", "PlanTuningCallback", "apply", "mask_padding", "pipeline"]

count_flops()
replace_activation(partial(factor_activation, is_fused=is_fused))
call_after_injection(ExpertParallel.check_adapters_again)
ExpertsInterface.register(NAME, experts_forward)
EPImplementationInterface.register(NAME, ExpertParallel)
for _name in ("auto", *layer_policies()):
    EPImplementationInterface.register(
        f"{NAME}-{_name}", type("ExpertParallel", (ExpertParallel,), {"schedule": _name, "__module__": __name__})
    )
