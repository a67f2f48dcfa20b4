"""Read the job of another framework from its configuration file."""

from __future__ import annotations

from pathlib import Path

from fusedmoe.errors import ConfigError
from fusedmoe.files import parse_json, read_text
from fusedmoe.models.job_files import ExternalJob, hf_job
from fusedmoe.models.megatron_job import LINE_DEFAULTS, line_arguments, megatron_job, yaml_arguments
from fusedmoe.models.titan_job import titan_job


def read_job(path: Path) -> ExternalJob:
    """Read a job's model and sizes.

    The suffix selects the format: `.json` for a config.json of Hugging Face transformers; `.toml` for a torchtitan job;
    `.yaml` and `.yml` for Megatron-core's arguments; any other for a command line with them.

    Raises `ConfigError` with file and field if the file cannot be read, or a field is missing or unsupported.
    """
    # Editors on Windows start a file with a byte-order mark.
    text = read_text(path).removeprefix("\ufeff")
    if path.suffix == ".json":
        data = parse_json(text, f"--config {path}")
        if not isinstance(data, dict):
            raise ConfigError(f"--config {path}: expected an object with the fields of a model")
        return hf_job(path, data)
    if path.suffix == ".toml":
        return titan_job(path, text)
    if path.suffix in (".yaml", ".yml"):
        return megatron_job(path, yaml_arguments(path, text))
    return megatron_job(path, LINE_DEFAULTS | line_arguments(path, text))
