"""Rows put straight into other ranks' memory, signals, and waits for them. They need Triton."""
