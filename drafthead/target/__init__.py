"""The frozen target model: its configuration, tensors and tokenizer."""
