"""A cluster of two nodes on one machine: two network namespaces, and everything that is measured there."""
