"""Recorded drafts: the file format, and the recorder of a running server."""
