"""Mixture-of-experts models of Hugging Face transformers with this library's kernels and exchange of tokens.

    import fusedmoe.hf

    model = AutoModelForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1", experts_implementation="fusedmoe")

Importing it registers the name "fusedmoe" in both of transformers' registries: of experts, and of how tokens reach
experts on other ranks (`DistributedConfig(ep_size=…, ep_implementation="fusedmoe")`). `apply(model)` sets it for a
model that there is already, and says what stands in its way. Nothing of transformers is replaced, and parameters stay
as they are: checkpoints, LoRA, optimizers and `Trainer` see no difference. `Trainer(…, callbacks=[MetricsCallback()])`
logs what the routing is like.

With experts over ranks `apply(model, schedule="auto")`, or `ep_implementation="fusedmoe-auto"`, has what travels
overlap what is computed; `Trainer(…, callbacks=[PlanTuningCallback()])` measures plans while a model trains.

A forward of a model's experts: `experts_forward` (`module_experts.py`) looks at the numbers, sorts tokens by expert and
calls `compute`; with expert parallelism `ExpertParallel` (`expert_parallel.py`) sends the tokens in between.
"""

from __future__ import annotations

from fusedmoe.versions import refused

if (error := refused("transformers", "5.23", "6", "fusedmoe.hf")) is not None:
    raise error

from functools import partial

from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.integrations.moe import ExpertsInterface

from fusedmoe.compat.peft import call_after_injection, replace_activation
from fusedmoe.hf.callbacks import MetricsCallback, PlanTuningCallback
from fusedmoe.hf.decoder_blocks import pipeline
from fusedmoe.hf.expert_parallel import ExpertParallel
from fusedmoe.hf.module_experts import NAME, computes, experts_forward
from fusedmoe.hf.padding import mask_padding
from fusedmoe.hf.peft_adapters import activation
from fusedmoe.hf.set_experts import apply
from fusedmoe.kernels.derivatives import count_flops
from fusedmoe.schedule.policies import layer_policies

__all__ = [
    "NAME",
    "MetricsCallback",
    "PlanTuningCallback",
    "apply",
    "experts_forward",
    "mask_padding",
    "pipeline",
]

count_flops()
replace_activation(partial(activation, computes=computes))
call_after_injection(ExpertParallel.check_adapters_again)
ExpertsInterface.register(NAME, experts_forward)
EPImplementationInterface.register(NAME, ExpertParallel)
for _name in ("auto", *layer_policies()):
    EPImplementationInterface.register(
        f"{NAME}-{_name}", type("ExpertParallel", (ExpertParallel,), {"schedule": _name, "__module__": __name__})
    )
