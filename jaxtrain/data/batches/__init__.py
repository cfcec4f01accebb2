"""From a token store to batches: order, mixture, packing, augmentation."""
