"""The target's hidden states over its own text."""
