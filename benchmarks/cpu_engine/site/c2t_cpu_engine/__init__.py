"""The part of the CPU engine that runs inside SGLang's processes."""
