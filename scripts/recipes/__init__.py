"""Which of vLLM's published recipes start: reads them, sends them through the start-up check, writes a page."""
