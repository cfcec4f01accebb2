"""The token store: text of any source tokenized into files with random access.

Here: preparation (splits, the tokenizer's training text, workers), files, checksums, facts of a
corpus. Not here: the order of documents and their packing into rows (batches/).
"""
