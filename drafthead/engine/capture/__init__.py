"""Hidden states out of vLLM: the connector, what it keeps, and the shards it writes."""
