"""Hand a conversation from one language model to another by mapping its KV cache."""

__version__ = "0.1.0.dev0"
