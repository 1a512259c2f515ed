"""Handle one ECG: its leads and units as stored, its resampling, and the crops that are cut from it."""
