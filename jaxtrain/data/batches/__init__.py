"""Batches: the documents of each row of each step, and their tokens as arrays.

Here: the order of documents, packing, mixtures and stages, augmentation, prefetching. The stream
is a function of (seed, step) alone. Not here: reading or tokenizing text.
"""
