"""The pocket model: a small model of the whole architecture that ships with onebox, and how it was made.

`python -m onebox.pocket.prepare` collects and tokenises the text; `train`, `export` and `evaluate` do the rest.
"""
