"""Text files, local and remote, of every format, as records."""
