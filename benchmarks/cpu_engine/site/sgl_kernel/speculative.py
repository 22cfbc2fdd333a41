"""`sgl_kernel.speculative`: the one op that SGLang's n-gram speculation imports from there."""

from .tree import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
