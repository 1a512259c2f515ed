"""What is learned without labels: one loss a file, composed by ObjectiveConfig."""
