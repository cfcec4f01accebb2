"""What a training step needs, without an accelerator: dry run, fit, memory, traffic.

Measurements belong to `benchmarks/`, outside the package.
"""
