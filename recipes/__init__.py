"""What was done with onebox, step by step: not part of the package."""
