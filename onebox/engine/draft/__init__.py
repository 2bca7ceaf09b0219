"""Speculation on the host: drafters that need no model, how deep to draft, and what came of it."""
