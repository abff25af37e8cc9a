"""From a training checkpoint to a directory that serving engines load."""
