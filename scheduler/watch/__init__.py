"""Evidence to verdict (pure) to action."""
