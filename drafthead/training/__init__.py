"""Training a draft head with accelerate and DeepSpeed."""
