"""Tokenizers: bytes, SentencePiece and tokenizers' JSON, read, trained and saved.

Here: text <-> token ids, special tokens. Not here: chat templates (chat/), and the tokenizers of
Hugging Face checkpoints (`jaxtrain/interop/`).
"""
