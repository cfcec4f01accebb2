"""The token store: text of any source tokenized into files with random access.

Here: preparing (splits, the tokenizer's training text, workers), the files, their checksums, what a
corpus holds. Not here: the order of documents and their place in rows (batches/).
"""
