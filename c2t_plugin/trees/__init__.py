"""Draft trees: how they grow in fixed slots, and what shape they may have. Imports no engine."""
