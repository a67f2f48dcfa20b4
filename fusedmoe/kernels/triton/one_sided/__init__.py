"""One-sided puts to other ranks' memory, signals, and waits; requires Triton."""
