"""The engine in a process of its own: the caller's side, the child's side, and the messages between them."""
