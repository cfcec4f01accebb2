"""Evaluation tasks: bundles of examples, prompts with their shots, rows of scored tokens.

Here: host code that makes arrays. Not here: the model that scores them (`jaxtrain/evaluation/`).
"""
