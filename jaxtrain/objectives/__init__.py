"""Objectives: (model, params, batch) -> sums of losses. One file an objective, one table.

Optimizers are in `optim/`; what a step does with the sums is in `train/step.py`.
"""

from jaxtrain.objectives.losses import (
    NEXT_TOKEN,
    Objective,
    Sums,
    answer_logps,
    make_objective,
    next_token,
)

__all__ = ["NEXT_TOKEN", "Objective", "Sums", "answer_logps", "make_objective", "next_token"]
