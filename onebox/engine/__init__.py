"""Scheduling, sequences and sampling: token ids in, token ids out. Callers use `onebox.engine.api` alone."""
