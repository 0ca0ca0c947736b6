"""What the operations cost beside plain PyTorch and vLLM; one script an operation, one format of data."""
