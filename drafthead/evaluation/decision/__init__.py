"""From results to a decision: cost model, prices, verdict, and how to serve."""
