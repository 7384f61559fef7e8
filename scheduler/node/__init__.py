"""The node agent towards its ranks: what they report, who they are, and where they stand when they hang."""
