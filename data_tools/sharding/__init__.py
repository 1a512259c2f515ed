"""From archives to a dataset: plan, shards, roles, tables, checks."""
