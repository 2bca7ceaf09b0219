"""Request bodies by dialect. Each checks its fields and gives the input of `prompt.py`."""
