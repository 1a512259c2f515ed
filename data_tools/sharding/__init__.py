"""Make a dataset from archives: plan, shards, roles, tables, and checks of the result."""
