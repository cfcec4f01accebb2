"""Text files: where they are (paths, patterns, URLs), and what each format holds.

Here: sources of the configuration, local and remote files, blocks of whole documents. Not here:
tokens, and what a chat record means (chat/, preference/).
"""
