"""Grouped products over rows sorted by expert, as Triton kernels. Needs Triton; imported only where it serves."""
