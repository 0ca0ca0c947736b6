"""The operations: what each computes (reduction, reference) and how, for each device. Nothing here imports vLLM."""
