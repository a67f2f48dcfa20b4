"""Suites: test files of other projects, their source, and how this library is enabled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HF = "bench.peer_suites.hf_switch"


@dataclass(frozen=True)
class Suite:
    """Selected tests of another project.

    Attributes:
        name: in the table and on the command line.
        package: installed distribution under test.
        paths: test files, relative to the project's sources.
        switch: pytest plugin that enables this library. Empty: not supported, and the suite is skipped.
        select: pytest's -k.
        models: hub names for which tiny random models are created, and names of their configurations.
        packages: small packages from the registry that only the test files need.
        stand_ins: modules that test files import but this suite's tests do not use.
    """

    name: str
    package: str
    paths: tuple[str, ...]
    switch: str = HF
    select: str = ""
    models: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()


def _family(name: str) -> Suite:
    path = f"tests/models/{name}/test_modeling_{name}.py"
    return Suite(name, "transformers", (path,), packages=("parameterized",), stand_ins=("datasets",))


SUITES = (
    *(_family(name) for name in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")),
    Suite(
        "target_parameters",
        "peft",
        ("tests/test_target_parameters.py",),
        models=(
            ("trl-internal-testing/tiny-GptOssForCausalLM", "gpt_oss"),
            ("trl-internal-testing/tiny-Llama4ForCausalLM", "llama4_text"),
        ),
        packages=("parameterized",),
        stand_ins=("datasets", "diffusers"),
    ),
    Suite("sft", "trl", ("tests/test_sft_trainer.py",), select="moe or target_parameters or aux"),
    Suite("token_dispatcher", "megatron-core", ("tests/unit_tests/transformer/moe",), switch=""),
    Suite("moe", "torchtitan", ("tests/unit_tests/test_moe.py",), switch=""),
)


def make_model(kind: str, folder: Path) -> None:
    """Save a tiny random model, unless the folder contains one."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=128, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
