"""Measurements on a GPU, and of the emulator."""
