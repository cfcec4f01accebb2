"""Hyperparameter sweeps with Optuna: `jaxtrain sweep SWEEP.yaml`.

Each trial is an ordinary run directory. Samplers, pruners, storage and importance are Optuna's; no
other folder imports it.
"""
