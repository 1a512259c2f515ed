"""One ECG: its leads and units as stored, its resampling, and the crops made of it."""
