"""The pocket model: a small model of the whole architecture that ships with onebox, and how it was made.

`python -m onebox.pocket` runs the whole recipe; `prepare`, `train`, `export` and `evaluate` are its stages.
"""
