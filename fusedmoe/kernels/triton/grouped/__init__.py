"""Grouped GEMMs over rows sorted by expert; requires Triton."""
