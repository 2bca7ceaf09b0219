"""Prefixes on disk: the engine's part. Files, keys and eviction are `onebox.store`'s."""
