"""Validation loss, log-likelihoods, CORE and other tasks, lm-eval, scores of documents.

Text that a model writes is in `inference/`; charts of a run are in `runs/`.
"""
