"""vllm-ascend: its patch points, and our settings, worker and attention for it."""
