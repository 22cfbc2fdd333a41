"""Run by every Python process of the CPU engine before anything else: SGLang's imports make so many objects that the
garbage collector, which finds nothing among them, takes a fifth of a server's start."""

import gc

gc.set_threshold(50_000, 20, 20)
