"""Conversations: their file formats, chat templates, and loss masks.

Here: records -> messages -> token ids with a loss mask, and the rule `too_long`. Not here: pairs of
answers (preference/), rows of batches (batches/).
"""
