"""The engine around the layers: how the mode is installed, steps, weights, servers, refusals from workers."""
