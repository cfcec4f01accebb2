"""Training: the loop, the step and its transforms, guards, local SGD, preparing ahead.

Losses are in `objectives/`, optimizers in `optim/`, files of a run in `runs/`.
"""
