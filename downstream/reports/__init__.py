"""Everything that draws, or writes HTML and Markdown."""
