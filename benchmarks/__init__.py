"""Measurements: each writes rows, and every published table is generated from rows. Never installed."""
