"""The draft head, and the frozen pieces of a target that it needs."""
