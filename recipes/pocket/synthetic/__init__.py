"""Generated examples: a question, the right answer, and a check for the model's answer."""
