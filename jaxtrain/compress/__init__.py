"""Compression of trained models: `jaxtrain quantize`, `prune` and `shrink`.

A quantization method is one function and one entry of METHODS (methods.py).
"""
