"""Model shapes, tensor names, format sizes, hardware peaks, errors. Stdlib only."""
