"""Kernels compiled ahead of time, launched without the package."""
