"""What happens before an engine is ready, so that no request waits for it: kernels, graphs, workspace."""
