"""Files on disk: whole-file replacement, a full disk, checksums, strict YAML.

Nothing here knows what a file means.
"""
