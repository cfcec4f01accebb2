"""Tokenizers: trained, loaded from files, saved."""
