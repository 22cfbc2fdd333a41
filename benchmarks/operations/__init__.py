"""What a decoding step dispatches to a GPU for C2T, counted on a CPU: kernels, other operations and waits."""
