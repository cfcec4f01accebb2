"""Conversations: their shapes in files, chat templates, which tokens are learned.

Here: records -> messages -> token ids with a loss mask, and what `too_long` leaves out. Not here:
pairs of answers (preference/), rows of batches (batches/).
"""
