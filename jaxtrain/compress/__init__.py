"""What makes a trained model smaller: `jaxtrain quantize`.

A method of quantization is one function and one row of METHODS (methods.py).
"""
