"""Locates NVSHMEM's package and device bitcode, without importing Triton or loading a library."""

from __future__ import annotations

from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from fusedmoe.errors import ConfigError

#: Default pin of NVSHMEM, nvidia-nvshmem-cu12 or -cu13 by CUDA's major version. CUDA builds of torch have separate
#: pins: 3.4.5 for torch 2.11, 3.7.2 for torch 2.15.
NVSHMEM_VERSION = "3.4.5"

_MIN_CAPABILITY = 80

HOW_TO_INSTALL = "pip install 'fusedmoe[nvshmem]' for CUDA 13, 'fusedmoe[nvshmem-cu12]' for CUDA 12"


def nvshmem_home() -> Path | None:
    """Return the NVSHMEM package folder, which contains include/ and lib/, or None."""
    spec = PathFinder.find_spec("nvidia")
    folders = [Path(folder) / "nvshmem" for folder in (spec.submodule_search_locations or [] if spec else [])]
    return next((folder for folder in folders if (folder / "lib" / "libnvshmem_host.so.3").exists()), None)


def nvshmem_packages() -> dict[int, str]:
    """Map each CUDA major version to the version of its installed NVSHMEM package."""
    versions = {}
    for cuda in (12, 13):
        try:
            versions[cuda] = metadata.version(f"nvidia-nvshmem-cu{cuda}")
        except metadata.PackageNotFoundError:
            continue
    return versions


def nvshmem_bitcode() -> dict[str, str]:
    """Return the `extern_libs` launch option for kernels that call NVSHMEM's device functions.

    NVSHMEM 3.4 ships one library for all GPUs. Of later versions' libraries, one per compute capability, selects the
    newest that the current GPU can run; without a GPU, the oldest.

    Raises:
        ConfigError: the package is not installed, or has no suitable library.
    """
    home = nvshmem_home()
    if home is None:
        raise ConfigError(f"NVSHMEM's package is not installed: {HOW_TO_INSTALL}")
    lib = home / "lib"
    path = lib / "libnvshmem_device.bc"
    if not path.exists():
        paths_by_capability = {int(one.stem.rpartition("_")[2]): one for one in lib.glob("libnvshmem_device_sm_*.bc")}
        has_gpu = torch.cuda.is_available()
        major, minor = torch.cuda.get_device_capability() if has_gpu else divmod(_MIN_CAPABILITY, 10)
        supported = [each for each in paths_by_capability if _MIN_CAPABILITY <= each <= 10 * major + minor]
        if not supported:
            raise ConfigError(f"{path.name} not found in {lib}: install NVSHMEM {NVSHMEM_VERSION}")
        path = paths_by_capability[max(supported)]
    return {"libnvshmem_device": str(path)}
