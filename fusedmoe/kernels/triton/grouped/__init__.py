"""Grouped products over rows sorted by expert. They need Triton."""
