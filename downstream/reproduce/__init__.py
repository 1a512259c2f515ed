"""The paper's tables as jobs."""
