"""Processes of one job: launch, rendezvous, failure detection, XLA flags, runtime setup.

No model and no data; arrays and meshes are in `parallel/`.
"""
