"""csps: a long-context LLM server with sequence-parallel prefill on Ray Serve."""

__version__ = "0.2.0"
