"""jaxtrain: train language models fast with JAX."""

__version__ = "0.1.0"
