"""One stored image → a square of uint8: open its file, read its header, decode it, cut out parts and scale them."""
