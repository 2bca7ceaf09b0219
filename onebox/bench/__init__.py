"""Measures any OpenAI-compatible server over HTTP, so that onebox and its neighbours are measured alike. No torch."""
