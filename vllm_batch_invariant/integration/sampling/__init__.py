"""What samples, in both of vLLM's model runners: candidates, filters, seeds, drafts, grammars."""
