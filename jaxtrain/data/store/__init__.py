"""The token store: documents encoded, written, opened, described."""
