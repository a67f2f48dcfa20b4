"""Triton forms of `fusedmoe.kernels`, imported only on devices that run them."""

import torch

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import INTERPRET

if torch.version.hip is not None and not INTERPRET:
    raise ConfigError(
        f"fusedmoe: this PyTorch is for AMD GPUs (ROCm {torch.version.hip}), and the kernels run only on NVIDIA GPUs; "
        "keep tensors on the CPU, or install a CUDA build of PyTorch"
    )
