"""Files, buckets, tables, processes and the terminal: what every tool needs, and nothing about ECGs."""
