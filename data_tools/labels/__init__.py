"""Label tables of published archives."""
