"""What is asked of an encoder: labels, their splits, losses."""
