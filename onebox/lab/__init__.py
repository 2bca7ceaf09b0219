"""What measures and tunes the engine on a device: decode timing and launch choices. Needs a CUDA GPU."""
