"""Where an answer begins: Qwen3.5's template opens <think> in the prompt, so the model's own text starts inside."""

__all__ = ["begins_in_reasoning"]


def begins_in_reasoning(prompt: str) -> bool:
    """Whether the answer to this prompt starts inside a <think> block that the prompt opened."""
    return prompt.rstrip().endswith("<think>")
