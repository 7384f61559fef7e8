"""A node's own health: checks on a schedule, each in a thread or child that may hang, and what they find."""
