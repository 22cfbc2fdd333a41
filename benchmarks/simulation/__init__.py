"""Tokens per second from recorded drafts and a cost curve, without a GPU."""
