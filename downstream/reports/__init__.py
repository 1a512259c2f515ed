"""Reports: draws figures, and writes HTML and Markdown."""
