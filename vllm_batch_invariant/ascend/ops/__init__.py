"""The operations on an NPU, in triton-ascend: a module each, with the functions of those for other devices."""
