"""From a dataset to batches on the device: the order of crops, reading them, augmenting them."""
