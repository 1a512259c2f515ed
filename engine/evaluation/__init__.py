"""How good a run is, and what it looked like."""
