"""Figures: `python -m jaxtrain.bench WHAT`, on random data, beside the peers and the floor."""
