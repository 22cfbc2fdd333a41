"""The papers' tables and figures, run again on the project's own pair."""
