"""The Qwen3.5-MoE forward pass, its MTP head, loading its weights, and a tiny random member of the family."""
