"""Prefixes on disk under attack and measured: damaged directories, killed writers, shared directories, speed."""
