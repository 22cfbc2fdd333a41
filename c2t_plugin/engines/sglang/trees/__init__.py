"""Tree mode: per request a draft tree of its own shape, cut as it grows (C2T 4.2), verified by SGLang."""
