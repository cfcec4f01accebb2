"""Preferences: pairs of answers and labelled answers, as stored texts and as batches.

Here: their shapes in files, which pairs fit a row, batches with two texts a pair. Not here: the
losses (`jaxtrain/objectives/`), and chat templates (chat/).
"""
