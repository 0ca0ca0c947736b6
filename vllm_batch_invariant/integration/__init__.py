"""The only rooms that import vLLM: they put the operations where its engine calls them."""
