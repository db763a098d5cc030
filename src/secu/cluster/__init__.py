"""Layer 4: embeddings → labels, centers and losses of all heads, and metrics: tensors in, tensors out."""
