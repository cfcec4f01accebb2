"""Hugging Face checkpoints in and out; `jaxtrain import` is the command."""
