"""Measures any OpenAI-compatible server over HTTP, with the same method for onebox and other engines. No torch."""
