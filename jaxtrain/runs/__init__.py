"""A run directory: checkpoints, metrics, lock, environment, report, the saved model.

No training code: `train/` writes a run directory, and other packages read it.
"""
