"""The HTTP server: OpenAI's and Anthropic's APIs over `onebox.engine.api` and `onebox.text`. No tensors here.

A request passes, each once: `endpoints/` (route) -> `schemas/` (checked fields) -> `prompt.py` (token ids, grammar,
thinking budget) -> `service.py` (submission to the engine) -> `answer.py` (engine events to text deltas) -> `reply.py`
and `sse.py` (JSON or server-sent events, in the dialect's form that the endpoint defines).
"""
