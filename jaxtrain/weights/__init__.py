"""How a parameter is declared, stored and multiplied: bf16, float8, nf4, int8, adapters.

What uses a weight is in `model/`; what trains is in `finetune/`.
"""
