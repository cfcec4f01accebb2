"""Files on disk and at URLs: atomic replacement, full disks, checksums, strict YAML.

This package does not interpret the contents of files.
"""
