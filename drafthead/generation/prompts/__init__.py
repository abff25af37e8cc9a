"""From sources to the three splits of the prompts artefact."""
