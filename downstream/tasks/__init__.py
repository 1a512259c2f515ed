"""Tasks: their labels, splits and losses."""
