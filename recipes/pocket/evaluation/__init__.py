"""Held-out questions and texts, and the tables made of the results."""
