"""Rules that decide which draft tokens the target verifies."""
