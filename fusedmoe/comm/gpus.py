"""Whether there are GPUs here, and why not, in words."""

from __future__ import annotations

import ctypes
from ctypes import c_int

import torch


def no_gpu() -> str:
    """Why the driver offers no GPU here; "" where it does. Loads nothing but the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver here (libcuda.so.1 cannot be loaded), and it is for NVIDIA GPUs"
    if error := driver.cuInit(0):
        return f"the NVIDIA driver does not start (cuInit returned {error}); nvidia-smi may say why"
    count = c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU; see CUDA_VISIBLE_DEVICES"
    return ""


def not_for_torch() -> str:
    """Why PyTorch cannot use the driver's GPUs; "" where it can."""
    if torch.version.cuda is None:
        return "this PyTorch is a build without CUDA; install one for CUDA"
    if not torch.cuda.is_available():
        return f"PyTorch for CUDA {torch.version.cuda} finds no GPU; the driver may be too old for it (nvidia-smi)"
    return ""
