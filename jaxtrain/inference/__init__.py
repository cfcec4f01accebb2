"""Text from a trained model: generate, chat, and an engine for many requests.

Log-likelihoods of given text are in `evaluation/`.
"""
