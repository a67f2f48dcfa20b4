"""Triton kernels that sort, copy, sum and pack rows. Needs Triton; imported only where it serves."""
