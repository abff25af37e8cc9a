"""What was measured, read back and summarised with intervals; no formatting."""
