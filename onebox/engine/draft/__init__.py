"""Speculation on the host: which drafter, how deep to draft, and the drafter that needs no model."""
