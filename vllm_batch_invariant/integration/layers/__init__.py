"""What stands for vLLM's layers and its attention, and the look at every layer of a loaded model."""
