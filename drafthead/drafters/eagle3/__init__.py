"""The EAGLE-3 drafter."""
