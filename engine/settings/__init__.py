"""Settings of a run, and how commands take them."""
