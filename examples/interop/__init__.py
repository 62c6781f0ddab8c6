"""Decode over arrays of other libraries."""
