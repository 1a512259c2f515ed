"""Fine-tuning: what it trains, and what it starts from."""
