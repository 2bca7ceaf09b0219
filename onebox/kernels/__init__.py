"""Operations: a plain torch twin and a Triton kernel of each, side by side. See README.md for letters and rules."""
