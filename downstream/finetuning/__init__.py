"""Fine-tuning: its settings, the model that it starts from, and what it trains."""
