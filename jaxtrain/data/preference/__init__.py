"""Preferences: pairs of answers and labelled answers (KTO), as stored texts and as batches.

Here: their file formats, the pairs that fit a row, batches with two texts per pair. Not here: the
losses (`jaxtrain/objectives/`), and chat templates (chat/).
"""
