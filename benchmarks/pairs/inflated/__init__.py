"""Targets of realistic cost whose function is a small pair's."""
