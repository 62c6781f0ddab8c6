"""Backends run kernels: ``cupy`` on a GPU, ``emulator`` on the CPU. Neither is loaded until asked for."""
