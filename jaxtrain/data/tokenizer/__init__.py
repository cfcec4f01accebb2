"""Tokenizers: bytes, SentencePiece and tokenizer.json; loading, training and saving.

Here: text <-> token ids, special tokens. Not here: chat templates (chat/), and the tokenizers of
Hugging Face checkpoints (`jaxtrain/interop/`).
"""
