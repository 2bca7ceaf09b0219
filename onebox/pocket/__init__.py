"""The pocket model: a small model of the whole architecture that ships with onebox. `recipes/pocket` is its recipe."""
