"""Batches: which documents are in which row of which step, and their tokens as arrays.

Here: the order of documents, packing, mixtures and stages, augmentation, reading ahead. The stream
is a function of (seed, step) alone. Not here: reading or tokenizing text.
"""
