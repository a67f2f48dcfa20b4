"""Jobs of Megatron-core: command lines and YAML, and refused arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.models.external_job import TrainingState
from fusedmoe.models.job_files import read_job
from fusedmoe.models.megatron_job import line_arguments, megatron_job, yaml_arguments
from fusedmoe.models.transformer import Transformer

FILES = Path(__file__).parents[1] / "data" / "job_files"
LINE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --seq-length 128"


def job(folder: Path, text: str, name: str = "job.sh") -> Any:
    path = folder / name
    path.write_text(text)
    return read_job(path)


def num_parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in Transformer(read_job(FILES / name).model, device="meta").parameters())


def test_recorded_jobs_have_published_parameters_and_their_sizes() -> None:
    assert num_parameters("mixtral_8x7b_megatron.sh") == pytest.approx(46.7e9, rel=0.01)
    assert num_parameters("deepseek_v3_megatron.yaml") == pytest.approx(671e9, rel=0.01)
    mixtral, deepseek = (read_job(FILES / n) for n in ("mixtral_8x7b_megatron.sh", "deepseek_v3_megatron.yaml"))
    assert mixtral.settings == {"mp": 2, "ep": 8, "esp": 1}
    assert mixtral.state == TrainingState(2, 4, 12, "optimizer") and mixtral.model.batch == 1
    assert deepseek.settings == {"mp": 1, "ep": 64, "esp": 1, "recompute": True}
    assert mixtral.global_batch == 256 and deepseek.global_batch is None
    assert deepseek.model.dense_layers == 3 and deepseek.model.shared_hidden == 2048


def test_missing_arguments_have_the_defaults_of_megatron(tmp_path: Path) -> None:
    read = job(tmp_path, f"{LINE} --swiglu --tensor-model-parallel-size=2")
    assert (read.model.hidden, read.model.k, read.model.key_heads, read.model.head_dim) == (128, 2, 4, 16)
    assert read.model.bias and read.model.norm == "layer" and read.model.positions == "learned"
    assert read.settings == {"mp": 2, "ep": 1, "esp": 2} and read.state == TrainingState()
    assert any("--vocab-size" in words for words in read.assumptions)
    plain = job(tmp_path, LINE)
    assert plain.settings == {} and plain.model.hidden == 256 and plain.model.expert == "ffn"


def test_yaml_and_command_line_are_read_alike(tmp_path: Path) -> None:
    text = f"args=(\n  {LINE} \\\n  --moe-expert-capacity-factor 1.25 --bf16 # comment --num-layers 9\n)"
    nested = "language_model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n  num_moe_experts: 8\n"
    nested += "seq_length: 128\nbf16: true\nmoe:\n  --moe-expert-capacity-factor: 1.25\n"
    line, yaml = job(tmp_path, text), job(tmp_path, nested, "job.yaml")
    assert line == yaml and line.model.capacity_factor == 1.25 and line.model.layers == 4


def test_words_of_a_command_line_become_arguments() -> None:
    found = line_arguments(Path("x"), "python -u a.py --one 1 --two=b --flag --three -4 \\\n --four 'c d' e")
    assert found == {"one": 1, "two": "b", "flag": True, "three": -4, "four": "c d"}
    assert yaml_arguments(Path("x"), "a-b: {c: 1}\n--d-e: f") == {"c": 1, "d_e": "f"}


@pytest.mark.parametrize(
    "syntax", ["| tee log", "> log", ">log", "2> log", "2>&1 | tee log", "&& echo done", "&", "; echo done", "|tee log"]
)
def test_shell_syntax_ends_the_arguments(syntax: str) -> None:
    found = line_arguments(Path("x"), f"torchrun a.py --one 1 --flag {syntax}")
    assert found == {"one": 1, "flag": True}
    assert line_arguments(Path("x"), f"torchrun a.py --flag --one 1 {syntax}") == found


def test_arguments_in_a_quoted_string_are_read(tmp_path: Path) -> None:
    text = f'export ARGS="\n  {LINE} \\\n  --moe-layer-freq ([0]*1+[1]*3) --bf16"\ntorchrun a.py $ARGS --swiglu'
    expected = job(tmp_path, f"{LINE} --moe-layer-freq '([0]*1+[1]*3)' --bf16 --swiglu")
    assert job(tmp_path, text) == expected and expected.model.dense_layers == 1
    assert line_arguments(Path("x"), "A='--one'\nA+=\" --two 2\"\nB='c --d'") == {"one": True, "two": 2, "d": True}


def test_carriage_returns_are_whitespace(tmp_path: Path) -> None:
    lines = ["torchrun a.py \\", f"  {LINE} \\", "  --bf16 \\", "  --swiglu", ""]
    found = [job(tmp_path, end.join(lines)) for end in ("\n", "\r\n")]
    assert found[0] == found[1]


def test_query_groups_of_a_command_line_need_their_flag(tmp_path: Path) -> None:
    """As in `core_transformer_config_from_args`; a YAML file sets the fields of the model."""
    flags = {"--group-query-attention": 1, "--num-query-groups 2": 4, "--group-query-attention --num-query-groups 2": 2}
    assert {more: job(tmp_path, f"{LINE} {more}").model.key_heads for more in flags} == flags
    words = iter(LINE.split())
    yaml = "".join(f"{name}: {value}\n" for name, value in zip(words, words, strict=True)) + "num-query-groups: 2"
    assert job(tmp_path, yaml, "job.yaml").model.key_heads == 2
    assert job(tmp_path, f"{yaml}\ngroup_query_attention: false", "job.yaml").model.key_heads == 4


def test_negative_capacity_factor_drops_no_token(tmp_path: Path) -> None:
    assert job(tmp_path, f"{LINE} --moe-expert-capacity-factor -1").model.capacity_factor is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--context-parallel-size 2", "context_parallel_size = 2 .* divide --seq-len by 2"),
        ("--moe-layer-freq 2", "moe_layer_freq = 2"),
        ("--moe-layer-freq '([1]*2+[0]*2)'", "before all layers"),
        ("--moe-layer-freq '__import__(1)'", "moe_layer_freq"),
        ("--num-layers $LAYERS", "num_layers = '.LAYERS'"),
        ("--multi-latent-attention", "kv_lora_rank is missing"),
        ("--swiglu maybe", "swiglu = 'maybe'"),
        *((f"--moe-expert-capacity-factor {n}", f"moe_expert_capacity_factor = '?{n}") for n in ("much", "0", "nan")),
        ("--num-query-groups 3 --group-query-attention", "kv_heads"),
        (f"--num-layers {'9' * 5000}", "num_layers = '9"),
    ],
)
def test_unsupported_argument_error_names_argument_and_file(more: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(f"{LINE} {more}")
    with pytest.raises(ConfigError, match=message) as error:
        read_job(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("missing", ["num-layers", "hidden-size", "num-attention-heads", "num-experts", "seq-length"])
def test_missing_argument_error_names_it(missing: str, tmp_path: Path) -> None:
    words = LINE.split("--")
    text = " ".join(f"--{word}" for word in words if word and not word.startswith(missing))
    with pytest.raises(ConfigError, match=missing.replace("-", "_")):
        job(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *[("a: [", "a.yaml"), ("- 1", "a.yml"), ("--a 'b", "a.sh"), ('A="--a \'b"', "a.sh")],
        *[("a: &a\n  b: *a", "a.yaml: b is an alias"), ("&a {b: {c: *a}}", "a.yaml: c is an alias")],
        *[("{a: " * 5000 + "1" + "}" * 5000, "a.yaml"), ("a: 2024-99-99", "a.yaml")],
        *[("num_layers: 1\nhidden_size: 8\nnum_attention_heads: 1\nmoe_layer_freq: [[1]]", "a.yaml: moe_layer_freq")],
    ],
)
def test_invalid_file_error_names_it(text: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        job(tmp_path, text, name.partition(":")[0])


def test_dense_layers_are_read_from_a_pattern() -> None:
    data = line_arguments(Path("x"), f'{LINE} --moe-layer-freq "([0]*1+[1,1]+[1])"')
    assert megatron_job(Path("x"), data).model.dense_layers == 1


def test_pipeline_stages_share_layers_and_ranks(tmp_path: Path) -> None:
    read = job(tmp_path, f"{LINE} --pipeline-model-parallel-size 2 --moe-layer-freq '([0]*1+[1]*3)'")
    stage, ranks = read.one_stage(64, None)
    assert (read.stages, stage.stages, ranks) == (2, 1, 32)
    assert (stage.model.layers, stage.model.dense_layers) == (2, 0)
    assert "2 of 4 layers, all with experts, on 32 of 64 ranks" in stage.assumptions[0]
    given, ranks = read.one_stage(32, 3)
    assert ranks == 32 and given.model == read.model and given.assumptions[0].startswith("one pipeline stage")
    for ranks in (33, None):
        with pytest.raises(ConfigError, match="plan one stage: --layers 2 and its own --ranks"):
            read.one_stage(ranks, None)
    assert job(tmp_path, LINE).one_stage(33, None) == (job(tmp_path, LINE), 33)
