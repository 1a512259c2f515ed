"""What training and inference do without: reports, other programs, the paper's tables."""
