"""Figures: `python -m benchmarks WHAT`, on random data, beside the peers and the floor."""
