"""Two emulated nodes on one machine (network namespaces), and the benchmarks that run on them."""
