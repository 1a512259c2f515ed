"""Settings of a run, how commands take them, and the random numbers that follow from its seed."""
