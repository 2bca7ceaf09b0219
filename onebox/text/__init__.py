"""Text on both sides of the engine: chat template and tokenizer before it, streaming text and reasoning after it."""
