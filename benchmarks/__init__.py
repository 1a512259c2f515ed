"""What it costs: one runner, one record a run, tables made from records. See README.md for the
rules."""
