"""Evaluation tasks: bundles of examples, few-shot prompts, packed rows of scored tokens.

Here: host code that makes arrays. Not here: the model that scores them (`jaxtrain/evaluation/`).
"""
