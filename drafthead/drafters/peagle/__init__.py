"""P-EAGLE: the EAGLE-3 model, trained to fill all draft positions in one pass."""
