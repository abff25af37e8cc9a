"""What passes between stages: prompts, responses and the store of hidden states."""
