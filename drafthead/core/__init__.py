"""EAGLE-3's mathematics on plain tensors: no files, no engine, no trainer."""
