"""The embedded default target: a small gpt-oss-shaped model trained on the standard library's source."""
