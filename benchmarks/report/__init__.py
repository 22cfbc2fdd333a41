"""Rows to tables, pages and pictures."""
