"""Tutel's low-level kernels by name."""
