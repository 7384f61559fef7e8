"""The operator health console."""
