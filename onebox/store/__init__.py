"""Prefixes on disk: keys, chunk files, entries and the directory that holds them. Knows bytes, not what they mean."""
