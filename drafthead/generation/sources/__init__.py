"""Where prompts come from: the catalogue of public data sets, local files, and one adapter per schema."""
