"""Benchmarks on random data, compared with peers and the floor: `python -m benchmarks WHAT`."""
