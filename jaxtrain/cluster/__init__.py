"""Processes of one job: launching them, how they meet and notice a death, XLA flags, the runtime.

No model and no data; arrays and meshes are in `parallel/`.
"""
