"""Servers of both engines, the clients that measure them, and the arms that they run."""
