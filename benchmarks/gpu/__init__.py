"""The standing run on a GPU: kernels, a ladder of checks, and serving."""
