"""Pairs of a target and its drafts that are made for benchmarks and demonstrations."""
