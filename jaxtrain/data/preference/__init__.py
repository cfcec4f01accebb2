"""Preference pairs: records, stores and batches."""
