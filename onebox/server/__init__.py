"""The OpenAI HTTP API over `onebox.engine.api` and `onebox.text`. Knows Events and text, never tensors."""
