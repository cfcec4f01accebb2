"""Text from a trained model: generate and chat.

Log-likelihoods of given text are in `evaluation/`.
"""
