"""What the target computes of what was drafted: packed rows, or a uniform window of some width."""
