"""Kernels for Hopper in Gluon, Triton's language of explicit layouts, barriers and asynchronous copies and products.

Nothing imports this but what launches, compiles or tests such kernels.
"""
