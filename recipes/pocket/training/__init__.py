"""The network with gradients, its optimizer, and the batches that it reads."""
