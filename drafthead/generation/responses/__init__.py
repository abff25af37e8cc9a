"""The target's answers, or those that the data has."""
