"""Layer 2: a batch of images → inputs of the encoder, random views for training and plain views for evaluation."""
