"""Draft models: what a drafter is, and one folder for each."""
