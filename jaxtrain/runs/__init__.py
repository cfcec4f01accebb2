"""A run directory: checkpoints, metrics, lock, environment, report, the saved model.

Nothing here trains; `train/` writes a run directory and others read it.
"""
