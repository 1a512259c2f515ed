"""What sharding does without: hospitals' files, synthetic archives, label tables, plots."""
