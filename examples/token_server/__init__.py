"""A small token server: a tiny causal language model on a CPU behind vLLM's routes. See `server`."""
