"""How the pocket model was made: `python -m recipes.pocket` runs every stage. README.md walks through them."""
