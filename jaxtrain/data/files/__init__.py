"""Text files: finding them (paths, patterns, URLs), and reading each format.

Here: sources of the configuration, local and remote files, blocks of whole documents. Not here:
tokens, and the meaning of chat records (chat/, preference/).
"""
