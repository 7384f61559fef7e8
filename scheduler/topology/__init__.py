"""From a description of the fabric to rank order and placement; pure."""
