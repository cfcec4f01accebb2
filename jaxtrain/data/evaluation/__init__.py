"""In-context tasks as prompts and token rows; the model is in `jaxtrain/evaluation/`."""
