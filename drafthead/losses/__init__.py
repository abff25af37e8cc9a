"""Objectives, and the fused language-model head that applies them."""
