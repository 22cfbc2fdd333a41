"""Draft trees without an engine."""
