"""Matmuls for Hopper, in Pallas Mosaic GPU: symmetric products, and a GEMM with an epilogue."""

from jaxtrain_kernels.matmul.hopper.symmetric import (
    gram,
    square_polynomial,
    supports,
    symmetric_product,
)

__all__ = ["gram", "square_polynomial", "supports", "symmetric_product"]
