"""The pocket model's DFlash drafter: prompts, the target's own answers and features, training, acceptance."""
