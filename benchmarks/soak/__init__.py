"""The soak: mixed, hostile and unlucky use of a real `onebox serve`, with checks while it runs.

`make soak` runs it; docs/soak.md says what it does and what its report means.
"""
