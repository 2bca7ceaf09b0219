"""The same checkpoint on several boxes through stock vLLM: will it load, what does it bring, start it, compare it."""
