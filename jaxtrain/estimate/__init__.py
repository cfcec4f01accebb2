"""Estimates of a training step without an accelerator: dry run, fit, memory, traffic.

Measurements belong to `benchmarks/`, outside the package.
"""
