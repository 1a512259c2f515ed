"""From a dataset to batches on the device: which crop comes when, fetching it, changing it."""
