"""`jaxtrain scaling`: scaling laws from runs of a study, and muP's coordinate check."""
